"""One file per model family, with only what differs between families."""
