"""How the bundled pair is trained and measured; only `vidspec train-bundled` and `vidspec eval-bundled` import this."""
