"""Decoding in confined child processes: the pool's end of one, the child itself, its sandbox."""
