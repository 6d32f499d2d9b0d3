"""HTTP only: request validation, routes, server-sent events; imports no torch."""
