"""2Q: what was used once waits in a short queue of its own, and joins the main one if it is asked for again after it left.

T. Johnson, D. Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm", VLDB 1994, section 2.2 (the full version),
for a buffer of c pages, Kin = c / 4, Kout = c / 2 as its section on tuning has it:

    on a use of X:    in Am: to the front of Am.   in A1in: nothing.   in A1out: to the front of Am.   else: to the front of A1in
    to make room:     |A1in| > Kin: the last of A1in leaves, and its name is the first of A1out, which keeps Kout names
                      else: the last of Am leaves, and nothing is kept of it

Differences. (1) c is the most blocks that were ever tracked. (2) A block in A1in goes to the front when its chain has grown, so that A1in too loses tails
before what precedes them. (3) If Am is empty, A1in serves on. (4) Whatever leaves A1in is remembered, also what an operator dropped.
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
    """2Q. `now` is not looked at."""

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
        """The blocks have come, some of them back."""
        self._most = max(self._most, len(self) + len(blocks))
        known = self._left.recall(self._blocks.keys(blocks)) >= 0
        self._left.trim(self._most // 2)
        self._queues.put(blocks[~known], FIRST)
        self._queues.put(blocks[known], MAIN)
        self._growth.begin(blocks)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede some that came."""
        grown, queues = self._growth.of(blocks) > 0, self._queues.queue[blocks]
        self._queues.put(blocks[(queues == FIRST) & grown], FIRST)
        self._queues.put(blocks[queues == MAIN], MAIN)

    def forget(self, blocks: Ids) -> None:
        """The blocks have left."""
        self._left.remember(self._blocks.keys(blocks[self._queues.queue[blocks] == FIRST]))
        self._queues.remove(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """What is above A1in's share, oldest first; then Am; then the rest of A1in."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        above = max(0, self._queues.size(FIRST) - self._most // 4)
        yield from part(self._queues.walk(FIRST), 0, above)
        yield from self._queues.walk(MAIN)
        yield from part(self._queues.walk(FIRST), above)
