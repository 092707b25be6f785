"""The journal of a store: changes of its index since the last snapshot, appended and never changed.

It has the records, their framing, and one file of them; FORMAT-NVME.md describes the format.
`stored_index` applies records, and `ledger` decides when to sync. A frame is valid only if its
checksum holds over store, journal number, offset and payload. So a torn tail, a shifted frame or
another journal's frame ends the reading. A file that has been read is never appended to. After a
failed sync it takes no more records.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import msgpack
import numpy as np

from tierd.checksum import record_checksum
from tierd.core.formats import versions
from tierd.core.formats.meta import META
from tierd.core.formats.model import StructArray
from tierd.failpoint import failpoint
from tierd.tiers.io import durable
from tierd.tiers.io.files import OS, Files

JOURNAL_MAGIC = b"tierdJNL"
FRAME_LIMIT_BYTES = 64 << 20
"""A longer frame counts as damage."""
REMOVED_LIMIT = 1 << 20
"""Rows of one record, 16 MiB: a plan may free all blocks."""
SECTOR_BYTES = 512
"""The unit that a disk writes whole or not at all."""

REMOVED = np.dtype([("segment", "<u4"), ("reserved", "<u4"), ("offset", "<u8")])
"""The location of one removed block."""

_HEADER = struct.Struct("<8sII16sQQ")  # magic, version, reserved, store, number, checksum
_FRAME = struct.Struct("<QQ")  # payload bytes, checksum
_SEAL = struct.Struct("<16sQQ")  # store, number, offset of the frame: summed, not stored


@dataclass(frozen=True, slots=True)
class SegmentBegun:
    """A segment began at a place (0 to places - 1), which ended the segment that was there."""

    place: int
    segment: int
    domain: int
    class_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks are in their slots, durable. metas: META [n], sealed, as in the slots' headers."""

    metas: StructArray


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are no longer stored. rows: REMOVED [n]."""

    rows: StructArray


@dataclass(frozen=True, slots=True)
class NamespaceKept:
    """An opaque record of the cache."""

    record: bytes


@dataclass(frozen=True, slots=True)
class Marks:
    """The first segment id and the first generation that are unused."""

    next_segment: int
    next_generation: int


Record = SegmentBegun | BlocksStored | BlocksRemoved | NamespaceKept | Marks
Reading = Callable[[int, int], memoryview]
"""Reads length bytes of a file from an offset on, fewer at its end."""


def encode_record(record: Record) -> bytes:
    """The record as a msgpack array, its kind first."""
    match record:
        case SegmentBegun():
            fields = ["b", record.place, record.segment, record.domain, record.class_bytes, record.pages]
        case BlocksStored():
            fields = ["s", np.ascontiguousarray(record.metas).tobytes()]
        case BlocksRemoved():
            fields = ["r", np.ascontiguousarray(record.rows).tobytes()]
        case NamespaceKept():
            fields = ["n", record.record]
        case _:
            fields = ["m", record.next_segment, record.next_generation]
    return bytes(msgpack.packb(fields))


def decode_record(payload: bytes | memoryview) -> Record | None:
    """Decode a result of `encode_record`; None if this version does not know it."""
    try:
        kind, *fields = msgpack.unpackb(payload)
        match kind:
            case "b":
                return checked_segment(SegmentBegun(*map(int, fields)))
            case "s":
                return BlocksStored(np.frombuffer(fields[0], dtype=META))
            case "r":
                return BlocksRemoved(np.frombuffer(fields[0], dtype=REMOVED))
            case "n":
                return NamespaceKept(bytes(fields[0]))
            case "m":
                return checked_marks(Marks(*map(int, fields)))
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
    return None


def checked_segment(begun: SegmentBegun) -> SegmentBegun:
    """Check and return a segment. Raises ValueError for impossible numbers: later code divides by
    them and counts in 64 bits."""
    small = (begun.place, begun.segment, begun.domain, begun.pages)
    if not all(0 <= n < 1 << 32 for n in small) or not 0 < begun.class_bytes < 1 << 40:
        raise ValueError(f"impossible numbers of a segment: {begun}")
    return begun


def checked_marks(marks: Marks) -> Marks:
    """Check and return marks. Raises ValueError for numbers that no store reaches."""
    if not 0 <= marks.next_segment < 1 << 32 or not 0 <= marks.next_generation < 1 << 63:
        raise ValueError(f"impossible marks of a store: {marks}")
    return marks


class Journal:
    """A journal file being written. Made by `create`; its methods block."""

    def __init__(self, fd: int, path: Path, *, store: bytes, number: int, disk: Files) -> None:
        self.path, self.fd = path, fd
        self.number = number
        self.bytes = _HEADER.size
        """Length of all completed appends."""
        self.is_abandoned = False
        self._store = store
        self._disk = disk

    @classmethod
    def create(
        cls, directory: Path, *, store: bytes, number: int, first: Iterable[Record] = (), disk: Files = OS
    ) -> Journal:
        """A new file with its first records, durable under its name. Raises OSError."""
        path = journal_path(directory, number)
        fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        journal = cls(fd, path, store=store, number=number, disk=disk)
        try:
            head = _HEADER.pack(JOURNAL_MAGIC, versions.JOURNAL.current, 0, store, number, 0)[:-8]
            durable.write_fully(fd, head + record_checksum(head).to_bytes(8, "little"), offset=0, disk=disk)
            failpoint("nvme.journal.before_first")
            for record in first:  # one after another: they may be many
                journal.append([record])
            journal.sync()
            disk.sync_directory(directory)
        except OSError:
            journal.close()
            disk.unlink(path)
            raise
        return journal

    @classmethod
    def unwritten(cls, directory: Path, *, store: bytes, number: int, disk: Files) -> Journal:
        """A journal without a file, abandoned from the start."""
        journal = cls(-1, journal_path(directory, number), store=store, number=number, disk=disk)
        journal.is_abandoned = True
        return journal

    def append(self, records: Iterable[Record]) -> None:
        """Write frames at the end, not yet durable.

        Raises OSError; then the file has none of them, or it is abandoned.
        """
        frames, end = [], self.bytes
        for record in chain.from_iterable(map(_pieces, records)):
            frames.append(self._frame(encode_record(record), offset=end))
            end += len(frames[-1])
        try:
            durable.write_fully(self.fd, b"".join(frames), offset=self.bytes, disk=self._disk)
        except OSError:
            self._cut_back()
            raise
        self.bytes = end

    def sync(self) -> None:
        """Make all appended records durable. Raises OSError; the file is then abandoned."""
        try:
            self._disk.sync_data(self.fd)
        except OSError:
            self.is_abandoned = True
            raise

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            self._disk.close(self.fd)

    def _frame(self, payload: bytes, *, offset: int) -> bytes:
        return _FRAME.pack(len(payload), _frame_sum((self._store, self.number, offset), payload)) + payload

    def _cut_back(self) -> None:
        try:
            self._disk.truncate(self.fd, self.bytes)
        except OSError:
            self.is_abandoned = True


def _pieces(record: Record) -> Iterator[Record]:
    """The record, or equal smaller ones that each fit a frame."""
    if not isinstance(record, BlocksRemoved):
        yield record
        return
    for start in range(0, len(record.rows), REMOVED_LIMIT):
        yield BlocksRemoved(record.rows[start : start + REMOVED_LIMIT])


class JournalText:
    """Records of a journal file, in order, up to the first that is not whole.

    cut_bytes: after reading, the length of the torn or damaged tail. Iterating raises
    VersionMismatch for a newer format, OSError.
    """

    def __init__(self, path: Path, origin: tuple[bytes, int], disk: Files) -> None:
        self.cut_bytes = 0
        self._path, self._origin, self._disk = path, origin, disk

    def __iter__(self) -> Iterator[Record]:
        with durable.opened(self._path, disk=self._disk) as window:
            end = 0
            if _header_holds(window.read(0, _HEADER.size), self._origin):
                end = _HEADER.size
                for payload in _payloads(window.read, self._origin):
                    record = decode_record(payload)
                    if record is None:
                        break
                    end += _FRAME.size + len(payload)
                    yield record
            self.cut_bytes = window.bytes - end


def journal_path(directory: Path, number: int) -> Path:
    """The path of the journal of this number."""
    return directory / f"journal-{number:016d}.log"


def read_journal(directory: Path, *, store: bytes, number: int, disk: Files = OS) -> JournalText:
    """The records of a journal, read during iteration."""
    return JournalText(journal_path(directory, number), (store, number), disk)


def is_torn(directory: Path, *, store: bytes, number: int, disk: Files = OS) -> bool:
    """Whether the ignored tail is one that a crash leaves: a partial last write with no whole frame
    after it.

    A file that only grows then ends early, or has unwritten sectors that read as zeros. Raises
    VersionMismatch, OSError.
    """
    data, origin = durable.read_file(journal_path(directory, number), disk=disk), (store, number)
    end = 0
    if _header_holds(memoryview(data)[: _HEADER.size], origin):
        end = _HEADER.size + sum(_FRAME.size + len(payload) for payload in _payloads(_slices(data), origin))
    is_unfinished = _ends_early(data, end) or _has_unwritten(data, end)
    return is_unfinished and not _has_frame(data, origin, after=end)


def _slices(data: bytearray) -> Reading:
    view = memoryview(data)
    return lambda offset, length: view[offset : offset + length]


def _ends_early(data: bytearray, start: int) -> bool:
    """Whether the file ends within the header or the frame that begins there."""
    if len(data) < _HEADER.size or len(data) - start < _FRAME.size:
        return True
    length = int.from_bytes(data[start : start + 8], "little")
    return start > 0 and length <= FRAME_LIMIT_BYTES and start + _FRAME.size + length > len(data)


def _has_unwritten(data: bytearray, start: int) -> bool:
    """Whether a sector, or its part after start, is all zeros."""
    edges = [start, *range(start - start % SECTOR_BYTES + SECTOR_BYTES, len(data), SECTOR_BYTES), len(data)]
    return any(data.count(0, left, right) == right - left for left, right in pairwise(edges))


def _has_frame(data: bytearray, origin: tuple[bytes, int], *, after: int) -> bool:
    """Whether a whole frame begins anywhere after an offset; its checksum covers its offset."""
    if len(data) - after <= _FRAME.size:
        return False
    tail = np.frombuffer(data, np.uint8, offset=after + 1)
    lengths = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(tail, 8)).view("<u8").reshape(-1)
    fits = (lengths > 0) & (lengths + np.uint64(_FRAME.size) <= np.arange(len(tail), 7, -1, dtype=np.uint64))
    starts = (np.flatnonzero(fits & (lengths <= FRAME_LIMIT_BYTES)) + after + 1).tolist()
    return any(next(_payloads(_slices(data), origin, offset=start), None) is not None for start in starts)


def _header_holds(data: memoryview, origin: tuple[bytes, int]) -> bool:
    if len(data) < _HEADER.size:
        return False
    magic, version, _, found_store, found_number, checksum = _HEADER.unpack(data)
    if magic != JOURNAL_MAGIC or checksum != record_checksum(data[: _HEADER.size - 8]):
        return False
    versions.JOURNAL.check(version, name=f"journal {origin[1]}")
    return (found_store, found_number) == origin


def _payloads(read: Reading, origin: tuple[bytes, int], offset: int = _HEADER.size) -> Iterator[bytes | memoryview]:
    """Payloads of the whole frames from offset on. Each is valid until the next is read."""
    while len(head := read(offset, _FRAME.size)) == _FRAME.size:
        length, checksum = _FRAME.unpack(head)
        payload = read(offset + _FRAME.size, length) if length <= FRAME_LIMIT_BYTES else b""
        if len(payload) < length:
            return
        if checksum != _frame_sum((*origin, offset), payload):
            return
        yield payload
        offset += _FRAME.size + length


def _frame_sum(origin: tuple[bytes, int, int], payload: bytes | memoryview) -> int:
    return record_checksum(b"".join((_SEAL.pack(*origin), payload)))
