"""Tiers move bytes and never decide. `tier.py` is their interface for the rest of the daemon."""
