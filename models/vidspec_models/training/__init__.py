"""Training and evaluation of the bundled pair; only `vidspec train-bundled` and `vidspec eval-bundled` import this."""
