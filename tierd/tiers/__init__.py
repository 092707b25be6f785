"""Tiers: they move bytes and never decide. `tier.py` is what the others see of them."""
