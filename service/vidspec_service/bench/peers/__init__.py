"""`vidspec bench peers`: the bundled pair's language models in other engines, next to ours, on the same prompts."""
