"""The engine in the API process: it owns the workers and turns their messages into events."""
