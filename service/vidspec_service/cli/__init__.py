"""The command line: one module per command (`bench`: one class per benchmark), each with `add_arguments` and `run`."""
