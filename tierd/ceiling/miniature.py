"""Miniature: what tiers of one size would hold of the sample, under one order of eviction.

The sample's share of the requests goes to tiers with the same share of the capacity (C. Waldspurger
et al., "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017, section 3).
The orders are the daemon's own policies. It keeps no pages, leases or bytes.

A use brings a block into the nearest tier. A block evicted from a tier goes to the next one, if it
is not there; short ones never go to a store. A block read from a far tier keeps its copy there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.ceiling.sample import Sample
from tierd.core.eviction import Ids
from tierd.policies.eviction.lru import Lru
from tierd.policies.eviction.reuse_index import ReuseIndex

Order = Lru | ReuseIndex


class Miniature:
    """See the module. sizes: blocks of the sample that each tier holds, near to far."""

    def __init__(self, sample: Sample, orders: Sequence[Order], *, stores: Sequence[bool]) -> None:
        """orders: of each tier. stores: which of them take no short block."""
        self.sizes = [0] * len(orders)
        self._sample, self._orders, self._stores = sample, orders, stores

    def has(self, rows: Ids) -> NDArray[np.bool_]:
        """Which blocks are in a tier."""
        held = self._orders[0].has(rows)
        for order in self._orders[1:]:
            held |= order.has(rows)
        return held

    def use(self, rows: Ids, now: float) -> None:
        """Requests used these blocks and stored the missing ones. rows: distinct, last use last."""
        for order in self._orders[1:]:
            order.touch(rows[order.has(rows)], now)
        coming = rows
        for order, size, is_store in zip(self._orders, self.sizes, self._stores, strict=True):
            if order is not self._orders[0]:
                coming = coming[~order.has(coming)]
            elif len(held := coming[order.has(coming)]):
                order.forget(held)
            if is_store:
                coming = coming[~self._sample.is_short[coming]]
            order.track(coming, now)
            coming = self._evicted(order, len(order) - size)

    def forget(self, rows: Ids) -> None:
        """The blocks leave the sample."""
        for order in self._orders:
            order.forget(rows[order.has(rows)])

    def _evicted(self, order: Order, count: int) -> Ids:
        if count <= 0:
            return np.zeros(0, np.int64)
        gone = order.victims(count, self._sample.pins)
        assert gone is not None, "a miniature lost count of what it tracks"
        order.forget(gone)
        return gone
