"""What every bench shares: child processes, facts of a run, intervals, prompts, and the one report."""
