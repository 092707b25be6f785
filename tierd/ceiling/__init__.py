"""The ceiling: the hit ratio that more or less memory would give, estimated while the daemon runs."""
