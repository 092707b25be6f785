"""LRU: the block that was not used for longest leaves first.

What it does to prefixes: the core hands a request's blocks over last to first, so a chain loses its tail before its root. That equals
the leaf-first LRU of a radix tree, without the tree. Uses are kept as a log (`order.py`).
"""

from __future__ import annotations

import numpy as np

from tierd.core.blocks import Blocks
from tierd.core.eviction import Ids, Mask
from tierd.core.sets import span
from tierd.policies.eviction.order import UseOrder, grown


class Lru:
    """Least recently used. The order of calls is the order of uses; `now` is not looked at."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: not looked at."""
        self._stamps = np.zeros(0, dtype=np.int64)
        self._order = UseOrder()
        self._next_stamp = 1
        self._count = 0

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return self._count

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come; a use."""
        self._count += len(blocks)
        if len(blocks):
            self._stamps = grown(self._stamps, int(blocks.max()) + 1)
        self.touch(blocks, now)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        stop = self._next_stamp + len(blocks)
        self._stamps[span(blocks)] = np.arange(self._next_stamp, stop)
        self._order.append(blocks, self._next_stamp, self._stamps)
        self._next_stamp = stop

    def forget(self, blocks: Ids) -> None:
        """The blocks have left."""
        self._stamps[blocks] = 0
        self._count -= len(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` oldest that are not pinned, oldest first, or None."""
        if count > self._count:
            return None
        oldest = self._order.oldest(count, self._stamps, pinned)
        return oldest if len(oldest) == count else None
