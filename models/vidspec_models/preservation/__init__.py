"""Which video rows a draft sees: scores, budgets and named strategies, as pure functions on arrays."""
