"""S3-FIFO: a small queue for new blocks, a main one for reused ones, and names of evicted ones.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, "FIFO Queues are All You Need for Cache Eviction",
SOSP 2023, algorithm 1, for a cache of c objects of one size:

    on a use of x:    freq := min(freq + 1, 3);  absent: to the front of M if its name is in G,
                      else of S, with freq 0
    to make room:     |S| >= c / 10:  from the back of S:  freq > 1: to the front of M, with freq 0;
                      else evicted,  its name into G
                      else:  from the back of M:  freq > 0: to the front of M, with freq - 1;
                      else evicted
    G keeps as many names  as M has room for blocks: 9 c / 10

Differences:
- `victims` changes nothing. So blocks move when the core forgets the blocks found behind them.
- c is the most blocks tracked so far.
- While M is full, S still evicts its excess first.
- A block in S goes to the front when its chain has grown, so that S too loses tails first.
- Every block that leaves S is remembered, also if an operator dropped it.
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
"""Most uses counted."""
SMALL_PART, GHOST_PARTS = 10, 9
"""S has a tenth of c, G nine."""


class S3Fifo:
    """S3-FIFO. Ignores `now`. Uses are the credit of the main queue's rounds, and of the small."""

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
        """The blocks were stored, some of them again."""
        known = self._left.recall(self._blocks.keys(blocks)) >= 0
        self._main.credit = grown(self._main.credit, int(blocks.max(initial=-1)) + 1)
        self._main.credit[blocks] = 0
        self._queues.put(blocks[~known], SMALL)
        self._main.put(blocks[known], 0)
        self._growth.begin(blocks)
        self._uses.begin(blocks)
        self._most = max(self._most, len(self))

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede stored ones."""
        is_small, grew = self._queues.queue[blocks] == SMALL, self._growth.of(blocks) > 0
        uses = np.minimum(self._main.credit[blocks] + self._uses.of(blocks), MOST_USES).astype(np.uint8)
        self._main.set(blocks[~is_small], uses[~is_small])
        self._main.credit[blocks[is_small]] = uses[is_small]
        self._queues.put(blocks[is_small & grew], SMALL)

    def forget(self, blocks: Ids) -> None:
        """The blocks were removed; the blocks passed for them move."""
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
        """The next `count` by the paper's algorithm, or None."""
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
        """M with more blocks at its front: they follow the last without credit."""
        for credit, blocks in self._main.walk():
            if credit > 0:
                yield from promoted
                promoted = []
            yield blocks
        yield from promoted

    def _above(self) -> int:
        """How many of the oldest of S are examined before M."""
        return max(0, self._queues.size(SMALL) - self._most // SMALL_PART + 1)

    def _leave_small(self, blocks: Ids) -> None:
        """Removes blocks of S; often used ones before the last of them move to M."""
        if not len(blocks):
            return
        passed = self._queues.until(SMALL, int(self._queues.stamps[blocks].max()))[: self._above()]
        self._left.remember(self._blocks.keys(blocks))
        self._left.trim(self._most * GHOST_PARTS // SMALL_PART)
        self._queues.remove(blocks)
        self._main.put(passed[self._main.credit[passed] > 1], 0)

    def _promote(self) -> None:
        """After evictions from M: if all of S's excess was used often, it moves to M."""
        above = np.concatenate([np.zeros(0, dtype=np.int64), *part(self._queues.walk(SMALL), 0, self._above())])
        if (self._main.credit[above] > 1).all():
            self._main.put(above, 0)
