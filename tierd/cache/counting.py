"""Counters of gets and puts: hits by tier, misses by reason, block statuses of Reserve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tierd.cache.parts import Parts
from tierd.core.formats.model import BlockStatus
from tierd.core.plan import Acquisition, GroupQuery, LookupResult, Reserved, Served
from tierd.core.requests.groups import tier_tokens
from tierd.metrics import Metrics


def served_by_tier(groups: Sequence[GroupQuery], got: Acquisition, served: Served) -> list[int]:
    """Tokens of the served prefix, by the nearest tier that held them. A block that was put
    meanwhile counts for the tier that serves it."""
    if served.tokens == got.tokens:
        return got.tier_tokens
    if not served.tokens:
        return [0] * len(got.tier_tokens)
    held = np.where(got.nearest < 0, served.groups[0].extents["tier"].flat[0], got.nearest)
    return tier_tokens(groups[0], held, served.tokens, tiers=len(got.tier_tokens))


def count_served(parts: Parts, *, groups: Sequence[GroupQuery], got: Acquisition, served: Served) -> None:
    """Counts hits by tier. Each requested token beyond the hits is a miss with one reason."""
    parts.metrics.lookups.inc()
    failed, asked = got.tokens - served.tokens, max(g.tokens for g in groups)
    rest = "absent" if got.whole else "busy" if got.shut else "no_room"
    for reason, tokens in ((rest, asked - got.tokens), ("failed", failed)):
        if tokens:
            parts.metrics.tokens_missed.labels(reason=reason).inc(tokens)
    _count_tiers(parts, served_by_tier(groups, got, served), missed=asked - served.tokens)


def count_looked_up(parts: Parts, *, groups: Sequence[GroupQuery], found: LookupResult) -> None:
    """Counts the tokens that a lookup did not find. An engine acquires only the tokens found, so
    the lookup is the one call that shows its misses."""
    parts.metrics.lookups.inc()
    if absent := max(g.tokens for g in groups) - found.tokens:
        parts.metrics.tokens_missed.labels(reason="absent").inc(absent)
        _count_tiers(parts, [0] * len(parts.tiers), missed=absent)


def count_used(parts: Parts, found: LookupResult, *, times: int) -> None:
    """Counts one-sided gets: the same hits, `times` times."""
    parts.metrics.lookups.inc(times)
    parts.metrics.gets_one_sided.inc(times)
    _count_tiers(parts, found.tier_tokens, missed=0, times=times)


def _count_tiers(parts: Parts, hits: Sequence[int], *, missed: int, times: int = 1) -> None:
    """Counts tokens by tier, near to far. A tier is asked for what the nearer ones missed, so its
    hits and its misses add up to the misses before it. A tier out of service is not asked."""
    left = sum(hits) + missed
    for tier, tokens in zip(parts.tiers, hits, strict=True):
        left -= tokens
        if tokens:
            parts.metrics.tokens_hit.labels(tier=tier.spec.name).inc(times * tokens)
        if left and (tokens or parts.core.is_serving(tier.position)):
            parts.metrics.tier_tokens_missed.labels(tier=tier.spec.name).inc(times * left)


def count_reserved(metrics: Metrics, reserved: Reserved) -> None:
    """Counts the blocks of a Reserve by their status."""
    for code, count in Counter(np.concatenate(reserved.statuses).tolist()).items():
        metrics.reserve.labels(status=BlockStatus.names()[code]).inc(count)
