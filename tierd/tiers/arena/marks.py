"""The arena's own records: its id, the highest numbers used, and the names of namespaces.

`../FORMAT.md` describes their files, `arena.tbl` and `namespaces.log`. A segment id or generation
is recorded before it is used, so no later run gives it out again. A torn namespace record ends the
log; new records replace it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np

from tierd.checksum import record_checksum
from tierd.core.formats import versions
from tierd.core.formats.model import PAGE_ALIGN_BYTES
from tierd.core.formats.words import words_of
from tierd.errors import CorruptRecord
from tierd.linux.mapping import map_file
from tierd.tiers.io import durable

ARENA_MAGIC = b"TIERDARN"
ARENA_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("reserved", "<u4"),
        ("store", "u1", (16,)),
        ("checksum", "<u8"),  # xxh3-64 over the 32 bytes before it
        ("next_segment", "<u8"),
        ("next_generation", "<u8"),
    ]
)
"""Head of arena.tbl, 56 bytes. The last two words change, so the checksum omits them."""

SEGMENT_LIMIT, GENERATION_LIMIT = 1 << 31, 1 << 62
"""Higher marks are damage: 1000 segments/s need 24 days, 1,000,000 pages/s 146,000 years."""

_CHECKSUM_AT = 32
_SEGMENT_WORD, _GENERATION_WORD = 5, 6
_RECORD_HEAD_BYTES = 16


class Marks:
    """The mapped `arena.tbl`. store: id of the arena, 16 bytes."""

    def __init__(self, path: Path) -> None:
        """Open, or make with a new id. Raises VersionMismatch, CorruptRecord, OSError."""
        self._memory = _map_table(path)
        self._words = words_of(self._memory, count=ARENA_HEADER.itemsize // 8)
        raw = bytes(self._memory[: ARENA_HEADER.itemsize])
        if not any(raw[:_CHECKSUM_AT]):
            raw = self._begin()
        self.store = _read_store(raw, name=str(path))

    @property
    def next_segment(self) -> int:
        """The first segment id that was never used."""
        return max(1, int(self._words[_SEGMENT_WORD]))

    @property
    def next_generation(self) -> int:
        """The first generation that was never used."""
        return max(1, int(self._words[_GENERATION_WORD]))

    def use_segment(self, segment: int) -> None:
        """Record a segment id, before the segment exists."""
        self._words[_SEGMENT_WORD] = max(self.next_segment, segment + 1)

    def use_generation(self, generation: int) -> None:
        """Record a generation, before a page is stamped with it."""
        self._words[_GENERATION_WORD] = max(self.next_generation, generation + 1)

    def _begin(self) -> bytes:
        record = np.zeros(1, dtype=ARENA_HEADER)
        record["magic"], record["version"] = ARENA_MAGIC, versions.ARENA.current
        record["store"] = np.frombuffer(secrets.token_bytes(16), dtype=np.uint8)
        record["checksum"] = record_checksum(record.tobytes()[:_CHECKSUM_AT])
        self._memory[: record.nbytes] = record.tobytes()
        return record.tobytes()


def begin_anew(path: Path) -> Marks:
    """Replace damaged marks by new ones, far from where any arena begins. Raises OSError."""
    path.unlink()
    made = Marks(path)
    made.use_segment((1 + secrets.randbelow(1000)) << 20)
    made.use_generation((1 + secrets.randbelow(1000_000)) << 40)
    return made


def append_record(path: Path, record: bytes) -> None:
    """Append a record: length u32, zero u32, xxh3-64 u64, bytes; all or none. Raises OSError."""
    head = len(record).to_bytes(8, "little") + record_checksum(record).to_bytes(8, "little")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    end = os.fstat(fd).st_size
    try:
        durable.write_fully(fd, head + record, offset=end)
    except OSError:
        os.ftruncate(fd, end)  # records after a torn one would be lost
        raise
    finally:
        os.close(fd)


def read_records(path: Path) -> list[bytes]:
    """All records up to the first torn one. It and all bytes after it are cut off."""
    data = path.read_bytes() if path.exists() else b""
    records, at = [], 0
    while at + _RECORD_HEAD_BYTES <= len(data):
        start = at + _RECORD_HEAD_BYTES
        length = int.from_bytes(data[at : at + 8], "little")
        record = data[start : start + length]
        if len(record) < length or record_checksum(record) != int.from_bytes(data[at + 8 : start], "little"):
            break
        records.append(record)
        at = start + len(record)
    if at < len(data):
        os.truncate(path, at)
    return records


def _map_table(path: Path) -> memoryview:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, PAGE_ALIGN_BYTES)
        return map_file(fd, PAGE_ALIGN_BYTES)
    finally:
        os.close(fd)


def _read_store(raw: bytes, *, name: str) -> bytes:
    record = np.frombuffer(raw, dtype=ARENA_HEADER, count=1)[0]
    sealed = record_checksum(raw[:_CHECKSUM_AT]) == int(record["checksum"])
    if not sealed or record["magic"] != ARENA_MAGIC:
        raise CorruptRecord(f"{name}: not the head of an arena, or its checksum does not match")
    versions.ARENA.check(int(record["version"]), name=name)
    if record["next_segment"] > SEGMENT_LIMIT or record["next_generation"] > GENERATION_LIMIT:
        raise CorruptRecord(f"{name}: its marks are above every valid value")
    return bytes(record["store"].tobytes())
