"""Parallel speculative decoding: workers, channels and the client the API talks to; imports no HTTP."""
