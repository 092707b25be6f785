"""Second touch: a block is written once it was used twice.

The simplest filter of flash caches: LARC (S. Huang, Q. Wei, J. Chen, C. Chen, D. Feng, "Improving
Flash-based Disk Cache with Lazy Adaptive Replacement", MSST 2013, section III), and "reject first"
in CacheLib (B. Berg et al., "The CacheLib Caching Engine", OSDI 2020). Its cost here: a chat's
first turn has been used only once, so its second turn always misses on disk.

A block counts as used twice if it was used since it came, or if it was declined before and has come
again. Declined names are kept in a table with one place each; a later name overwrites an earlier
one. The table is bounded, and its errors only cause fewer writes.
"""

from __future__ import annotations

import numpy as np

from tierd.core.admission import Chance
from tierd.core.formats.model import TierSpec
from tierd.core.index.blocks import Blocks
from tierd.core.plan import Ids
from tierd.policies.admission.gate import Gate, Worth, names_of

PLACES = 1 << 18
"""Declined names that are remembered, 2 MiB."""


class SecondTouch(Gate):
    """See the module."""

    def __init__(self, spec: TierSpec, blocks: Blocks, chance: Chance | None = None) -> None:
        super().__init__(spec, blocks, chance)
        self._declined = np.zeros(PLACES, np.uint64)

    def worth(self, blocks: Ids, now: float) -> Worth:
        """1 for blocks that were used since they came, or have come again."""
        names = names_of(self._blocks, blocks)
        places = (names % np.uint64(PLACES)).astype(np.int64)
        again = (self._blocks.hits[blocks] > 0) | (self._declined[places] == names)
        self._declined[places[~again]] = names[~again]
        return np.asarray(again, np.float64)
