"""Bodies by endpoint. Requests are parsed by these; responses are written as plain JSON of their shape."""
