"""Other engines: their configuration from ours, and vLLM behind our own server."""
