"""`bench pruning`: what each preservation strategy costs in acceptance rate and saves in the draft's time."""
