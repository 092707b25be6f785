"""Whether what a lookup found is near already.

Purpose: to spare a second look for every block where nothing could come nearer. Non-purpose: bringing anything (core). Invariant: when in doubt, it is not near.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierd.core.arrays.sets import among
from tierd.core.formats.model import Need, TierKind
from tierd.core.plan import Found, GroupQuery
from tierd.tiers.tier import Tier


def is_near(tiers: Sequence[Tier], groups: Sequence[GroupQuery], found: Found) -> bool:
    """Whether all that was found lies in host memory, so that a prefetch to there changes nothing; only of prefixes, since other needs are noted by it."""
    if any(group.need is not Need.PREFIX for group in groups):
        return False
    far = [tier.position for tier in tiers if tier.spec.kind is not TierKind.HOST]
    return not any(among(tier_of, far).any() for tier_of in found.tier_of)
