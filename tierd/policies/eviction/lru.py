"""LRU: evicts the least recently used block first.

The core passes a request's blocks last to first, so a chain loses its tail before its root. That
equals the leaf-first LRU of a radix tree, without the tree. Uses are kept as a log (`order.py`).
"""

from __future__ import annotations

import numpy as np

from tierd.core.arrays.sets import span
from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.order import UseOrder, grown, stamped


class Lru:
    """Least recently used. The order of calls is the order of uses; `now` is ignored.

    stamps: the number of each block's last use, by id, 0 if it is not tracked.
    """

    def __init__(self, blocks: Blocks) -> None:
        """blocks: ignored."""
        self.stamps = np.zeros(0, dtype=np.int64)
        self.next_stamp = 1
        self._order = UseOrder()
        self._count = 0

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return self._count

    def has(self, blocks: Ids) -> Mask:
        """Which of the blocks are tracked."""
        return stamped(self.stamps, blocks)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come; a use."""
        self._count += len(blocks)
        if len(blocks):
            self.stamps = grown(self.stamps, int(blocks.max()) + 1)
        self.touch(blocks, now)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        stop = self.next_stamp + len(blocks)
        self.stamps[span(blocks)] = np.arange(self.next_stamp, stop)
        self._order.append(blocks, self.next_stamp, self.stamps)
        self.next_stamp = stop

    def forget(self, blocks: Ids) -> None:
        """The blocks were evicted."""
        self.stamps[blocks] = 0
        self._count -= len(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` oldest that are not pinned, oldest first, or None."""
        if count > self._count:
            return None
        oldest = self._order.oldest(count, self.stamps, pinned)
        return oldest if len(oldest) == count else None
