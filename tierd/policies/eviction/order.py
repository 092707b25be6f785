"""UseOrder: blocks from the least to the most recently used, kept as a log instead of a sorted set.

Purpose: what LRU is, and what breaks ties elsewhere. Non-purpose: knowing which blocks are tracked; that is the column of stamps
which the policy passes in. Invariants: stamps in the log ascend; an entry is alive while it carries the stamp that the
column has for its block, so at most one entry of a block is.

Using a block appends an entry and leaves the old one dead in its place; so a use costs the same whatever the number of blocks, and no sort
is ever needed. Dead entries are dropped from the front when victims are sought, and everywhere when the log is full and half dead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.core.eviction import Ids, Mask

Stamps = NDArray[np.int64]
"""By block id: the number of its last use, 0 if it is not tracked."""

_FIRST_ENTRIES = 64
_SCAN_ENTRIES = 64
"""Least number of entries looked at in one numpy step: below it the call's overhead dominates."""


def grown(column: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The column itself, or a copy with room for at least `size` entries, new ones zero."""
    if size <= len(column):
        return column
    wider = np.zeros(max(size, 2 * len(column)), dtype=column.dtype)
    wider[: len(column)] = column
    return wider


class UseOrder:
    """A log of (block, stamp)."""

    __slots__ = ("_blocks", "_head", "_log", "_tail")

    def __init__(self) -> None:
        self._blocks = np.zeros(_FIRST_ENTRIES, dtype=np.int64)
        self._log = np.zeros(_FIRST_ENTRIES, dtype=np.int64)
        self._head = 0
        self._tail = 0

    def append(self, blocks: Ids, first_stamp: int, stamps: Stamps) -> None:
        """Adds entries stamped first_stamp, first_stamp + 1, ...; `stamps` decides which of the older ones are dead."""
        count = len(blocks)
        if self._tail + count > len(self._blocks):
            self._make_room(count, stamps)
        stop = self._tail + count
        self._blocks[self._tail : stop] = blocks
        self._log[self._tail : stop] = np.arange(first_stamp, first_stamp + count)
        self._tail = stop

    def oldest(self, count: int, stamps: Stamps, pinned: Mask) -> Ids:
        """Up to `count` blocks that are alive and not pinned, oldest first."""
        self._drop_dead_front(stamps)
        found: list[Ids] = []
        missing, at, step = count, self._head, max(_SCAN_ENTRIES, count)
        while missing > 0 and at < self._tail:
            stop = min(at + step, self._tail)
            blocks = self._blocks[at:stop]
            free = (stamps[blocks] == self._log[at:stop]) & ~pinned[blocks]
            chosen = blocks[free][:missing]
            found.append(chosen)
            missing -= len(chosen)
            at, step = stop, 2 * step
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def _drop_dead_front(self, stamps: Stamps) -> None:
        while self._head < self._tail:
            stop = min(self._head + _SCAN_ENTRIES, self._tail)
            alive = self._alive(self._head, stop, stamps)
            if alive.any():
                self._head += int(alive.argmax())
                return
            self._head = stop

    def _make_room(self, count: int, stamps: Stamps) -> None:
        """Drops the dead; doubles if more than half of the log would still be in use."""
        alive = self._alive(self._head, self._tail, stamps)
        blocks = self._blocks[self._head : self._tail][alive]
        log = self._log[self._head : self._tail][alive]
        size = len(self._blocks)
        while 2 * (len(blocks) + count) > size:
            size *= 2
        self._blocks, self._log = np.resize(blocks, size), np.resize(log, size)
        self._head, self._tail = 0, len(blocks)

    def _alive(self, start: int, stop: int, stamps: Stamps) -> Mask:
        alive: Mask = stamps[self._blocks[start:stop]] == self._log[start:stop]
        return alive
