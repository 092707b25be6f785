"""SIEVE: one queue, a bit for used blocks, and a hand that spares them in place.

Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, "SIEVE is Simpler than LRU: an Efficient
Turn-Key Eviction Algorithm for Web Caches", NSDI 2024, algorithm 1:

    on a use of x:    visited := 1;  if x is absent: to the front, with visited 0
    to make room:     while the block at the hand is visited:  visited := 0,  the hand moves one on
                      towards the front (from there to the back)
                      the block at the hand is evicted,  the hand moves one on

Here the queue is two: blocks that the hand passed in this round, and those ahead of it. A round
ends when none are ahead.

Differences:
- `victims` changes nothing. So the hand moves when the core forgets the blocks that it reached.
- Blocks that may not be evicted (pinned, or with children) are passed.
- A block goes to the front when its chain has grown, so that tails are evicted first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.chains import Lift, Uses
from tierd.policies.eviction.order import grown
from tierd.policies.eviction.queues import Queues, first_free

AHEAD, PASSED = 0, 1


class Sieve:
    """SIEVE. Ignores `now`."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for chains and uses."""
        self._queues = Queues()
        self._visited = np.zeros(0, dtype=np.bool_)
        self._unvisited = [0, 0]  # of each queue
        self._growth, self._uses = Lift(blocks), Uses(blocks)

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks were stored."""
        self._visited = grown(self._visited, int(blocks.max(initial=-1)) + 1)
        self._visited[blocks] = False
        self._put(blocks, AHEAD)
        self._growth.begin(blocks)
        self._uses.begin(blocks)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede stored ones."""
        used, grew = self._uses.of(blocks), self._growth.of(blocks) > 0
        self._count(blocks, -1)
        self._visited[blocks[used]] = True
        self._count(blocks, 1)
        self._take(blocks[grew])
        self._put(blocks[grew], AHEAD)

    def forget(self, blocks: Ids) -> None:
        """The blocks were removed; the hand moves to them."""
        rest = blocks
        while len(rest):
            if not self._unvisited[AHEAD]:
                self._begin_round()
            now = (self._queues.queue[rest] == AHEAD) & ~self._visited[rest]
            if not now.any():
                break
            last = int(self._queues.stamps[rest[now]].max())
            self._take(rest[now])
            self._pass(self._queues.until(AHEAD, last))
            rest = rest[~now]
        self._take(rest)
        if not self._queues.size(AHEAD):
            self._begin_round()  # now: new blocks go to the front, which the hand has passed

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` that the hand reaches next, or None."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        for visited in (False, True):
            for queue in (AHEAD, PASSED):
                if visited or self._unvisited[queue]:
                    for blocks in self._queues.walk(queue):
                        yield blocks[self._visited[blocks] == visited]

    def _begin_round(self) -> None:
        """Moves the hand to the front, and on from the back."""
        ahead = np.concatenate([np.zeros(0, dtype=np.int64), *self._queues.walk(AHEAD)])
        self._pass(ahead)
        whole = np.concatenate([np.zeros(0, dtype=np.int64), *self._queues.walk(PASSED)])
        self._take(whole)
        self._put(whole, AHEAD)

    def _pass(self, blocks: Ids) -> None:
        self._take(blocks)
        self._visited[blocks] = False
        self._put(blocks, PASSED)

    def _put(self, blocks: Ids, queue: int) -> None:
        self._queues.put(blocks, queue)
        self._count(blocks, 1)

    def _take(self, blocks: Ids) -> None:
        self._count(blocks, -1)
        self._queues.remove(blocks)

    def _count(self, blocks: Ids, step: int) -> None:
        """Adds to `_unvisited`, or subtracts."""
        unvisited = self._queues.queue[blocks[~self._visited[blocks]]]
        for queue in (AHEAD, PASSED):
            self._unvisited[queue] += step * int(np.count_nonzero(unvisited == queue))
