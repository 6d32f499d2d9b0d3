"""The service on a Ray cluster: frontends, engines, and answers that outlive the engine that began them."""
