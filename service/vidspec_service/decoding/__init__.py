"""Video bytes to chosen RGB frames and their timestamps; imports no torch."""
