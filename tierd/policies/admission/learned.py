"""Learned: writes a block if its chance of another use is above a threshold; the budget sets that.

A learner of reuse gives the chance (`chance`). With a wear budget, the threshold is steered so that
the best blocks pass and the budget is just met (steering.py). Without one it is FLOOR. Below FLOOR
a write is waste on any drive, while such blocks are as seldom used as was learnt (floor.py).

The aim is Flashield's: flash is for blocks that have shown in memory that they are worth it (A.
Eisenman et al., "Flashield: a Hybrid Key-value Cache that Controls Flash Write Amplification", NSDI
2019, section 4).

Any use of a block uses all blocks before it, so those are worth at least as much. A learner need
not say so, and a budget that runs out within a chain could write a tail without its head. So a
block passes only if the budget also pays for all blocks before it. That sum is *due* for this
moment, since heads are asked about after their tails. The parent of a block that passes is
*promised*: it passes the threshold too, whenever it is asked about.
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
"""Below it no write pays: on the developers' traces such blocks cost more hits than they bring."""
_LEAST_WORTH = 1e-9
BEFORE_LIMIT = 1 << 14
"""How many blocks before one are counted. A block with half as many or more unpaid blocks before it
may be refused. It then waits until the head of its chain is written."""
PROMISES = 65536
"""The latest names of parents that are remembered: as many chains may be evicted at one time."""


class Learned(Gate):
    """chance: None stands for certainty."""

    def __init__(self, spec: TierSpec, blocks: Blocks, chance: Chance | None = None) -> None:
        super().__init__(spec, blocks, chance)
        self._steering = Steering(self._budget)
        self._floor = Floor(FLOOR, spec.capacity_bytes)
        self._promised: dict[int, None] = {}
        self._owed_bytes = 0.0
        self._due_bytes: dict[int, int] = {}
        self._costs: dict[int, float] = {}  # block id -> bytes to pay for it and all before it, within one call
        self._left_bytes, self._moment = 0.0, -math.inf

    def price(self) -> float:
        """The least chance that passed in the last call; 0.0 if the budget covers all."""
        return self._steering.price

    def worth(self, blocks: Ids, now: float) -> Worth:
        """The chance of each block; 0 below the floor while that stands."""
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
        """Blocks above the threshold, if the level pays for them and all before them."""
        shares = self._steering.shares(worth, sizes_bytes, now)
        if not self._budget:
            return np.ones(len(blocks), bool)
        self._open(sizes_bytes, now)
        passed = self._passed(blocks, sizes_bytes, shares)
        chosen = passed.copy()
        chosen[passed] = super().paid(blocks[passed], worth[passed], sizes_bytes[passed], now)
        return chosen

    def _open(self, sizes_bytes: Sizes, now: float) -> None:
        """Computes the level less the bytes that are due for heads of this moment."""
        if now != self._moment:
            self._due_bytes.clear()
        self._moment = now
        self._costs.clear()
        self._budget.allow(sizes_bytes)
        self._left_bytes = self._budget.level(now) - sum(self._due_bytes.values())

    def _passed(self, blocks: Ids, sizes_bytes: Sizes, shares: Worth) -> Mask:
        """Blocks that are promised or pass whole, and as many at the threshold as are owed."""
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
        """Whether the budget pays for the block and all before it; if so, those are due."""
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
        """Bytes to pay for the blocks before this one. The cost of every block on the way is kept:
        a chain that cannot be paid is walked once."""
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
        """The blocks that must be written before this one is of use, each once. It ends at a block
        that is known or stored, and after BEFORE_LIMIT. Parents may be cyclic."""
        parent, kept = self._blocks.parent.data, self._blocks.kept.data
        above, found = parent[block], dict.fromkeys((block,))
        while above >= 0 and not kept[above] and above not in found and above not in known:
            if len(found) > BEFORE_LIMIT:
                break
            found[above] = None
            above = parent[above]
        return np.fromiter(found, np.int64, len(found))[1:]
