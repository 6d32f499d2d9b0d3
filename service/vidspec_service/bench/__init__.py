"""Benches: what is measured, how it is aggregated, how it is reported. The command line is in `cli/bench.py`."""
