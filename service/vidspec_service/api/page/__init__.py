"""The files of the page at `/`."""
