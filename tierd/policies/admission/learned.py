"""Learned: a block is written if another use is likely enough, and how likely that is follows from the wear budget.

Purpose: ours. The chance of another use comes from whoever learns reuse (`chance`); with a budget the threshold is steered so that just as much passes
as may be written, the best of it (steering.py); without one it is FLOOR, below which a write is waste whatever the
drive,
while blocks below it are as seldom used again as the learner says (floor.py).
The aim is Flashield's (A. Eisenman et al., "Flashield: a Hybrid Key-value Cache that Controls Flash Write Amplification", NSDI 2019, section 4): flash
is for what memory has shown to be worth it.

A block is used whenever one after it is, so it is worth at least as much; but a learner need not say so, and a budget that ends in the middle
of a chain could leave a tail without its head. So a block passes if all before it can be paid too, which is *due* for this moment, since heads
are asked about after their tails; and the parent of what passes is *promised*: whenever it is asked about, it passes the threshold too.
"""

from __future__ import annotations

import math
from collections.abc import Container

import numpy as np

from tierd.core.admission import Chance, Sizes
from tierd.core.eviction import Mask
from tierd.core.formats.model import TierSpec
from tierd.core.index.blocks import Blocks
from tierd.core.plan import Ids
from tierd.policies.admission.floor import Floor
from tierd.policies.admission.gate import Gate, Worth, names_before, names_of
from tierd.policies.admission.steering import Steering

FLOOR = 0.2
"""A chance below it is worth no write on any drive: on the developers' traces such blocks cost more hits by what they displace than they bring."""
_LEAST_WORTH = 1e-9
BEFORE_LIMIT = 1 << 14
"""Blocks before one that are counted up. A block with half as many or more to be paid may not be paid: it waits until the head of its chain is written."""
PROMISES = 65536
"""Names of parents that are remembered, the latest: as many chains on their way out at one time."""


class Learned(Gate):
    """See the module. chance: None stands for certainty."""

    def __init__(self, spec: TierSpec, blocks: Blocks, chance: Chance | None = None) -> None:
        super().__init__(spec, blocks, chance)
        self._steering = Steering(self._budget)
        self._floor = Floor(FLOOR, spec.capacity_bytes)
        self._promised: dict[int, None] = {}
        self._owed_bytes = 0.0
        self._due_bytes: dict[int, int] = {}
        self._costs: dict[int, float] = {}  # by block id, what it and all before it cost; of one call
        self._left_bytes, self._moment = 0.0, -math.inf

    def price(self) -> float:
        """The least chance that passed when it was asked last; 0.0 where the budget covers all."""
        return self._steering.price

    def worth(self, blocks: Ids, now: float) -> Worth:
        """The chance of each, 0 below the floor while that stands."""
        if self._chance is None:
            return np.ones(len(blocks))
        chances = np.clip(self._chance(blocks, now), 0.0, 1.0)
        is_low = chances < FLOOR
        self._floor.offered(names_of(self._blocks, blocks), is_low, self._blocks.length[blocks])
        return np.where(is_low, 0.0, chances) if self._floor.stands() else np.maximum(chances, _LEAST_WORTH)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        super().touch(blocks, now)
        if len(self._floor):
            self._floor.used(names_of(self._blocks, blocks))

    def paid(self, blocks: Ids, worth: Worth, sizes_bytes: Sizes, now: float) -> Mask:
        """What the threshold lets through, as far as the level pays for it and for all before it."""
        shares = self._steering.shares(worth, sizes_bytes, now)
        if not self._budget:
            return np.ones(len(blocks), bool)
        self._open(sizes_bytes, now)
        passed = self._passed(blocks, sizes_bytes, shares)
        chosen = passed.copy()
        chosen[passed] = super().paid(blocks[passed], worth[passed], sizes_bytes[passed], now)
        return chosen

    def _open(self, sizes_bytes: Sizes, now: float) -> None:
        """What is left of the level, beside what is due for heads of this very moment."""
        if now != self._moment:
            self._due_bytes.clear()
        self._moment = now
        self._costs.clear()
        self._budget.allow(sizes_bytes)
        self._left_bytes = self._budget.level(now) - sum(self._due_bytes.values())

    def _passed(self, blocks: Ids, sizes_bytes: Sizes, shares: Worth) -> Mask:
        """What is promised, what passes whole, and of what passes in part a run as long as is owed."""
        names, parents = names_of(self._blocks, blocks).tolist(), names_before(self._blocks, blocks).tolist()
        passed = np.zeros(len(blocks), bool)
        for row, (name, size, share) in enumerate(zip(names, sizes_bytes.tolist(), shares.tolist(), strict=True)):
            if share < 1:
                self._owed_bytes = min(self._owed_bytes + share * size, size)
                if name not in self._promised and not (share and self._owed_bytes > 0):
                    continue
            if not self._pays(int(blocks[row]), name, size):
                continue
            self._owed_bytes -= size if share < 1 else 0.0
            passed[row] = True
            self._promised.pop(name, None)
            self._promised[parents[row]] = None
        while len(self._promised) > PROMISES:
            del self._promised[next(iter(self._promised))]
        return passed

    def _pays(self, block: int, name: int, size_bytes: int) -> bool:
        """Whether the block can be paid with what is before it; then that is due."""
        if self._due_bytes.pop(name, 0):
            return True
        if size_bytes + self._cost_before(block) > self._left_bytes:
            return False
        before = self._missing_before(block)
        sizes = self._blocks.length[before].tolist()
        bill = dict(zip(names_of(self._blocks, before).tolist(), sizes, strict=True))
        bill = {name: size for name, size in bill.items() if name not in self._due_bytes}
        cost = size_bytes + sum(bill.values())
        if cost > self._left_bytes:
            return False
        self._left_bytes -= cost
        self._due_bytes |= bill
        if bill:
            self._costs.clear()
        return True

    def _cost_before(self, block: int) -> float:
        """Bytes to be paid for what is before the block. Known of every block on the way from then on: a chain that cannot be paid is walked once."""
        before = self._missing_before(block, known=self._costs)
        if len(before) >= BEFORE_LIMIT:
            self._costs |= dict.fromkeys(before[: BEFORE_LIMIT // 2].tolist(), math.inf)
            return math.inf
        above = int(self._blocks.parent[before[-1] if len(before) else block])
        cost = self._costs.get(above, 0)
        rows = zip(
            before.tolist(), names_of(self._blocks, before).tolist(), self._blocks.length[before].tolist(), strict=True
        )
        for one, name, size in reversed(list(rows)):
            cost += 0 if name in self._due_bytes else size
            self._costs[one] = cost
        return cost

    def _missing_before(self, block: int, known: Container[int] = ()) -> Ids:
        """What must be written before the block is of use: the blocks before it, up to one that a store has, or is known, BEFORE_LIMIT at most. Each once: parents
        are what clients say, and may go round."""
        parent, kept = self._blocks.parent.data, self._blocks.kept.data
        above, found = parent[block], dict.fromkeys((block,))
        while above >= 0 and not kept[above] and above not in found and above not in known:
            if len(found) > BEFORE_LIMIT:
                break
            found[above] = None
            above = parent[above]
        return np.fromiter(found, np.int64, len(found))[1:]
