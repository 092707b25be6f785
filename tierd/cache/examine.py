"""Examines pages: whether they hold the committed bytes, as the next reader would find out.

The result is a verdict (Fault) for each page of a batch, in any tier. `scrub.py` decides which
pages and when, and acts on verdicts. The examiner takes or pins no page. It reads stored pages into
its own memory, one batch at a time. If a page is freed meanwhile, its generation shows that the
verdict is void.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.cache.parts import Parts
from tierd.checksum import raw_tables, table_digests
from tierd.core.formats.model import CODED, PAGE_ALIGN_BYTES, BlockStatus, Fault, StructArray
from tierd.core.plan import PagesHeld
from tierd.errors import TierFailed
from tierd.tiers.tier import StoredTier, is_shared, is_stored

Faults = NDArray[np.uint8]
"""Fault per page. IO: the page could not be read."""


class Examiner:
    """Verifies batches, one at a time."""

    def __init__(self, parts: Parts) -> None:
        self._core, self._tiers, self._mover = parts.core, parts.tiers, parts.mover
        self._layers_of = parts.registry.layers_of
        self._scratch = memoryview(b"")

    async def examine(self, position: int, held: PagesHeld) -> Faults:
        """A verdict per page, uint8 [n]. held: the pages as they are at the time of the call."""
        tier, metas = self._tiers[position], self._core.metas(held.blocks)
        metas["layers"] = self._layers_of(metas["namespace"])
        try:
            if is_shared(tier):
                good = await self._mover.check(held.extents, metas)
                return np.where(good, Fault.NONE, Fault.DIGEST).astype(np.uint8)
            assert is_stored(tier)
            async with self._mover.last_turn(position):
                return await self._examine_stored(tier, held.extents, metas)
        except (TierFailed, OSError):
            return np.full(len(metas), Fault.IO, np.uint8)

    async def _examine_stored(self, tier: StoredTier, extents: StructArray, metas: StructArray) -> Faults:
        views = list(self._cut(extents["length"].tolist()))
        result = await tier.read(extents, views, metas)
        faults = np.full(len(metas), Fault.IO, np.uint8)
        faults[result.statuses == BlockStatus.CORRUPT] = Fault.HEADER
        rows = np.flatnonzero(result.statuses == BlockStatus.READY)
        if len(rows):
            payloads = [views[i][: int(extents["length"][i])] for i in rows.tolist()]
            wanted, coded = metas[rows], np.flatnonzero(extents["flags"][rows] & CODED)
            # The core knows no digest of an encoded block: its own header has the slice table.
            wanted["layers"][coded] = 0
            wanted["digest"][coded] = table_digests(raw_tables([result.slices[i] for i in rows[coded].tolist()]))
            hashed = await self._mover.hash(payloads, wanted)
            same = (hashed.digests == wanted["digest"]).all(axis=1)
            faults[rows] = np.where(same, Fault.NONE, Fault.DIGEST)
        return faults

    def _cut(self, lengths: Sequence[int]) -> Iterator[memoryview]:
        """Aligned memory for each block, side by side. It grows to the largest batch: one segment's
        page at most."""
        sizes = [-(-length // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES for length in lengths]
        if sum(sizes) > len(self._scratch):
            self._scratch = memoryview(mmap.mmap(-1, sum(sizes)))
        start = 0
        for size in sizes:
            yield self._scratch[start : start + size]
            start += size
