"""`bench pruning`: what each preservation strategy costs the draft in acceptance, and saves it in time."""
