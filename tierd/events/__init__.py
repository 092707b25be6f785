"""KV events tell routers which tier holds which of an engine's blocks. See README.md."""
