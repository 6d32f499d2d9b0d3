"""`bench serve`: a server under load over HTTP: latencies, goodput, overload and soak runs."""
