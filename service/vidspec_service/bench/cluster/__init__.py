"""`bench cluster`: simulates a cluster of about a hundred engines from the measured times of one engine."""
