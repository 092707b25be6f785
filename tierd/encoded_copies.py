"""Copies between mapped memory and stores that keep blocks encoded.

    host page ─▶ private copy, verified ─▶ encoded ─▶ slot
    slot ─▶ verified ─▶ decoded ─▶ host page, or private memory on the way to another store

The core knows no digest of an encoded block. The slot's header has it; its generation shows that it
belongs to the block. Encoding and decoding run in the mover's threads.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.checksum import raw_tables, slice_sums, table_digests
from tierd.codecs.block import HEADER
from tierd.codecs.loops import scratch
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.model import CODED, PAGE_ALIGN_BYTES, BlockStatus, StructArray
from tierd.errors import CorruptRecord, TierdError
from tierd.failpoint import failpoint
from tierd.store_codecs import Encoded, StoreCodecs
from tierd.tiers.tier import MappedTier, SliceTable, StoredTier

ENCODE_PASSES = 8
"""Encoding or decoding takes at least as long as so many passes over the bytes."""
FAULTS = (TierdError, struct.error, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""Of a codec: they fail one block, and not its batch."""
Way = Callable[..., Awaitable[NDArray[np.uint16]]]
"""(batch, metas, source, target) -> BlockStatus u2 [n]."""


class EncodedRead(NamedTuple):
    """statuses: u2 [n] BlockStatus. payloads: encoded blocks; unknown bytes unless READY."""

    statuses: NDArray[np.uint16]
    payloads: list[memoryview]


class _EncodedBlock(NamedTuple):
    """table: of the encoded bytes, which are at the beginning of memory."""

    status: int
    table: SliceTable | None = None
    made: Encoded | None = None
    memory: memoryview | None = None


async def apart(
    stored: StructArray, batch: StructArray, metas: StructArray, plainly: Way, coded: Way, *ends: Any
) -> NDArray[np.uint16]:
    """Copies encoded blocks in one way, the others in another. stored: EXTENT [n] in the store."""
    is_coded = stored["flags"] & CODED > 0
    if not is_coded.any():
        return await plainly(batch, metas, *ends)
    statuses = np.zeros(len(batch), np.uint16)
    for way, rows in ((plainly, np.flatnonzero(~is_coded)), (coded, np.flatnonzero(is_coded))):
        if len(rows):
            some = metas[rows]
            statuses[rows] = await way(batch[rows], some, *ends)
            metas[rows] = some
    return statuses


