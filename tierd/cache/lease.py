"""What acquire answers, and what it may tell before.

Purpose: values between the conductor and the server. Non-purpose: how they come about (cache.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierd.core.plan import Plan, Served

NOTHING = Served(0, [], Plan())
Preview = Callable[[Served], None] | None
"""Hears what is going to be served if its bytes are what they should be, where it takes a while to look. Nothing is given by it."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What acquire answers. whole: False if more is held than is served now. tier_tokens: where it was found."""

    lease: int
    served: Served
    tier_tokens: list[int]
    whole: bool
