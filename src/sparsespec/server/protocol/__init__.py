"""Bodies of requests and responses, by endpoint. Requests are parsed by these; responses are written as plain JSON of their shape."""
