"""KV events: routers are told which tier holds which of an engine's blocks. See README.md."""
