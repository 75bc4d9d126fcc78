"""Load on an OpenAI-compatible server, from outside: `sparsespec bench serve`."""
