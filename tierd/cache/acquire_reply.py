"""The answer of acquire: a value between the cache and the server."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.core.plan import Plan, Served

NOTHING = Served(0, [], Plan())


@dataclass(frozen=True, slots=True)
class AcquireReply:
    """A lease. whole: False if more is held than is served now. tier_tokens: tokens found, by tier."""

    lease: int
    served: Served
    tier_tokens: list[int]
    whole: bool
