"""Learned: a block is written if another use is likely enough, and how likely that is follows from the wear budget.

Purpose: ours. The chance of another use comes from whoever learns reuse (`chance`); with a budget the threshold is steered so that just as much passes
as may be written, the best of it (steering.py); without one it is FLOOR, below which a write is waste whatever the drive.
The aim is Flashield's (A. Eisenman et al., "Flashield: a Hybrid Key-value Cache that Controls Flash Write Amplification", NSDI 2019, section 4): flash
is for what memory has shown to be worth it.

A block is used whenever one after it is, so it is worth at least as much; but a learner need not say so, and a budget that ends in the middle
of a chain could leave a tail without its head. So the parent of what passes is *promised*: when it is asked about, it passes too.
"""

from __future__ import annotations

import numpy as np

from tierd.core.admission import Chance, Sizes
from tierd.core.blocks import Blocks
from tierd.core.eviction import Mask
from tierd.core.model import TierSpec
from tierd.core.plan import Ids
from tierd.policies.admission.gate import Gate, Worth, names_before, names_of
from tierd.policies.admission.steering import Steering

FLOOR = 0.2
"""A chance below it is worth no write on any drive: on the developers' traces such blocks cost more hits by what they displace than they bring."""
PROMISES = 65536
"""Names of parents that are remembered, the latest: as many chains on their way out at one time."""


class Learned(Gate):
    """See the module. chance: None stands for certainty."""

    def __init__(self, spec: TierSpec, blocks: Blocks, chance: Chance | None = None) -> None:
        super().__init__(spec, blocks, chance)
        self._steering = Steering(self._budget)
        self._promised: dict[int, None] = {}
        self._owed_bytes = 0.0

    def worth(self, blocks: Ids, now: float) -> Worth:
        """The chance of each, 0 below the floor."""
        if self._chance is None:
            return np.ones(len(blocks))
        chances = np.clip(self._chance(blocks, now), 0.0, 1.0)
        return np.where(chances >= FLOOR, chances, 0.0)

    def paid(self, blocks: Ids, worth: Worth, sizes_bytes: Sizes, now: float) -> Mask:
        """What the threshold lets through, as far as the level reaches too."""
        shares = self._steering.shares(worth, sizes_bytes, now)
        passed = self._passed(blocks, sizes_bytes, shares)
        chosen = passed.copy()
        chosen[passed] = super().paid(blocks[passed], worth[passed], sizes_bytes[passed], now)
        self._owed_bytes += float(sizes_bytes[passed & ~chosen & (shares < 1)].sum())
        return chosen

    def _passed(self, blocks: Ids, sizes_bytes: Sizes, shares: Worth) -> Mask:
        """What is promised, what passes whole, and of what passes in part a run as long as is owed."""
        names, parents = names_of(self._blocks, blocks).tolist(), names_before(self._blocks, blocks).tolist()
        passed = np.zeros(len(blocks), bool)
        for row, (name, size, share) in enumerate(zip(names, sizes_bytes.tolist(), shares.tolist(), strict=True)):
            if share < 1:
                self._owed_bytes = min(self._owed_bytes + share * size, size)
                if name not in self._promised and not (share and self._owed_bytes > 0):
                    continue
                self._owed_bytes -= size
            passed[row] = True
            self._promised.pop(name, None)
            self._promised[parents[row]] = None
        while len(self._promised) > PROMISES:
            del self._promised[next(iter(self._promised))]
        return passed
