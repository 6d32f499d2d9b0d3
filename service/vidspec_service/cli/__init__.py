"""The command line: one module per command (`bench`: one object per benchmark), each with `add_arguments` and `run`."""
