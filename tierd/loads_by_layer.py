"""Loads of many large blocks, layer by layer.

    slots, or host pages ─▶ first layers of all blocks ─▶ verified ─▶ told to clients, then the next

A client that holds a lease on the pages computes with the first layers while later ones arrive. Its
side is `tierd/client/blocks/arrival.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import gcd

import numpy as np
from numpy.typing import NDArray

from tierd.checksum import raw_tables, table_digests
from tierd.core.formats.block import slice_cut
from tierd.core.formats.model import PAGE_ALIGN_BYTES, StructArray
from tierd.failpoint import failpoint
from tierd.tiers.io.pieces import NOT_READ, PIECE
from tierd.tiers.tier import DeviceTier, MappedTier, Parts, SharedTier, SliceTable, StoredTier

MOST_PARTS = 17
"""Each part is another read of each block. With 32 layers, this is one for two layers, and one each
for the first two."""
MOST_COPIES = 8
"""A copy to a GPU is much faster than computing, so that more parts would hide little more."""
PART_BYTES = 120 << 10
"""Least bytes of a block in a part, on average: a disk reads shorter pieces more slowly."""
PART_BATCH_BYTES = 3 << 19
"""Least bytes of a batch in a part, on average: each part is told to clients."""


def layer_stops(metas: StructArray, most: int = MOST_PARTS) -> list[int]:
    """Layers of the longest of these blocks, META [n], after each of at most so many parts of their
    load. Parts begin at multiples of 4 KiB in these blocks.

    A client waits for the first part, so the first two are half as long as the others. Those are
    equal: the longest counts if loading takes as long as computing.
    """
    lengths, layers = metas["stored_length"], metas["layers"]
    longest = int(np.argmax(lengths))
    length, count = int(lengths[longest]), slice_cut(int(lengths[longest]), int(layers[longest])).layers
    step = PAGE_ALIGN_BYTES // gcd(length // max(1, count), PAGE_ALIGN_BYTES)  # layers
    steps = max(1, count // step)
    parts = max(1, min(most, steps, length // PART_BYTES, int(lengths.sum()) // PART_BATCH_BYTES))
    weights = np.full(parts, 2)
    if 1 < parts < steps:
        weights[:2] = 1
    stops = np.unique((steps * np.cumsum(weights) / weights.sum()).round().astype(int))
    return [*(step * stops[:-1]).tolist(), count]


class _ByLayer:
    """A batch in parts. batch: TRANSFER [n] of blocks that are not encoded; metas: META [n].

    The first part has all of a block whose layers are not cut as those of the longest one.
    """

    most_parts = MOST_PARTS

    def __init__(self, batch: StructArray, metas: StructArray) -> None:
        self._batch, self._metas = batch, metas
        lengths, shapes = metas["stored_length"].astype(np.int64), metas[["stored_length", "layers"]].tolist()
        layers, pieces = np.array([slice_cut(*shape)[3:0:-2] for shape in shapes], np.int64).T
        stops = np.array(layer_stops(metas, self.most_parts))
        sizes = lengths // np.maximum(layers, 1)
        is_cut = (layers == stops[-1]) & ~(sizes[:, None] * stops[:-1] % PAGE_ALIGN_BYTES).any(axis=1)
        # Before each part, and in all: layers, slices and bytes of each block.
        self._layers = np.where(is_cut[:, None], [0, *stops], layers[:, None])
        self._layers[:, 0] = 0
        self._counts = self._layers * pieces[:, None]
        self._offsets = self._layers * sizes[:, None]
        self._sums, self._known = np.zeros((2, len(batch), int(self._counts.max(initial=1))), "<u8")
        self._is_known = np.zeros(len(batch), np.bool_)

    @classmethod
    def is_of_use(cls, batch: StructArray, metas: StructArray) -> bool:
        """Whether a client waits for layers of these blocks, and they have several parts."""
        return bool(batch["by_layer"].any()) and len(layer_stops(metas, cls.most_parts)) > 1

    @property
    def slices(self) -> list[SliceTable]:
        """Sums of each block; 0 for slices that have not arrived."""
        return [sums[:count] for sums, count in zip(self._sums, self._counts[:, -1].tolist(), strict=True)]

    def _learn(self, rows: NDArray[np.int64], tables: Sequence[SliceTable | None]) -> None:
        """Notes the tables of these rows that are their blocks'."""
        for row, count in zip(rows.tolist(), self._counts[rows, -1].tolist(), strict=True):
            table = tables[row]
            if table is not None and len(table) == count:
                self._known[row, :count], self._is_known[row] = table, True
        digests = table_digests(raw_tables([self._known[row, : self._counts[row, -1]] for row in rows.tolist()]))
        self._is_known[rows] &= (digests == self._metas["digest"][rows]).all(axis=1)

    def _note(
        self, target: SharedTier, part: int, rows: NDArray[np.int64], tables: Sequence[SliceTable | None]
    ) -> None:
        """Tells clients of the blocks whose sums are those of their tables so far. tables: of all blocks."""
        failpoint("loads_by_layer.note.before_note")
        if part == 0:
            self._learn(rows, tables)
        rows = rows[self._is_known[rows] & (self._counts[rows, part + 1] > self._counts[rows, part])]
        counts = self._counts[rows, part + 1]
        is_later = np.arange(self._sums.shape[1]) >= counts[:, None]
        good = ((self._sums[rows] == self._known[rows]) | is_later).all(axis=1)
        if good.any():
            target.note_arrived(self._batch["target"][rows[good]], counts[good])


class LoadByLayer(_ByLayer):
    """From a store to a mapped tier."""

    async def run(self, source: StoredTier, target: MappedTier) -> NDArray[np.uint16]:
        """Reads all blocks, and fills `slices`. BlockStatus u2 [n], by the slots' headers; the caller
        judges the sums."""
        pages = target.views(self._batch["target"])
        addresses = np.array([np.frombuffer(page, np.uint8).ctypes.data for page in pages], np.uint64)
        pieces = np.zeros(self._layers[:, 1:].T.shape, PIECE)
        pieces["offset"], pieces["length"] = self._offsets[:, :-1].T, np.diff(self._offsets).T
        pieces["layers"], pieces["target"] = np.diff(self._layers).T, addresses + pieces["offset"]
        rows = self._sums.ctypes.data + np.arange(len(pages)) * self._sums.strides[0]
        pieces["sums"] = rows + self._counts[:, :-1].T * self._sums.itemsize
        pieces["error"] = NOT_READ
        parts = Parts(pieces, partial(self._note, target))
        result = await source.read(self._batch["source"], pages, self._metas, parts=parts)
        return np.asarray(result.statuses, dtype=np.uint16).copy()


class CopyByLayer(_ByLayer):
    """From a mapped tier to a GPU, which sums what it has."""

    most_parts = MOST_COPIES

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
                self._sums[row, first:stop] = sums
            self._note(target, part, rows, tables)
