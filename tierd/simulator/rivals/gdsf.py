"""GDSF: keeps blocks that are used often and cost much to compute. Evictions age the rest.

L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy",
HP Laboratories HPL-98-69 (R.1), 1998, with all sizes equal:

    on a use of f:    Fr(f) := Fr(f) + 1;  Pr(f) := Clock + Fr(f) * Cost(f)
    to make room:     the file with the least Pr is evicted, and Clock := its Pr

Cost of a block: the tokens to compute to have it again, from the first of its sequence to its last.

Implemented as CAMP (S. Ghandeharizadeh, S. Irani, J. Lam, J. Yap, "CAMP: A Cost Adaptive
Multi-Queue Eviction Policy for Key-Value Stores", Middleware 2014, section 2). Fr * Cost is rounded
to few levels, one queue each. In a queue Pr rises from the oldest to the newest, because Clock
never falls. So only the oldest of some queues are compared.

Differences:
- The rounding. `victims` changes nothing. So Clock moves when the core forgets blocks, at most to
  the least tracked Pr.
- A block's worth is at least that of its descendants, and no use lowers its Pr. Ties: the least
  recently used goes first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.chains import Levels, Lift, Uses, along
from tierd.policies.eviction.order import grown
from tierd.policies.eviction.queues import Queues, first_free
from tierd.simulator.rivals.rounding import ROUNDED, level


class Gdsf:
    """Greedy-dual with frequency and cost. Ignores `now`: evictions measure age."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for costs, chains and uses."""
        self._blocks = blocks
        self._queues = Queues()  # by the level of Fr * Cost
        self._frequency = np.zeros(0, dtype=np.uint32)  # Fr
        self._priority = np.zeros(0, dtype=np.float64)  # Pr
        self._clock = 0.0
        self._lift, self._uses = Lift(blocks), Uses(blocks)

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks were stored; the first use of each."""
        size = int(blocks.max(initial=-1)) + 1
        self._frequency, self._priority = grown(self._frequency, size), grown(self._priority, size)
        self._frequency[blocks], self._priority[blocks] = 1, 0.0
        self._uses.begin(blocks)
        worth = along(self._worth(blocks), blocks, self._blocks)
        self._lift.begin(blocks, worth)
        self._put(blocks, worth)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede stored ones."""
        self._frequency[blocks] += self._uses.of(blocks)
        worth = np.maximum(self._worth(blocks), self._lift.of(blocks))
        self._put(blocks, along(worth, blocks, self._blocks))

    def forget(self, blocks: Ids) -> None:
        """The blocks were removed; the clock advances."""
        if not len(blocks):
            return
        last = float(self._priority[blocks].max())
        self._queues.remove(blocks)
        least = min((float(self._priority[p[0]]) for q in self._queues.sizes if len(p := self._first(q))), default=last)
        self._clock = max(self._clock, min(last, least))

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` unpinned blocks of least Pr, or None."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _worth(self, blocks: Ids) -> Levels:
        """The level of Fr * Cost."""
        own, parents = self._blocks.tokens[blocks], self._blocks.parent[blocks]
        whole = np.maximum(own, np.where(parents >= 0, self._blocks.tokens[parents], 0)).astype(np.float64)
        cost = whole * self._blocks.position[blocks] + own
        return level(np.maximum(1, self._frequency[blocks] * cost))

    def _put(self, blocks: Ids, worth: Levels) -> None:
        """Files blocks whose worth did not fall."""
        priority = self._clock + ROUNDED[worth]
        up = priority >= self._priority[blocks]
        blocks, worth = blocks[up], worth[up]
        self._priority[blocks] = priority[up]
        for queue in np.unique(worth).tolist():
            self._queues.put(blocks[worth == queue], queue)

    def _first(self, queue: int) -> Ids:
        """The oldest non-empty piece of a queue."""
        return next(piece for piece in self._queues.walk(queue) if len(piece))

    def _order(self) -> Iterator[Ids]:
        """All queues merged by Pr and use. Blocks up to the least of the queues' last known ones
        are final."""
        walks = {queue: self._queues.walk(queue) for queue in self._queues.sizes}
        known: dict[int, Ids] = {}
        while walks:
            for queue in [queue for queue in walks if not len(known.get(queue, ()))]:
                known[queue] = next((piece for piece in walks[queue] if len(piece)), np.zeros(0, dtype=np.int64))
                if not len(known[queue]):
                    del walks[queue], known[queue]
            if known:
                yield self._taken(known)

    def _taken(self, known: dict[int, Ids]) -> Ids:
        """Takes from each queue the blocks up to the first of their lasts, in order."""
        limit = min((self._priority[blocks[-1]], self._queues.stamps[blocks[-1]]) for blocks in known.values())
        taken = []
        for queue, blocks in known.items():
            priority, stamps = self._priority[blocks], self._queues.stamps[blocks]
            final = (priority < limit[0]) | ((priority == limit[0]) & (stamps <= limit[1]))
            taken.append(blocks[final])
            known[queue] = blocks[~final]
        ready = np.concatenate(taken)
        return ready[np.lexsort((self._queues.stamps[ready], self._priority[ready]))]
