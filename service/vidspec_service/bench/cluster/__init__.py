"""`bench cluster`: how far one engine's measured times carry when a hundred of them share the work; simulated."""
