"""Ends: when the time of retained blocks runs out.

Gives the blocks whose time may have run out since the last call. The caller checks: a block may
have been evicted or been given more time. A block's last end is always noted. Ends are whole
seconds, each with its blocks, so noting is cheap and only the seconds are sorted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.columns import runs
from tierd.core.eviction import Ids, Mask

DUE_LIMIT = 8192
"""Blocks returned by one call, or those of one note; the others stay due."""
_SPARE = 4096
"""Notes above twice the possible number before wrong ones are dropped."""


class Ends:
    """See the module."""

    def __init__(self) -> None:
        self._at: dict[int, list[NDArray[np.int32]]] = {}
        self._seconds: list[int] = []  # a heap of the keys of _at
        self._size = 0

    def __len__(self) -> int:
        """Notes, right or not."""
        return self._size

    def note(self, blocks: Ids, until_s: NDArray[np.uint32]) -> None:
        """The time of each block runs out then."""
        for rows in runs(until_s):
            second = int(until_s[rows[0]])
            if second not in self._at:
                heapq.heappush(self._seconds, second)
            self._at.setdefault(second, []).append(blocks[rows].astype(np.int32))
        self._size += len(blocks)

    def due(self, time_s: float) -> Ids:
        """Removes and returns about DUE_LIMIT of the blocks noted for up to this time."""
        found, count = [np.zeros(0, np.int32)], 0
        while self._seconds and self._seconds[0] <= time_s and count < DUE_LIMIT:
            found.append(self._at[self._seconds[0]].pop())
            count += len(found[-1])
            if not self._at[self._seconds[0]]:
                del self._at[heapq.heappop(self._seconds)]
        self._size -= count
        return np.unique(np.concatenate(found)).astype(np.int64) if len(found) > 1 else found[0].astype(np.int64)

    def trim(self, most: int, is_right: Callable[[Ids, int], Mask]) -> None:
        """Drops wrong notes if too many for `most` blocks. is_right: which end in that second."""
        if self._size <= 2 * most + _SPARE:
            return
        for second in list(self._at):
            blocks = np.unique(np.concatenate(self._at[second])).astype(np.int64)
            blocks = blocks[is_right(blocks, second)]
            self._at[second] = [blocks.astype(np.int32)]
            if not len(blocks):
                del self._at[second]
        self._seconds = sorted(self._at)
        self._size = sum(len(part) for parts in self._at.values() for part in parts)
