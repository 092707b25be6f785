"""The blocks before those that a commit brings, for chains that grow by a few blocks at a time.

Purpose: `Lineage.before`: what `Blocks.ancestors` says, without a walk over all of a long chain, which takes 6 to 16 ms behind 65,536 blocks. Non-purpose: what follows from it (commits.py). Invariants: the
answer is that of the walk, since what is remembered is believed only where the parent of each block is the next one still; KEPT_LIMIT bounds it.
"""

from __future__ import annotations

import numpy as np

from tierd.core.blocks import Blocks
from tierd.core.plan import Ids
from tierd.core.sets import every

LONG = 256
"""A shorter chain is walked in less time than it takes to remember it."""
KEPT_LIMIT = 1 << 20
"""Blocks in all that is remembered, 8 bytes each."""


class Lineage:
    """See the module."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._before: dict[int, Ids] = {}
        """Of the last block of a chain what is before it, nearest first; what was not used for longest comes first."""
        self._kept = 0

    def before(self, ids: Ids) -> Ids:
        """The blocks before these, nearest first, each once and none of these."""
        parents = self._blocks.parent[ids]
        own, above = set(ids.tolist()), set(parents[parents >= 0].tolist())
        starts, ends = above - own, own - above
        if len(starts) != 1 or len(ends) != 1:  # not one chain that grows
            return self._blocks.ancestors(ids)
        found = self._remembered(starts.pop())
        if found is None:
            found = self._blocks.ancestors(ids)
        if len(found) >= LONG:
            end = ends.pop()
            self._remember(end, np.concatenate((self._blocks.upwards(end, len(ids))[1:], found)))
        return found

    def _remembered(self, start: int) -> Ids | None:
        """The block and those before it, if that is known and still so."""
        if (before := self._before.pop(start, None)) is None:
            return None
        self._kept -= len(before)
        found, parent = np.append(start, before), self._blocks.parent
        is_whole = every(parent[found[:-1]] == found[1:]) and parent[found[-1]] < 0
        return found if is_whole else None

    def _remember(self, end: int, before: Ids) -> None:
        self._before[end] = before
        self._kept += len(before)
        while self._kept > KEPT_LIMIT:
            self._kept -= len(self._before.pop(next(iter(self._before))))
