"""Queues: numbered queues of blocks, each ordered by when blocks were put there.

2Q, ARC, S3-FIFO and similar policies are built from them; the policy chooses the queue. Queue
numbers start at 0, and a queue is made when it is first used. A block is in one queue at most. Its
stamp in `stamps` is 0 for a block in no queue, and grows with each block that is put anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.policies.eviction.order import Stamps, UseOrder, grown, stamped


class Queues:
    """queue: by block id, the number of its queue, while `stamps` is not 0. sizes: of the queues
    that are not empty."""

    def __init__(self) -> None:
        self.stamps = np.zeros(0, dtype=np.int64)
        self.queue = np.zeros(0, dtype=np.int32)
        self.sizes: dict[int, int] = {}
        self._orders: dict[int, UseOrder] = {}
        self._next_stamp = 1
        self._count = 0

    def __len__(self) -> int:
        """How many blocks are in the queues."""
        return self._count

    def has(self, blocks: Ids) -> Mask:
        """Which of the blocks are in a queue."""
        return stamped(self.stamps, blocks)

    def size(self, queue: int) -> int:
        """How many blocks are in one queue."""
        return self.sizes.get(queue, 0)

    def put(self, blocks: Ids, queue: int) -> None:
        """The blocks become the newest of a queue, in this order, wherever they were before."""
        if not len(blocks):
            return
        size = int(blocks.max()) + 1
        self.stamps, self.queue = grown(self.stamps, size), grown(self.queue, size)
        self.remove(blocks[self.stamps[blocks] > 0])
        stop = self._next_stamp + len(blocks)
        self.stamps[blocks] = np.arange(self._next_stamp, stop)
        self.queue[blocks] = queue
        self._orders.setdefault(queue, UseOrder()).append(blocks, self._next_stamp, self.stamps)
        self._next_stamp = stop
        self._count += len(blocks)
        self.sizes[queue] = self.size(queue) + len(blocks)

    def remove(self, blocks: Ids) -> None:
        """Removes the blocks from their queues."""
        if not len(blocks):
            return
        queues = self.queue[blocks]
        first = int(queues[0])
        if (queues == first).all():
            self._shrink(first, len(blocks))
        else:
            for queue, count in zip(*(a.tolist() for a in np.unique(queues, return_counts=True)), strict=True):
                self._shrink(queue, count)
        self.stamps[blocks] = 0
        self._count -= len(blocks)

    def walk(self, queue: int) -> Iterator[Ids]:
        """All blocks of a queue, oldest first, in pieces. Nothing may be put anywhere meanwhile."""
        order = self._orders.get(queue)
        return order.walk(self.stamps) if order else iter(())

    def until(self, queue: int, stamp: int, stamps: Stamps | None = None) -> Ids:
        """Blocks of a queue older than a stamp, oldest first. stamps: default the queue's."""
        found, stamps = [np.zeros(0, dtype=np.int64)], self.stamps if stamps is None else stamps
        for blocks in self.walk(queue):
            found.append(blocks[stamps[blocks] < stamp])
            if len(found[-1]) < len(blocks):
                break
        return np.concatenate(found)

    def _shrink(self, queue: int, count: int) -> None:
        self.sizes[queue] -= count
        if not self.sizes[queue]:
            del self.sizes[queue], self._orders[queue]


def part(pieces: Iterable[Ids], start: int, stop: int | None = None) -> Iterator[Ids]:
    """Blocks number `start` to `stop` - 1 of an order that comes in pieces."""
    at = 0
    for blocks in pieces:
        if stop is not None and at >= stop:
            return
        yield blocks[max(0, start - at) : None if stop is None else stop - at]
        at += len(blocks)


def first_free(pieces: Iterable[Ids], count: int, pinned: Mask) -> Ids | None:
    """The first `count` unpinned blocks of an order; None if there are fewer."""
    found = some_free(pieces, count, pinned)
    return found if len(found) == count else None


def some_free(pieces: Iterable[Ids], count: int, pinned: Mask) -> Ids:
    """The first `count` unpinned blocks of an order, or all if there are fewer."""
    found = [np.zeros(0, dtype=np.int64)]
    missing = count
    for blocks in pieces if count else ():
        found.append(blocks[~pinned[blocks]][:missing])
        missing -= len(found[-1])
        if not missing:
            break
    return np.concatenate(found)
