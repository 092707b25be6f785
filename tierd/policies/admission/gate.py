"""The common part of admission policies: refuses short blocks; the wear budget decides last.

A verdict has two questions: is the write worth it, and does the budget pay for it. Each policy
answers the first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.core.admission import Balance, Chance, Sizes, Verdict, Verdicts
from tierd.core.eviction import Mask
from tierd.core.formats.model import TierSpec
from tierd.core.index.blocks import Blocks
from tierd.core.plan import Ids
from tierd.policies.admission.budget import Budget
from tierd.policies.admission.tails import Tails

Names = NDArray[np.uint64]
Worth = NDArray[np.float64]

_NAMESPACE_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)


class Gate:
    """The base of all admission policies: they override `worth`, some also `paid`. spec: of the
    tier. chance: of another use, for policies that read it."""

    def __init__(self, spec: TierSpec, blocks: Blocks, chance: Chance | None = None) -> None:
        self._blocks = blocks
        self._chance = chance
        self._budget = Budget(spec.wear_bytes_per_s, burst_s=spec.wear_burst_s)
        self._tails = Tails(blocks)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        self._budget.advance(now)

    def worth(self, blocks: Ids, now: float) -> Worth:
        """The rank of each full block, above 0 if it deserves a write. Coldest first."""
        return np.ones(len(blocks))

    def admit(self, blocks: Ids, sizes_bytes: Sizes, now: float) -> Verdicts:
        """Admits full blocks that are worth it, as far as the budget reaches."""
        self._budget.advance(now)
        verdicts = np.full(len(blocks), Verdict.PARTIAL, np.uint8)
        full = np.flatnonzero(~self._tails.are_short(blocks))
        worth = self.worth(blocks[full], now)
        verdicts[full] = np.where(worth > 0, Verdict.BUDGET, Verdict.UNLIKELY)
        good = full[worth > 0]
        verdicts[good[self.paid(blocks[good], worth[worth > 0], sizes_bytes[good], now)]] = Verdict.WRITE
        return verdicts

    def paid(self, blocks: Ids, worth: Worth, sizes_bytes: Sizes, now: float) -> Mask:
        """Pays for the worthiest first; of a chain its head, which is of use without a tail."""
        order = np.lexsort((self._blocks.position[blocks], -worth))
        return self._budget.afforded(order, sizes_bytes, now)

    def wrote(self, size_bytes: int, now: float) -> None:
        """Takes a write that has begun from the budget."""
        self._budget.spend(size_bytes, now)

    def balance(self, now: float) -> Balance:
        """The budget's state."""
        return self._budget.balance(now)

    def resume(self, level_bytes: float, now: float) -> None:
        """Restores the budget's level of a previous run."""
        self._budget.resume(level_bytes, now)


def names_of(blocks: Blocks, ids: Ids) -> Names:
    """uint64 [n]: one number per name, the same in every process."""
    return _numbers(blocks, blocks.hash[ids, 0], ids)


def names_before(blocks: Blocks, ids: Ids) -> Names:
    """uint64 [n]: the number of each block's parent; an unused number if the parent is unknown."""
    parents = blocks.parent[ids]
    return _numbers(blocks, np.where(parents < 0, np.uint64(0), blocks.hash[parents, 0]), ids)


def _numbers(blocks: Blocks, words: Names, ids: Ids) -> Names:
    return np.asarray(words ^ (blocks.namespace[ids].astype(np.uint64) * _NAMESPACE_FACTOR), np.uint64)
