"""Other caches at the work of the data plane, side by side with tierd and a memory copy."""
