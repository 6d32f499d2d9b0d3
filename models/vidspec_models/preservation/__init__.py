"""Which video rows the draft sees: scores, budgets and named strategies, as pure functions on arrays."""
