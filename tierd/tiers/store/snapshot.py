"""Snapshots: the whole index of a store as one file of checksummed columns.

Snapshots are written and read at the speed of the disk. `ledger` decides when to write one;
`journal` has later changes. A file under its final name is whole and durable. Data with a wrong
checksum is ignored. Damage to a piece of rows costs that piece, damage elsewhere the whole file. At
most one stretch of rows is in memory. FORMAT-NVME.md describes the format.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from tierd.checksum import Buffer, record_checksum
from tierd.core.formats import versions
from tierd.core.formats.meta import META
from tierd.core.formats.model import StructArray
from tierd.errors import CorruptRecord
from tierd.tiers.io import durable
from tierd.tiers.io.files import OS, Files
from tierd.tiers.store.journal import Marks, SegmentBegun, checked_marks, checked_segment
from tierd.tiers.store.stored_index import StoredIndex, gathered, stretches

SNAPSHOT_MAGIC = 0x504E_5364_7265_6974  # "tierdSNP", little-endian
PIECE_ROWS = 4096
"""Rows of META under one checksum: 1 MiB."""
PIECE_BYTES = PIECE_ROWS * META.itemsize
STRETCH_PIECES = 2
"""Pieces per read. Freed memory of that size is reused, so the kernel need not clear new pages."""

HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("segments", "<u4"),  # rows
        ("store", "u1", (16,)),
        ("number", "<u8"),  # of the first journal that it does not contain
        ("next_segment", "<u8"),
        ("next_generation", "<u8"),
        ("namespaces_bytes", "<u8"),
        ("rows", "<u8"),  # of META
        ("tables_checksum", "<u8"),  # over segments, namespaces and the sums of the pieces
        ("checksum", "<u8"),  # over all bytes of the header before it
    ]
)
SEGMENT = np.dtype([("place", "<u4"), ("segment", "<u4"), ("domain", "<u4"), ("pages", "<u4"), ("class_bytes", "<u8")])


def snapshot_path(directory: Path, number: int) -> Path:
    """The path of the snapshot of all journals below number."""
    return directory / f"snapshot-{number:016d}.bin"


def write_snapshot(directory: Path, index: StoredIndex, *, store: bytes, number: int, disk: Files = OS) -> int:
    """Write a snapshot, durable under its name; returns its bytes. Raises OSError."""
    parts = _parts(index, store=store, number=number)
    return durable.replace_file(snapshot_path(directory, number), parts, disk=disk)


@dataclass(frozen=True, slots=True)
class FiledRows:
    """A snapshot's rows, in its file. count: from its header. begin: offset. sums: of the pieces."""

    path: Path
    count: int
    begin: int
    sums: NDArray[np.uint64]
    disk: Files

    def stretches(self) -> Iterator[StructArray]:
        """META in order, some thousand at a time, without damaged pieces. Raises OSError."""
        fd = self.disk.open(self.path, os.O_RDONLY)
        try:
            for piece in range(0, len(self.sums), STRETCH_PIECES):
                first = piece * PIECE_ROWS
                rows = np.empty(min(STRETCH_PIECES * PIECE_ROWS, self.count - first), dtype=META)
                count = durable.read_into(
                    fd, rows.view(np.uint8), offset=self.begin + first * META.itemsize, disk=self.disk
                )
                yield _intact_rows(rows[: count // META.itemsize], self.sums[piece : piece + STRETCH_PIECES])
        finally:
            self.disk.close(fd)


def open_snapshot(directory: Path, *, store: bytes, number: int, disk: Files = OS) -> StoredIndex:
    """Open a result of `write_snapshot`, its rows still in the file.

    Raises CorruptRecord if it is damaged throughout or another store's, VersionMismatch for a newer
    format, OSError.
    """
    path = snapshot_path(directory, number)
    fd = disk.open(path, os.O_RDONLY)
    try:
        header = _read_header(_read(fd, 0, HEADER.itemsize, disk), path, store=store, number=number)
        bounds = _bounds(header)
        data = _read(fd, 0, min(bounds.end, disk.size(path)), disk)
    finally:
        disk.close(fd)
    if len(data) < bounds.end or record_checksum(data[HEADER.itemsize :]) != int(header["tables_checksum"]):
        raise CorruptRecord(f"{path}: the checksum of its tables does not hold; it is set aside")
    marks = Marks(int(header["next_segment"]), int(header["next_generation"]))
    try:
        return StoredIndex(
            segments={s.place: s for s in map(_segment, data[HEADER.itemsize : bounds.namespaces].view(SEGMENT))},
            namespaces=_texts(data[bounds.namespaces : bounds.sums].tobytes()),
            next_segment=checked_marks(marks).next_segment,
            next_generation=marks.next_generation,
            filed=FiledRows(path, int(header["rows"]), bounds.end, data[bounds.sums :].copy().view("<u8"), disk),
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise CorruptRecord(f"{path}: {error}; it is set aside") from error


def read_snapshot(directory: Path, *, store: bytes, number: int, disk: Files = OS) -> StoredIndex:
    """`open_snapshot`, with the rows in memory."""
    return gathered(open_snapshot(directory, store=store, number=number, disk=disk))


def _read(fd: int, offset: int, length: int, disk: Files) -> NDArray[np.uint8]:
    data = np.empty(length, dtype=np.uint8)
    return data[: durable.read_into(fd, data, offset=offset, disk=disk)]


def _parts(index: StoredIndex, *, store: bytes, number: int) -> Iterator[Buffer]:
    """Parts of the file. Reads the rows twice, since their sums precede them in the file."""
    segments = _segment_rows(index.segments.values()).tobytes()
    namespaces = bytes(msgpack.packb(index.namespaces))
    sums, rows = list[int](), 0
    for piece in _even_pieces(index):
        sums.append(record_checksum(piece))
        rows += len(piece) // META.itemsize
    tables = segments + namespaces + np.array(sums, dtype="<u8").tobytes()
    header = np.zeros(1, dtype=HEADER)
    header["magic"], header["version"] = SNAPSHOT_MAGIC, versions.SNAPSHOT.current
    header["store"], header["number"] = np.frombuffer(store, dtype=np.uint8), number
    header["segments"], header["rows"] = len(index.segments), rows
    header["next_segment"], header["next_generation"] = index.next_segment, index.next_generation
    header["namespaces_bytes"] = len(namespaces)
    header["tables_checksum"] = record_checksum(tables)
    header["checksum"] = record_checksum(header.tobytes()[:-8])
    yield header.tobytes()
    yield tables
    for piece, total in zip_longest(_even_pieces(index), sums):
        if piece is None or record_checksum(piece) != total:
            raise OSError(errno.EIO, "the rows of a new snapshot changed between two reads")
        yield piece


def _even_pieces(index: StoredIndex) -> Iterator[NDArray[np.uint8]]:
    """The bytes of all rows, PIECE_ROWS at a time, across gaps."""
    rest = np.empty(0, np.uint8)
    for stretch in stretches(index):
        raw = np.concatenate((rest, stretch.metas.view(np.uint8)))
        whole = len(raw) - len(raw) % PIECE_BYTES
        for start in range(0, whole, PIECE_BYTES):
            yield raw[start : start + PIECE_BYTES]
        rest = raw[whole:]
    if len(rest):
        yield rest


def _segment_rows(segments: Collection[SegmentBegun]) -> StructArray:
    rows = np.zeros(len(segments), dtype=SEGMENT)
    for row, segment in zip(rows, segments, strict=True):
        for name in SEGMENT.names or ():
            row[name] = getattr(segment, name)
    return rows


def _pieces(metas: StructArray) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, len(metas), PIECE_ROWS):
        yield metas[start : start + PIECE_ROWS].view(np.uint8)


def _read_header(raw: NDArray[np.uint8], path: Path, *, store: bytes, number: int) -> Any:
    if len(raw) < HEADER.itemsize:
        raise CorruptRecord(f"{path}: {len(raw)} bytes are shorter than a header's {HEADER.itemsize}; it is set aside")
    header = raw.view(HEADER)[0]
    if int(header["magic"]) != SNAPSHOT_MAGIC or record_checksum(raw[:-8]) != int(header["checksum"]):
        raise CorruptRecord(f"{path}: the header's checksum does not match; it is set aside")
    versions.SNAPSHOT.check(int(header["version"]), name=str(path))
    if header["store"].tobytes() != store or int(header["number"]) != number:
        raise CorruptRecord(f"{path}: it belongs to another store or another number; it is set aside")
    return header


class _Bounds(NamedTuple):
    """Offsets in the file. Segments begin after the header, the blocks' rows at end."""

    namespaces: int
    sums: int
    end: int


def _bounds(header: Any) -> _Bounds:
    namespaces = HEADER.itemsize + int(header["segments"]) * SEGMENT.itemsize
    sums = namespaces + int(header["namespaces_bytes"])
    return _Bounds(namespaces, sums, sums + -(-int(header["rows"]) // PIECE_ROWS) * 8)


def _segment(row: Any) -> SegmentBegun:
    numbers = (int(row[name]) for name in ("place", "segment", "domain", "class_bytes", "pages"))
    return checked_segment(SegmentBegun(*numbers))


def _texts(packed: bytes) -> list[bytes]:
    """Raises ValueError and the errors of msgpack."""
    found = msgpack.unpackb(packed)
    if not isinstance(found, list) or not all(isinstance(text, bytes) for text in found):
        raise ValueError("its namespaces are no list of texts")
    return found


def _intact_rows(metas: StructArray, sums: NDArray[np.uint64]) -> StructArray:
    """The rows of pieces whose checksums hold; a truncated piece fails."""
    good = [record_checksum(piece) == int(total) for piece, total in zip(_pieces(metas), sums, strict=False)]
    if all(good):
        return metas
    return np.asarray(metas[np.repeat(good, PIECE_ROWS)[: len(metas)]])
