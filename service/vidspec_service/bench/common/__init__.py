"""What every bench shares: child processes, servers, facts of a run, intervals, prompts, and the one report."""
