"""Counters of gets and puts: hits by tier, misses by reason, block statuses of Reserve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tierd.core.formats.model import BlockStatus
from tierd.core.plan import Acquisition, GroupQuery, LookupResult, Reserved, Served
from tierd.metrics import Metrics
from tierd.tiers.tier import Tier


def count_served(
    metrics: Metrics, tiers: Sequence[Tier], *, groups: Sequence[GroupQuery], got: Acquisition, served: Served
) -> None:
    """Counts hits by tier. Each requested token beyond the hits is a miss with one reason."""
    metrics.lookups.inc()
    if served.tokens:
        for tier, tokens in zip(tiers, got.tier_tokens, strict=True):
            if tokens:
                metrics.tokens_hit.labels(tier=tier.spec.name).inc(tokens)
    failed, asked = got.tokens - served.tokens, max(g.tokens for g in groups)
    rest = "absent" if got.whole else "busy" if got.shut else "no_room"
    for reason, tokens in ((rest, asked - got.tokens), ("failed", failed)):
        if tokens:
            metrics.tokens_missed.labels(reason=reason).inc(tokens)


def count_looked_up(metrics: Metrics, *, groups: Sequence[GroupQuery], found: LookupResult) -> None:
    """Counts the tokens that a lookup did not find. An engine acquires only the tokens found, so
    the lookup is the one call that shows its misses."""
    metrics.lookups.inc()
    if absent := max(g.tokens for g in groups) - found.tokens:
        metrics.tokens_missed.labels(reason="absent").inc(absent)


def count_used(metrics: Metrics, tiers: Sequence[Tier], found: LookupResult, *, times: int) -> None:
    """Counts one-sided gets: the same hits, `times` times."""
    metrics.lookups.inc(times)
    metrics.gets_one_sided.inc(times)
    for tier, tokens in zip(tiers, found.tier_tokens, strict=True):
        if tokens:
            metrics.tokens_hit.labels(tier=tier.spec.name).inc(times * tokens)


def count_reserved(metrics: Metrics, reserved: Reserved) -> None:
    """Counts the blocks of a Reserve by their status."""
    for code, count in Counter(np.concatenate(reserved.statuses).tolist()).items():
        metrics.reserve.labels(status=BlockStatus.names()[code]).inc(count)