class EncodedCopies:
    """in_threads: `Mover._in_threads`."""

    def __init__(self, store_codecs: StoreCodecs | None, in_threads: Callable[..., Awaitable[list[Any]]]) -> None:
        self._store_codecs, self._in_threads = store_codecs, in_threads
        self._error = ""

    def take_error(self) -> str:
        """Why the last block was not decoded; empty after it was asked once."""
        error, self._error = self._error, ""
        return error

    async def store(
        self, batch: StructArray, metas: StructArray, source: MappedTier | PrivatePages, target: StoredTier
    ) -> NDArray[np.uint16]:
        """Encodes and writes. The metas are those of the copies when it returns."""
        failpoint("mover.store.before_encode")
        views, cuts, room = views_of(source, batch["source"], metas), cuts_of(metas), batch["target"]["length"].tolist()
        jobs = list(zip(metas, cuts, room, strict=True))
        done = await self._in_threads(partial(self._encoded, target.position), views, jobs, passes=ENCODE_PASSES)
        statuses = np.array([code.status for code in done], np.uint16)
        rows = np.flatnonzero(statuses == BlockStatus.READY)
        if not len(rows):
            return statuses
        extents, some, tables = batch["target"][rows], metas[rows], [done[row].table for row in rows.tolist()]
        for i, row in enumerate(rows.tolist()):
            made = done[row].made
            assert made is not None
            some[i]["codec"], some[i]["codec_version"], some[i]["error"] = made.codec, made.version, made.error
            some[i]["stored_length"] = extents[i]["length"] = len(made.data)
        some["layers"] = 0
        pages = [_whole_pages(done[row]) for row in rows.tolist()]
        is_new = ~some["origin"].any(axis=1)  # else it was encoded before
        some["origin"][is_new] = some["digest"][is_new]
        statuses[rows] = await target.write(extents, some, lambda these: [tables[i] for i in these], pages)
        metas[rows] = some
        return statuses

    def _encoded(self, tier: int, view: memoryview, job: tuple[np.void, list[int], int]) -> _EncodedBlock:
        """A block of a page, encoded for a tier, if it has its digest. In a thread."""
        meta, cuts, room = job
        plain = scratch("plain block", len(view))
        plain[:] = view  # a writer may change the page meanwhile
        if table_digests(raw_tables([slice_sums(plain, cuts)]))[0].tobytes() != meta["digest"].tobytes():
            return _EncodedBlock(BlockStatus.CORRUPT)
        assert self._store_codecs is not None, "no codec, no encoded page"
        memory = empty_pages(HEADER.itemsize + len(plain))
        try:
            made = self._store_codecs.encode(tier, meta, plain, room=room, out=np.frombuffer(memory, np.uint8))
        except FAULTS as error:
            self._error, made = f"block not encoded: {error!r}", None
        if made is None:
            return _EncodedBlock(BlockStatus.NO_ROOM)
        return _EncodedBlock(BlockStatus.READY, slice_sums(made.data, slice_lengths(len(made.data), 0)), made, memory)

    async def load(
        self, batch: StructArray, metas: StructArray, source: StoredTier, target: MappedTier | PrivatePages
    ) -> NDArray[np.uint16]:
        """Reads, decodes and publishes. The metas are those of the copies when it returns."""
        read = await self.read(batch["source"], metas, source)
        failpoint("mover.load.before_decode")
        statuses = read.statuses.copy()
        rows = np.flatnonzero(statuses == BlockStatus.READY)
        jobs = list(zip(metas[rows], views_of(target, batch["target"][rows], metas[rows]), strict=True))
        done = await self._in_threads(
            self._decoded, [read.payloads[row] for row in rows.tolist()], jobs, passes=ENCODE_PASSES
        )
        statuses[rows] = done
        rows = rows[statuses[rows] == BlockStatus.READY]
        if not len(rows):
            return statuses
        some = metas[rows]
        tables = await self._in_threads(slice_sums, views_of(target, batch["target"][rows], some), cuts_of(some))
        digests = table_digests(raw_tables(tables))
        is_exact = (some["error"] == 0) & some["digest"].any(axis=1)  # a digest of zeros is not known
        wrong = is_exact & (digests != some["digest"]).any(axis=1)
        statuses[rows[wrong]] = BlockStatus.CORRUPT
        some["digest"], some["codec"], some["codec_version"] = digests, 0, 0
        good = np.flatnonzero(~wrong)
        if len(good):
            target.publish(batch["target"][rows[good]], some[good], [tables[i] for i in good.tolist()])
        metas[rows] = some
        return statuses

    def _decoded(self, payload: memoryview, job: tuple[np.void, memoryview]) -> int:
        """Decodes a block into a page, which is not published unless its status is READY. In a thread."""
        meta, page = job
        try:
            assert self._store_codecs is not None, "encoded blocks were found without codecs"
            found = self._store_codecs.decode(meta, payload, np.frombuffer(page, np.uint8))
        except CorruptRecord as error:
            self._error = str(error)
            return BlockStatus.CORRUPT
        except FAULTS as error:
            self._error = f"block not decoded: {error}"
            return BlockStatus.FAILED
        if found.error > float(meta["error"]) * (1 + 1e-6):
            self._error = f"encoded block: error {found.error}, its record says {meta['error']}; put it again"
            return BlockStatus.CORRUPT
        return BlockStatus.READY

    async def read(self, extents: StructArray, metas: StructArray, source: StoredTier) -> EncodedRead:
        """Reads encoded blocks, EXTENT [n] and META [n], verified against the slots' own headers."""
        pages = [empty_pages(length) for length in extents["length"].tolist()]
        payloads = [page[:length] for page, length in zip(pages, extents["length"].tolist(), strict=True)]
        came: dict[int, SliceTable] = {}

        def arrived(rows: Sequence[int]) -> Sequence[SliceTable]:
            tables = [slice_sums(payloads[row], slice_lengths(len(payloads[row]), 0)) for row in rows]
            came.update(zip(rows, tables, strict=True))
            return tables

        result = await source.read(extents, pages, metas, arrived=arrived)
        statuses = np.asarray(result.statuses, dtype=np.uint16).copy()
        for row in np.flatnonzero(statuses == BlockStatus.READY).tolist():
            if not np.array_equal(came[row], result.slices[row]):
                statuses[row] = BlockStatus.CORRUPT
        return EncodedRead(statuses, payloads)


class PrivatePages:
    """Memory of the mover for blocks on their way between stores. Used as a mapped tier by the
    pages of one batch, EXTENT [n] and META [n]."""

    def __init__(self, extents: StructArray, metas: StructArray) -> None:
        lengths = metas["stored_length"].tolist()
        self._pages = {page: empty_pages(n) for page, n in zip(extents["page"].tolist(), lengths, strict=True)}
        self._slices: dict[int, SliceTable] = {}

    def views(self, extents: StructArray) -> list[memoryview]:
        """As `MappedTier.views`."""
        return [self._pages[page] for page in extents["page"].tolist()]

    def publish(self, extents: StructArray, metas: StructArray, slices: Sequence[SliceTable]) -> None:
        """Keeps the tables for `slices`."""
        self._slices.update(zip(extents["page"].tolist(), slices, strict=True))

    def slices(self, extents: StructArray) -> list[SliceTable | None]:
        """As `MappedTier.slices`."""
        return [self._slices.get(page) for page in extents["page"].tolist()]


def empty_pages(length: int) -> memoryview:
    """Memory for so many bytes, page-aligned, in whole pages."""
    return memoryview(mmap.mmap(-1, -(-max(1, length) // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES))


def _whole_pages(encoded: _EncodedBlock) -> memoryview:
    """The pages of an encoded block, filled up with zeros."""
    assert encoded.made is not None and encoded.memory is not None
    length = len(encoded.made.data)
    end = -(-length // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
    encoded.memory[length:end] = bytes(end - length)
    return encoded.memory[:end]


def views_of(tier: MappedTier | PrivatePages, extents: StructArray, metas: StructArray) -> list[memoryview]:
    """The blocks' bytes in their pages: EXTENT [n], META [n]."""
    lengths = metas["stored_length"].tolist()
    return [page[:length] for page, length in zip(tier.views(extents), lengths, strict=True)]


def cuts_of(metas: StructArray) -> list[list[int]]:
    """Bytes of each slice of each block."""
    shapes = list(zip(metas["stored_length"].tolist(), metas["layers"].tolist(), strict=True))
    cut = {shape: slice_lengths(*shape) for shape in set(shapes)}  # most blocks are alike
    return [cut[shape] for shape in shapes]
