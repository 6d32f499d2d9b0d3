"""Which draft tokens are proposed, which can still be accepted, and how many to propose."""
