"""One file per model family, stating only what differs."""
