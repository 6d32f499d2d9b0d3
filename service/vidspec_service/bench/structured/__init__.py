"""`vidspec bench structured`: what a grammar costs and gains, and whether the JSON says what the clips show."""
