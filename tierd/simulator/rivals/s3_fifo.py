"""S3-FIFO: a small queue for what is new, a main one for what was used again, and names of what the small one let go.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, algorithm 1, for a cache of c objects of one size:

    on a use of x:    freq := min(freq + 1, 3); if it is not here: to the front of M if its name is in G, else of S, with freq 0
    to make room:     |S| >= c / 10: from the back of S: freq > 1: to the front of M, with freq 0; else it leaves, its name into G
                      else: from the back of M: freq > 0: to the front of M, with freq - 1; else it leaves
    G keeps as many names as M has room for blocks: 9 c / 10.

Differences. (1) `victims` is a question, so blocks move when the core forgets those that were found behind them. (2) c is the most blocks that were
ever tracked. (3) While M is full S still lets go of what it has above its share first. (4) A block in S goes to the front when its chain has grown, so
that S too loses tails before what precedes them. (5) Whatever leaves S is remembered, also what an operator dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.chains import Lift, Uses
from tierd.policies.eviction.ghosts import Ghosts
from tierd.policies.eviction.order import grown
from tierd.policies.eviction.queues import Queues, first_free, part
from tierd.policies.eviction.rounds import Rounds

SMALL, MAIN = 0, 1
"""S and M."""
MOST_USES = 3
"""That are counted."""
SMALL_PART, GHOST_PARTS = 10, 9
"""S has a tenth of c, G nine."""


class S3Fifo:
    """S3-FIFO. `now` is not looked at. Uses are the credit of the main queue's rounds, for blocks in the small one too."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for names, chains and uses."""
        self._blocks = blocks
        self._queues, self._left = Queues(), Ghosts()
        self._main = Rounds(self._queues, MAIN, most=MOST_USES)
        self._growth, self._uses = Lift(blocks), Uses(blocks)
        self._most = 0  # c

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come, some of them back."""
        known = self._left.recall(self._blocks.keys(blocks)) >= 0
        self._main.credit = grown(self._main.credit, int(blocks.max(initial=-1)) + 1)
        self._main.credit[blocks] = 0
        self._queues.put(blocks[~known], SMALL)
        self._main.put(blocks[known], 0)
        self._growth.begin(blocks)
        self._uses.begin(blocks)
        self._most = max(self._most, len(self))

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede some that came."""
        is_small, grew = self._queues.queue[blocks] == SMALL, self._growth.of(blocks) > 0
        uses = np.minimum(self._main.credit[blocks] + self._uses.of(blocks), MOST_USES).astype(np.uint8)
        self._main.set(blocks[~is_small], uses[~is_small])
        self._main.credit[blocks[is_small]] = uses[is_small]
        self._queues.put(blocks[is_small & grew], SMALL)

    def forget(self, blocks: Ids) -> None:
        """The blocks have left; those that were passed for it move."""
        is_rare = (self._queues.queue[blocks] == SMALL) & (self._main.credit[blocks] <= 1)
        self._leave_small(blocks[is_rare])
        rest = blocks[~is_rare]
        if len(rest):
            self._promote()
        is_small = self._queues.queue[rest] == SMALL
        self._left.remember(self._blocks.keys(rest[is_small]))
        self._queues.remove(rest[is_small])
        self._main.leave(rest[~is_small])

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` that the paper's algorithm would name next, or None."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        above = self._above()
        promoted = []
        for blocks in part(self._queues.walk(SMALL), 0, above):
            often = self._main.credit[blocks] > 1
            promoted.append(blocks[often])
            yield blocks[~often]
        yield from self._main_order(promoted)
        for is_often in (False, True):
            for blocks in part(self._queues.walk(SMALL), above):
                yield blocks[(self._main.credit[blocks] > 1) == is_often]

    def _main_order(self, promoted: list[Ids]) -> Iterator[Ids]:
        """M with some more at its front: they leave with the last that have no credit."""
        for credit, blocks in self._main.walk():
            if credit > 0:
                yield from promoted
                promoted = []
            yield blocks
        yield from promoted

    def _above(self) -> int:
        """How many of the oldest of S are looked at before M is."""
        return max(0, self._queues.size(SMALL) - self._most // SMALL_PART + 1)

    def _leave_small(self, blocks: Ids) -> None:
        """Out of S; what was used often and stood before the last of them goes to M."""
        if not len(blocks):
            return
        passed = self._queues.until(SMALL, int(self._queues.stamps[blocks].max()))[: self._above()]
        self._left.remember(self._blocks.keys(blocks))
        self._left.trim(self._most * GHOST_PARTS // SMALL_PART)
        self._queues.remove(blocks)
        self._main.put(passed[self._main.credit[passed] > 1], 0)

    def _promote(self) -> None:
        """M's turn came: all that S has above its share was used often, or it is not M's turn."""
        above = np.concatenate([np.zeros(0, dtype=np.int64), *part(self._queues.walk(SMALL), 0, self._above())])
        if (self._main.credit[above] > 1).all():
            self._main.put(above, 0)
