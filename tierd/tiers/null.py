"""A tier that is not there: it holds nothing and takes nothing, so that "no such tier" is no special case.

Purpose: `NullStore`, the stored tier of capacity zero. Invariant: nothing is ever READY.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierd.core.meta import META
from tierd.core.model import EXTENT, BlockStatus, SegmentAssignment, StructArray, TierSpec
from tierd.errors import TierFailed
from tierd.tiers.slots import SlotFile
from tierd.tiers.tier import HashRows, Health, Payloads, ReadResult, Recovered, SliceTable

if TYPE_CHECKING:
    from tierd.core.plan import Plan


class NullStore:
    """Reads and writes are FAILED; everything else succeeds and does nothing."""

    def __init__(self, spec: TierSpec, *, position: int) -> None:
        self.spec = spec
        self.position = position
        self.mode = "absent"
        self.place = ""
        self.notices: list[str] = []
        self.is_stuck = False

    def health(self) -> Health:
        """It is not there."""
        return Health(fault=f"{self.spec.name}: the tier is absent; configure it, or leave it out")

    def heed(self, stir: Callable[[], None]) -> None:
        """It stays as it is."""

    async def probe(self) -> None:
        """Raises TierFailed."""
        raise TierFailed(self.health().fault)

    def holds(self, extents: StructArray) -> NDArray[np.bool_]:
        """Nothing."""
        return np.zeros(len(extents), dtype=np.bool_)

    def take_lost(self) -> StructArray:
        """Nothing was held."""
        return np.zeros(0, EXTENT)

    async def open(self) -> Recovered:
        """Nothing."""
        return Recovered([], np.zeros(0, EXTENT), np.zeros(0, META))

    def apply(self, plan: Plan) -> None:
        """Passes every plan over."""

    async def prepare(self, segments: Sequence[SegmentAssignment]) -> None:
        """Raises TierFailed for a segment of its own: there is no room for any."""
        if any(segment.tier == self.position for segment in segments):
            raise TierFailed(f"{self.spec.name}: the tier is absent and has no segments; configure it, or leave it out")

    async def keep_namespace(self, record: bytes) -> None:
        """Keeps nothing."""

    async def read(
        self,
        extents: StructArray,
        targets: Sequence[memoryview],
        metas: StructArray,
        *,
        arrived: HashRows | None = None,
    ) -> ReadResult:
        """All FAILED; targets stay as they are."""
        return ReadResult(_failed(extents), [np.zeros(0, np.uint64)] * len(extents))

    async def check(self, extents: StructArray, metas: StructArray) -> NDArray[np.uint16]:
        """All FAILED."""
        return _failed(extents)

    def payloads(self, extents: StructArray) -> Payloads:
        """Nowhere."""
        return Payloads([None] * len(extents), [0] * len(extents))

    def has_file(self, file: SlotFile) -> bool:
        """None is its."""
        return False

    async def write(
        self,
        extents: StructArray,
        metas: StructArray,
        hash_rows: HashRows,
        sources: Sequence[memoryview],
        *,
        known: Sequence[SliceTable | None] = (),
    ) -> NDArray[np.uint16]:
        """All FAILED."""
        return _failed(extents)

    async def sync(self) -> None:
        """Nothing was written."""

    async def close(self, *, release: bool) -> None:
        """Nothing is held."""


def _failed(extents: StructArray) -> NDArray[np.uint16]:
    return np.full(len(extents), BlockStatus.FAILED, dtype=np.uint16)
