"""TinyLFU: a block is written if an ageing count-min sketch says that it was used often lately.

G. Einziger, R. Friedman, B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM TOS
13(4), 2017, sections 3.2 (the sketch) and 3.3 (every `sample` uses all counters are halved).
Counters are small and saturate (3.4.1). An update raises only the least of a name's counters.

Differences. (1) The paper compares a candidate with the victim that it would replace. A store
evicts its victim long after the write, and another policy chooses it. So a candidate is compared
with the average demand: it passes with at least LEAST_USES in the sample. (2) There is no
doorkeeper: a counter is a byte, and memory is not short.
"""

from __future__ import annotations

import numpy as np

from tierd.core.admission import Chance
from tierd.core.formats.model import TierSpec
from tierd.core.index.blocks import Blocks
from tierd.core.plan import Ids
from tierd.policies.admission.gate import Gate, Names, Worth, names_of

ROWS = 4
LEAST_USES = 2
MOST_USES = 15
"""The largest count, as in the paper: four bits."""
SAMPLE_USES_PER_COUNTER = 8
_LEAST_WIDTH, _MOST_WIDTH = 1 << 12, 1 << 20
_BYTES_PER_COUNTER = 1 << 20
"""Of the tier's capacity: blocks of large models are of that order."""
_FACTORS = np.array(
    [0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9, 0x27D4_EB2F_1656_67C5], np.uint64
)


class TinyLfu(Gate):
    """See the module."""

    def __init__(self, spec: TierSpec, blocks: Blocks, chance: Chance | None = None) -> None:
        super().__init__(spec, blocks, chance)
        width = min(max(spec.capacity_bytes // _BYTES_PER_COUNTER, _LEAST_WIDTH), _MOST_WIDTH)
        self._bits = int(width - 1).bit_length()
        self._counters = np.zeros((ROWS, 1 << self._bits), np.uint8)
        self._left = self._sample = SAMPLE_USES_PER_COUNTER << self._bits

    def touch(self, blocks: Ids, now: float) -> None:
        """Counts a use of each; ages all when the sample is full."""
        super().touch(blocks, now)
        slots = self._slots(names_of(self._blocks, blocks))
        counts = np.take_along_axis(self._counters, slots, axis=1)
        least = counts.min(axis=0, initial=MOST_USES)
        for row in range(ROWS):
            raised = slots[row][(counts[row] == least) & (least < MOST_USES)]
            self._counters[row][raised] += 1
        self._left -= len(blocks)
        if self._left <= 0:
            self._counters >>= 1
            self._left = self._sample // 2

    def worth(self, blocks: Ids, now: float) -> Worth:
        """1 for blocks that the sketch saw at least LEAST_USES times in the sample."""
        slots = self._slots(names_of(self._blocks, blocks))
        counts = np.take_along_axis(self._counters, slots, axis=1)
        return np.asarray(counts.min(axis=0, initial=MOST_USES) >= LEAST_USES, np.float64)

    def _slots(self, names: Names) -> Ids:
        """int64 [ROWS, n]: multiplicative hashing, one factor a row."""
        mixed = (names ^ (names >> np.uint64(32)))[None, :] * _FACTORS[:, None]
        return (mixed >> np.uint64(64 - self._bits)).astype(np.int64)
