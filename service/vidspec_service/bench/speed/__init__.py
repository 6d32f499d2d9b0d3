"""`bench speed`: every speculation mode on the same prompts, compared with stock transformers and the speed model."""
