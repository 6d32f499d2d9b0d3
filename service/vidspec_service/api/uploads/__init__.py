"""What a client sends: the fields of its body, and the videos that the body has or names."""
