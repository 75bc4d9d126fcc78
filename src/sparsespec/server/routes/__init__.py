"""One module a family of endpoints; each has a `router`."""
