"""Measures the time to first token of an engine that loads its prefix from a daemon's tiers."""
