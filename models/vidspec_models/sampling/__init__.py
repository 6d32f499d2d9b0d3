"""Logits to tokens: coupled sampling, with noise that draft and target share."""
