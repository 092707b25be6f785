"""Answers of acquire.

Purpose: values between the conductor and the server. Non-purpose: how they come about (cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.core.plan import Plan, Served

NOTHING = Served(0, [], Plan())


@dataclass(frozen=True, slots=True)
class Lease:
    """What acquire answers. whole: False if more is held than is served now. tier_tokens: where it was found."""

    lease: int
    served: Served
    tier_tokens: list[int]
    whole: bool
