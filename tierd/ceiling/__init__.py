"""The ceiling: the hit share that more or less memory would give, estimated while the daemon runs."""
