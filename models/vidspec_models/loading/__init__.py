"""Load checkpoints into models ready to serve; a readable one-line message if that fails."""
