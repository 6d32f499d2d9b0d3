"""One request from its video to its last token, and the answer it becomes."""
