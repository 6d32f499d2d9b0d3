"""Checkpoints to models ready to serve, and a readable line where that fails."""
