"""The HTTP server: an OpenAI-compatible API in one process, the engine loop in another. Needs the extra `serve`."""
