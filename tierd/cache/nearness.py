"""Whether all blocks of a lookup are near already. This spares a second search of each block.

When in doubt, the answer is False.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierd.core.arrays.sets import among
from tierd.core.formats.model import Need, TierKind
from tierd.core.plan import GroupQuery, LookupResult
from tierd.tiers.tier import Tier


def is_near(tiers: Sequence[Tier], groups: Sequence[GroupQuery], found: LookupResult) -> bool:
    """Whether all found blocks lie in host memory, so that a prefetch there changes nothing. False
    for needs other than PREFIX, since a prefetch records those."""
    if any(group.need is not Need.PREFIX for group in groups):
        return False
    far = [tier.position for tier in tiers if tier.spec.kind is not TierKind.HOST]
    return not any(among(tier_of, far).any() for tier_of in found.tier_of)
