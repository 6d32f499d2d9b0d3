"""`bench speed`: the ways to decode on the same prompts, next to stock transformers and the speed model."""
