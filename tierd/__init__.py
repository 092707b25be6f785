"""tierd keeps the KV cache of LLMs across GPU memory, host memory, NVMe and an archive."""

__version__ = "0.1.0"
