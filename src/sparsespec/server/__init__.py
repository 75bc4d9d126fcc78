"""The HTTP server: OpenAI's API around the engine. docs/serving.md says what it does; app.py puts it together."""
