"""What a client sends: its body's fields, and the one video in it, wherever it is."""
