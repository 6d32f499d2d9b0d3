"""One file per kind of model family, with only what differs between families."""
