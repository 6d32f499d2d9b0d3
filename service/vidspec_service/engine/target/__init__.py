"""The target worker: it decides every token."""
