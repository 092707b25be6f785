"""Slots hold the blocks of a store. A slot is a 4 KiB header and the payload, beside other slots in
a file.

This module has the header's bytes, vectors of adjacent slots, whole reads and writes, and O_DIRECT.
The rest is elsewhere: `stored_index` maps blocks to slots, `nvme` makes batches, the mover checks
payloads. The header inside the slot decides which block is there. A payload moves directly between
its page and the disk. During a run only its owner touches its headers' memory. FORMAT-NVME.md
describes the format.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.checksum import raw_tables, record_checksum, table_digests
from tierd.core.formats.meta import META, META_BYTES, duplicate, intact, seal
from tierd.core.formats.model import PAGE_ALIGN_BYTES, StructArray
from tierd.errors import InvalidArgument
from tierd.failpoint import failpoint
from tierd.tiers.io.calls import Kind
from tierd.tiers.io.files import NO_SPACE, OS, READ_WRITE, Files
from tierd.tiers.io.pieces import library, plain_read_pieces, read_pieces
from tierd.tiers.tier import SliceTable

HEADER_BYTES = PAGE_ALIGN_BYTES
TABLE_SLICES = (HEADER_BYTES - META_BYTES) // 8
"""The limit of slices in a header: 480."""

RUN_SLOTS = 32
_HEADERS_BYTES = RUN_SLOTS * PAGE_ALIGN_BYTES
RUN_BYTES: dict[Kind, int] = {"read": (2 << 20) + _HEADERS_BYTES, "write": (4 << 20) + _HEADERS_BYTES}
"""Adjacent slots move in one call, up to RUN_SLOTS and 2 or 4 MiB of blocks with headers. The disk
gains nothing beyond 1 MiB, but each call costs the processor the same. The last reads return
together, and then hashing them is all that is left to do.
"""

Headers = NDArray[np.uint8]
"""uint8 [n, 4096], page-aligned."""


class SlotIO(Protocol):
    """Reads and writes of slot files. Memory, offsets and lengths are aligned to PAGE_ALIGN_BYTES."""

    mode: str

    def open(self, path: Path) -> int:
        """A descriptor to read, write and sync; makes a missing file. Raises OSError. Blocks."""

    def read(self, file: SlotFile, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers from offset on; returns the bytes read. Raises OSError. Blocks."""

    def read_pieces(self, file: SlotFile, pieces: StructArray) -> None:
        """Read PIECE [n] and sum them; errors are in the pieces. Blocks."""

    def write(self, file: SlotFile, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers at offset. Raises OSError. Blocks."""


@dataclass(frozen=True, slots=True)
class SlotFile:
    """An open slot file. fd is open since before the first write, so its sync gets every error."""

    path: Path
    fd: int


class DirectIO:
    """O_DIRECT through preadv and pwritev."""

    mode = "o_direct"

    def __init__(self, disk: Files) -> None:
        self._disk = disk

    def open(self, path: Path) -> int:
        return self._disk.open(path, READ_WRITE | os.O_DIRECT)

    def read(self, file: SlotFile, offset: int, buffers: Sequence[memoryview]) -> int:
        return read_at(file.fd, offset, buffers, self._disk)

    def read_pieces(self, file: SlotFile, pieces: StructArray) -> None:
        if library is None or self._disk is not OS:
            plain_read_pieces(partial(self.read, file), pieces)
        else:
            _reach_read()
            read_pieces(file.fd, pieces)

    def write(self, file: SlotFile, offset: int, buffers: Sequence[memoryview]) -> None:
        write_at(file.fd, offset, buffers, self._disk)


def allows_direct(directory: Path, disk: Files = OS) -> bool:
    """Test whether the file system supports O_DIRECT. Raises OSError for other errors."""
    path = directory / "direct.probe"
    page = memoryview(mmap.mmap(-1, HEADER_BYTES))
    try:
        fd = disk.open(path, READ_WRITE | os.O_DIRECT)
        try:
            write_at(fd, 0, [page], disk)
            return read_at(fd, 0, [page], disk) == HEADER_BYTES
        finally:
            disk.close(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        if error.errno in NO_SPACE:  # O_DIRECT was not refused
            return True
        raise
    finally:
        disk.unlink(path)


def _reach_read() -> None:
    failpoint("nvme.slots.before_read")


def read_at(fd: int, offset: int, buffers: Sequence[memoryview], disk: Files = OS) -> int:
    """preadv until the buffers are full or the file ends; the bytes read. Python retries EINTR."""
    _reach_read()
    rest, done = list(buffers), 0
    while rest:
        count = _aligned(disk.preadv(fd, rest, offset + done), rest)
        if count == 0:
            break
        done += count
        rest = advance(rest, count)
    return done


def write_at(fd: int, offset: int, buffers: Sequence[memoryview], disk: Files = OS) -> None:
    """pwritev until all is written. Raises OSError, EIO if the file takes no more."""
    failpoint("nvme.slots.before_write")
    rest, done = list(buffers), 0
    while rest:
        count = _aligned(disk.pwritev(fd, rest, offset + done), rest)
        if count == 0:
            raise OSError(errno.EIO, "pwritev wrote nothing")
        done += count
        rest = advance(rest, count)


def advance(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first count bytes."""
    rest = list(buffers)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if count:
        rest[0] = rest[0][count:]
    return rest


def _aligned(count: int, rest: Sequence[memoryview]) -> int:
    """A short count, rounded down to where O_DIRECT may continue; the rest is repeated."""
    return count if count == sum(map(len, rest)) else count // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES


# -- headers


def slot_bytes(lengths: NDArray[np.uint32]) -> int:
    """Bytes on the disk for blocks of these stored lengths, headers included."""
    return int((HEADER_BYTES + -(-lengths.astype(np.int64) // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES).sum())


def stamp(metas: StructArray, extents: StructArray, slices: Sequence[SliceTable], *, store: bytes) -> StructArray:
    """META [n] as in the slots' headers: located in this store, digest of their slice tables,
    sealed.

    Every table must fit a header (TABLE_SLICES). extents: EXTENT [n], with the offset of the slot.
    """
    stamped = duplicate(metas)
    stamped["store"] = np.frombuffer(store, dtype=np.uint8)
    for name in ("segment", "offset", "generation"):
        stamped[name] = extents[name]
    stamped["stored_length"] = extents["length"]
    stamped["slices"] = [len(table) for table in slices]
    stamped["digest"] = table_digests(raw_tables(slices))
    return seal(stamped, record_checksum)


def fill_headers(headers: Headers, rows: Sequence[int], metas: StructArray, slices: Sequence[SliceTable]) -> None:
    """Write META and slice tables into these rows of headers, the rest zero, by table length."""
    lengths, own = np.array([len(table) for table in slices]), np.asarray(rows)
    raw = np.ascontiguousarray(metas).view(np.uint8).reshape(len(metas), META_BYTES)
    for length in set(lengths.tolist()):
        alike, end = np.flatnonzero(lengths == length), META_BYTES + 8 * length
        headers[own[alike], :META_BYTES] = raw[alike]
        headers[own[alike], META_BYTES:end] = np.array([slices[i] for i in alike.tolist()], "<u8").view(np.uint8)
        headers[own[alike], end:] = 0


def read_tables(headers: Headers) -> tuple[StructArray, list[SliceTable | None]]:
    """META [n] and the slice tables; None if record or table is not whole."""
    metas = np.ascontiguousarray(headers[:, :META_BYTES]).view(META).reshape(-1)
    counts = np.where(intact(metas, record_checksum) & (metas["slices"] <= TABLE_SLICES), metas["slices"], 0)
    words = headers[:, META_BYTES : META_BYTES + 8 * int(counts.max(initial=0))].copy().view("<u8")
    found: list[SliceTable] = [row[:count] for row, count in zip(words, counts.tolist(), strict=True)]
    whole = (table_digests(raw_tables(found)) == metas["digest"]).all(axis=1) & (counts > 0)
    return metas, [table if is_whole else None for table, is_whole in zip(found, whole.tolist(), strict=True)]


def matches(found: StructArray, metas: StructArray, extents: StructArray, *, store: bytes) -> NDArray[np.bool_]:
    """Which headers match the expected blocks: same block, place and page generation, this store."""
    good = (found["hash"] == metas["hash"]).all(axis=1) & (found["namespace"] == metas["namespace"])
    for name in ("segment", "offset", "generation"):
        good &= found[name] == extents[name]
    good &= found["stored_length"] == extents["length"]
    return np.asarray(good & (found["store"] == np.frombuffer(store, dtype=np.uint8)).all(axis=1))


# -- runs


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Adjacent slots of one segment, moved in one call. rows: in the batch, by offset."""

    segment: int
    class_bytes: int
    offset: int
    rows: tuple[int, ...]

    def only(self, row: int) -> SlotRun:
        """The run of only one of its rows."""
        place = self.rows.index(row)
        return SlotRun(self.segment, self.class_bytes, self.offset + place * self.class_bytes, (row,))


def join_runs(extents: StructArray, *, class_bytes: Sequence[int], most_bytes: int) -> list[SlotRun]:
    """Cut a batch into runs of at most most_bytes, or of one slot. extents: EXTENT [n] with slots'
    offsets; class_bytes: of each row's segment, header included."""
    runs: list[SlotRun] = []
    offsets, segments = extents["offset"].tolist(), extents["segment"].tolist()
    rows: list[int] = []
    for row in np.lexsort((extents["offset"], extents["segment"])).tolist():
        goes_on = (
            rows and segments[rows[0]] == segments[row] and _goes_on(rows, offsets, class_bytes[row], row, most_bytes)
        )
        if rows and not goes_on:
            runs.append(_run_of(rows, segments, class_bytes, offsets))
            rows = []
        rows.append(row)
    return [*runs, _run_of(rows, segments, class_bytes, offsets)] if rows else runs


def _goes_on(rows: Sequence[int], offsets: Sequence[int], class_bytes: int, row: int, most_bytes: int) -> bool:
    count = len(rows)
    is_small = count < RUN_SLOTS and (count + 1) * class_bytes <= most_bytes
    return is_small and offsets[row] == offsets[rows[0]] + count * class_bytes


def _run_of(
    rows: Sequence[int], segments: Sequence[int], class_bytes: Sequence[int], offsets: Sequence[int]
) -> SlotRun:
    return SlotRun(segments[rows[0]], class_bytes[rows[0]], offsets[rows[0]], tuple(rows))


def whole_pages(views: Sequence[memoryview], lengths: NDArray[np.uint32]) -> list[memoryview]:
    """The parts of pages that the disk moves: lengths rounded up to PAGE_ALIGN_BYTES. Raises
    InvalidArgument for a shorter page."""
    whole = (-(-lengths.astype(np.int64) // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES).tolist()
    short = [i for i, (view, length) in enumerate(zip(views, whole, strict=True)) if len(view) < length]
    if short:
        raise InvalidArgument(
            f"page {short[0]}: {len(views[short[0]])} bytes, its block of {lengths[short[0]]} takes {whole[short[0]]},"
            f" in steps of {PAGE_ALIGN_BYTES}; give a view of the whole page"
        )
    return [view[:length] for view, length in zip(views, whole, strict=True)]


def vector(run: SlotRun, headers: Headers, pages: Sequence[memoryview], *, filler: memoryview) -> list[memoryview]:
    """Header, page, filler to the next slot, header, ...: buffers of one call, from the batch."""
    heads = headers.data.cast("B")
    buffers = list[memoryview]()
    for row in run.rows:
        page = pages[row]
        buffers += (heads[row * HEADER_BYTES : (row + 1) * HEADER_BYTES], page)
        if gap := run.class_bytes - HEADER_BYTES - len(page):
            buffers.append(filler[:gap])
    return buffers[:-1] if gap else buffers


class HeaderPool:
    """Aligned memory for headers, reused up to a limit, and filler between payload and next slot."""

    def __init__(self, kept: int) -> None:
        self._free: list[Headers] = []
        self._room = kept
        self.zeros = memoryview(mmap.mmap(-1, RUN_BYTES["write"]))
        """Written between slots; never written to."""
        self.waste = memoryview(mmap.mmap(-1, RUN_BYTES["read"]))
        """Read into between slots; never read from."""

    @contextmanager
    def borrow(self, count: int) -> Iterator[Headers]:
        """uint8 [count, 4096], exclusive to the borrower."""
        area = next((area for area in self._free if len(area) >= count), None)
        if area is None:
            area = np.frombuffer(mmap.mmap(-1, max(1, count) * HEADER_BYTES), dtype=np.uint8).reshape(-1, HEADER_BYTES)
        else:
            self._free = [other for other in self._free if other is not area]
            self._room += len(area)
        try:
            yield area[:count]
        finally:
            if len(area) <= self._room:
                self._free.append(area)
                self._room -= len(area)
