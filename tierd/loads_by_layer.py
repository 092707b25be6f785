"""Loads of many large blocks, layer by layer.

    slots, or host pages ─▶ first layers of all blocks ─▶ verified ─▶ told to clients, then the next

A client that holds a lease on the pages computes with the first layers while later ones arrive. Its
side is `tierd/client/blocks/arrival.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tierd.checksum import raw_tables, slice_sums, table_digests
from tierd.core.formats.block import slice_cut
from tierd.core.formats.model import PAGE_ALIGN_BYTES, StructArray
from tierd.failpoint import failpoint
from tierd.tiers.tier import DeviceTier, MappedTier, Parts, SharedTier, SliceTable, StoredTier

MOST_PARTS = 8
"""More would hide little more, and each part is another read of each block."""
PART_BYTES = 256 << 10
"""Least bytes of a block in a part, on average: a disk reads shorter pieces more slowly."""
PART_BATCH_BYTES = 4 << 20
"""Least bytes of a batch in a part, on average, so that the disk's queue stays full."""


def layer_stops(metas: StructArray) -> list[int]:
    """Layers of the longest of these blocks, META [n], after each part of their load.

    A client waits for the first part, so the first two are half as long as the others. Those are
    equal: the longest counts if loading takes as long as computing.
    """
    lengths, layers = metas["stored_length"], metas["layers"]
    longest = int(np.argmax(lengths))
    count = slice_cut(int(lengths[longest]), int(layers[longest])).layers
    most = min(count, int(lengths[longest]) // PART_BYTES, int(lengths.sum()) // PART_BATCH_BYTES)
    parts = max(1, min(MOST_PARTS, most))
    if parts in (1, count):
        return list(range(count // parts, count + 1, count // parts))
    weights = np.full(parts, 2)
    weights[:2] = 1
    return [int(stop) for stop in np.unique((count * np.cumsum(weights) / weights.sum()).round())]


def parts_of(metas: StructArray) -> int:
    """In how many parts these blocks are loaded, META [n]; 1: whole."""
    return len(layer_stops(metas))


class _ByLayer:
    """A batch in parts. batch: TRANSFER [n] of blocks that are not encoded; metas: META [n].

    slices: sums of each block, as they arrive.
    """

    def __init__(self, batch: StructArray, metas: StructArray) -> None:
        self._batch, self._metas = batch, metas
        cuts = [slice_cut(*of) for of in zip(metas["stored_length"].tolist(), metas["layers"].tolist(), strict=True)]
        self._lengths = [([cut.piece] * (cut.pieces - 1) + [cut.last]) * cut.layers for cut in cuts]
        self.slices: list[SliceTable] = [np.zeros(len(lengths), "<u8") for lengths in self._lengths]
        stops = np.array([0, *layer_stops(metas)])
        # Before each part, and in all: layers, slices and bytes of each block.
        self._layers = np.array([cut.layers for cut in cuts])[:, None] * stops // stops[-1]
        self._counts = self._layers * np.array([cut.pieces for cut in cuts])[:, None]
        ends = [np.cumsum([0, *lengths])[at] for lengths, at in zip(self._lengths, self._counts, strict=True)]
        self._offsets = np.array(ends)

    def _note(
        self, target: SharedTier, part: int, rows: NDArray[np.int64], tables: Sequence[SliceTable | None]
    ) -> None:
        """Tells clients of the blocks whose sums are those of their tables so far."""
        failpoint("loads_by_layer.note.before_note")
        if not len(rows):
            return
        known = [np.zeros(0, "<u8") if table is None else table for table in tables]
        good = (table_digests(raw_tables(known)) == self._metas["digest"][rows]).all(axis=1)
        counts = self._counts[rows, part + 1]
        for i, (row, table, count) in enumerate(zip(rows.tolist(), known, counts.tolist(), strict=True)):
            good[i] = good[i] and np.array_equal(self.slices[row][:count], table[:count])
        target.note_arrived(self._batch["target"][rows[good]], counts[good])


class LoadByLayer(_ByLayer):
    """From a store to a mapped tier."""

    def __init__(self, batch: StructArray, metas: StructArray, target: MappedTier) -> None:
        super().__init__(batch, metas)
        self._target, self._pages = target, target.views(batch["target"])
        self._came = self._counts[:, 1:] == self._counts[:, :-1]  # parts in which a block has no slice are there
        self._summed = [0] * len(batch)  # leading parts

    async def run(self, source: StoredTier) -> NDArray[np.uint16]:
        """Reads all blocks. BlockStatus u2 [n], by the slots' headers; the caller judges the sums."""
        ends = -(-self._offsets[:, 1:] // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        parts = Parts(ends, self._arrived, partial(self._note, self._target))
        result = await source.read(self._batch["source"], self._pages, self._metas, parts=parts)
        return np.asarray(result.statuses, dtype=np.uint16).copy()

    def _arrived(self, part: int, rows: Sequence[int]) -> list[None]:
        """Sums slices, in one thread of the store at a time. A slice may begin in the last 4 KiB of the
        part before. So a part that comes too early is summed with that one."""
        for row in rows:
            self._came[row, part] = True
            done, came = self._summed[row], int(np.logical_and.accumulate(self._came[row]).sum())
            first, stop = self._counts[row, [done, came]].tolist()
            start, end = self._offsets[row, [done, came]].tolist()
            if stop > first:
                self.slices[row][first:stop] = slice_sums(self._pages[row][start:end], self._lengths[row][first:stop])
            self._summed[row] = came
        return [None] * len(rows)


class CopyByLayer(_ByLayer):
    """From a mapped tier to a GPU, which sums what it has."""

    @property
    def is_aligned(self) -> bool:
        """Whether parts begin where a GPU copies and sums fast."""
        return bool((self._offsets[:, :-1] % PAGE_ALIGN_BYTES == 0).all())

    async def run(self, source: MappedTier, target: DeviceTier) -> None:
        """Copies all blocks, and fills `slices`. Raises TierFailed."""
        tables = source.slices(self._batch["source"])
        for part in range(self._layers.shape[1] - 1):
            layers, sizes = (np.diff(of)[:, part] for of in (self._layers, self._offsets))
            rows = np.flatnonzero(sizes)
            if not len(rows):
                continue
            extents, sources = self._batch["target"][rows].copy(), self._batch["source"][rows].copy()
            metas = self._metas[rows].copy()
            extents["offset"] += self._offsets[rows, part].astype(np.uint64)
            sources["offset"] += self._offsets[rows, part].astype(np.uint64)
            metas["stored_length"], metas["layers"] = sizes[rows], layers[rows]
            came = await target.load(extents, metas, source=source, sources=sources)
            for row, sums in zip(rows.tolist(), came, strict=True):
                first, stop = self._counts[row, part : part + 2].tolist()
                self.slices[row][first:stop] = sums
            self._note(target, part, rows, [tables[row] for row in rows.tolist()])
