"""Floor: checks that blocks with a low learnt chance are seldom used again, so a write is waste.

The policy remembers each block below the floor that comes up for a write. Its outcome is *used* if
it is used again. It is *unused* once as many bytes have come up as the tier holds.
The floor stands while the used share is below `least`, and not before LEAST outcomes. A name is in
the sample if its number's first bits are 0. When more than SAMPLED names wait, one more bit counts.
Memory is bounded; equal calls give equal answers.
"""

from __future__ import annotations

import numpy as np

from tierd.core.admission import Sizes
from tierd.core.eviction import Mask
from tierd.policies.admission.gate import Names

SAMPLED = 4096
"""Names that wait at most."""
LEAST, REMEMBERED = 64, 1024
"""Outcomes that the floor needs, and those that are counted: above that, all counts are halved."""
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


class Floor:
    """least: the share of used blocks. capacity_bytes: of the tier."""

    def __init__(self, least: float, capacity_bytes: int) -> None:
        self._least, self._capacity_bytes = least, capacity_bytes
        self._waiting = dict[int, float]()  # names -> bytes that had come up by then
        self._offered_bytes, self._bits = 0.0, 0
        self._used, self._unused = 0.0, 0.0

    def __len__(self) -> int:
        """Names that wait."""
        return len(self._waiting)

    def stands(self) -> bool:
        """Whether a chance below the floor is to be believed."""
        outcomes = self._used + self._unused
        return outcomes >= LEAST and self._used < self._least * outcomes

    def offered(self, names: Names, is_low: Mask, sizes_bytes: Sizes) -> None:
        """Blocks with these names came up for a write; `is_low`: below the floor."""
        self._offered_bytes += float(sizes_bytes.sum())
        for name in self._sampled(names[is_low]):
            self._waiting.pop(name, None)
            self._waiting[name] = self._offered_bytes
        while len(self._waiting) > SAMPLED:
            self._bits += 1
            kept = self._sampled(np.fromiter(self._waiting, np.uint64, len(self._waiting)))
            self._waiting = {name: self._waiting[name] for name in kept}
        while self._waiting:
            name = next(iter(self._waiting))
            if self._offered_bytes - self._waiting[name] <= self._capacity_bytes:
                break
            del self._waiting[name]
            self._count(0, 1)

    def used(self, names: Names) -> None:
        """Blocks with these names were used, or have come again."""
        for name in self._sampled(names):
            if self._waiting.pop(name, None) is not None:
                self._count(1, 0)

    def _sampled(self, names: Names) -> list[int]:
        if self._bits:
            names = names[(names * _MIX) >> np.uint64(64 - self._bits) == 0]
        sampled: list[int] = names.tolist()
        return sampled

    def _count(self, used: int, unused: int) -> None:
        if self._used + self._unused >= REMEMBERED:
            self._used, self._unused = self._used / 2, self._unused / 2
        self._used, self._unused = self._used + used, self._unused + unused
