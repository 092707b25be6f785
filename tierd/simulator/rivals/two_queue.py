"""2Q: new blocks enter a short queue, and the main one if requested again after eviction.

T. Johnson, D. Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement
Algorithm", VLDB 1994, section 2.2 (the full version). For a buffer of c pages, Kin = c / 4, Kout =
c / 2 as in its section on tuning:

    on a use of X:    in Am: to the front of Am.   in A1in: nothing.   in A1out: to the front of Am.
                      else: to the front of A1in
    to make room:     |A1in| > Kin:  the last of A1in is evicted,  its name is the first of A1out,
                      which keeps Kout names
                      else:  the last of Am is evicted,  and nothing is kept of it

Differences:
- c is the most blocks tracked so far.
- A block in A1in goes to the front when its chain has grown, so that A1in too loses tails first.
- If Am is empty, A1in is used.
- Every block that leaves A1in is remembered, also if an operator dropped it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.chains import Lift
from tierd.policies.eviction.ghosts import Ghosts
from tierd.policies.eviction.queues import Queues, first_free, part

FIRST, MAIN = 0, 1
"""A1in and Am."""


class TwoQueue:
    """2Q. Ignores `now`."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for names and chains."""
        self._blocks = blocks
        self._queues, self._left = Queues(), Ghosts()
        self._growth = Lift(blocks)
        self._most = 0  # c

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks were stored, some of them again."""
        self._most = max(self._most, len(self) + len(blocks))
        known = self._left.recall(self._blocks.keys(blocks)) >= 0
        self._left.trim(self._most // 2)
        self._queues.put(blocks[~known], FIRST)
        self._queues.put(blocks[known], MAIN)
        self._growth.begin(blocks)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede stored ones."""
        grown, queues = self._growth.of(blocks) > 0, self._queues.queue[blocks]
        self._queues.put(blocks[(queues == FIRST) & grown], FIRST)
        self._queues.put(blocks[queues == MAIN], MAIN)

    def forget(self, blocks: Ids) -> None:
        """The blocks were removed."""
        self._left.remember(self._blocks.keys(blocks[self._queues.queue[blocks] == FIRST]))
        self._queues.remove(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The excess of A1in, oldest first; then Am; then the rest of A1in."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        above = max(0, self._queues.size(FIRST) - self._most // 4)
        yield from part(self._queues.walk(FIRST), 0, above)
        yield from self._queues.walk(MAIN)
        yield from part(self._queues.walk(FIRST), above)
