"""vidspec's running service: HTTP, video decoding and the speculative-decoding engine."""

__version__ = "0.1.0"
