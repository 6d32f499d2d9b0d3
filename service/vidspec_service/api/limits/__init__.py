"""Limits on callers: who may ask, how much at once, who is served next and how long a request may take."""
