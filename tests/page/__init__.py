"""A package, so that its fixtures end with it: a browser keeps an event loop running in the test thread."""
