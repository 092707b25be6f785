"""The session table: which session holds which pages, in a mapped file that outlives the daemon.

A new daemon must not reuse pages that a living client still reads or writes. Every lease and
reservation is recorded here before its handles leave the daemon, and erased after the core took it
back. `../FORMAT.md` describes the file.

A row counts only if its last word, written last, holds its check. The same goes for a holder's
record and its checksum. So a daemon killed at any instruction leaves each row whole or absent. A
kill leaves no used record with a wrong check. If one is found, the file was damaged and the holders
of pages are unknown.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.checksum import record_checksum
from tierd.core.formats import versions
from tierd.core.formats.model import EXTENT, NO_PAGE, PAGE_ALIGN_BYTES, StructArray
from tierd.core.formats.words import Words, barrier, words_of
from tierd.errors import InvalidArgument, Overloaded, TierFailed
from tierd.failpoint import failpoint
from tierd.linux.mapping import map_file

TABLE_MAGIC = b"TIERDSES"
HOLDER_LIMIT = 4096
"""The limit of sessions at once."""
OWN_SESSIONS = 1 << 16
"""Lower ids are the daemon's own sessions. They have rows, and no process and no holder."""

TABLE_HEADER = np.dtype([("magic", "S8"), ("version", "<u4"), ("holders", "<u4"), ("checksum", "<u8")])
"""Head of the table, 24 bytes; the checksum is xxh3-64 over the 16 before it."""

HOLDER = np.dtype(
    [
        ("session", "<u8"),
        ("start_time", "<u8"),  # of the process, clock ticks since boot, as /proc/<pid>/stat says
        ("boot", "u1", (16,)),
        ("pid", "<u4"),
        ("uid", "<u4"),
        ("domain", "<u4"),
        ("tenant_length", "<u4"),
        ("tenant", "u1", (64,)),  # UTF-8
        ("reserved", "u1", (8,)),
        ("checksum", "<u8"),  # xxh3-64 over the 120 bytes before it; 0: no holder
    ]
)
"""One session: 128 bytes."""

HOLD = np.dtype(
    [
        ("session", "<u8"),
        ("generation", "<u8"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("reserved", "<u4"),
        ("tier", "<u2"),
        ("kind", "<u2"),  # HoldKind; 0 in a free row
        ("check", "<u4"),  # of all before it, see `_check`
    ]
)
"""One page that a session holds: 48 bytes; tier, kind and check are the word that makes it count."""

_ROW_WORDS = HOLD.itemsize // 8
_HOLDER_WORDS = HOLDER.itemsize // 8
_ROWS_AT = PAGE_ALIGN_BYTES + HOLDER_LIMIT * HOLDER.itemsize
_FIRST_ROWS = 16_384
_FACTORS = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xFF51AFD7ED558CCD,
        0xC4CEB9FE1A85EC53,
    ],
    dtype=np.uint64,
)

_NO_CHECK = np.uint64(0xFFFF_FFFF)
"""Of the last word: tier and kind, without the check itself."""
_FOLD, _FOLD_SUM, _HALF = np.uint64(29), np.uint64(31), np.uint64(32)

Rows = NDArray[np.int64]
"""Numbers of rows in the table; valid until they are erased."""


class HoldKind(enum.IntEnum):
    """The reason why a page is held."""

    LEASE = 1
    RESERVATION = 2


@dataclass(frozen=True, slots=True)
class Holder:
    """A session's process; start time and boot (16 bytes) distinguish it from later ones of its id."""

    session: int
    pid: int
    start_time: int
    boot: bytes
    uid: int
    domain: int
    tenant: str


@dataclass(frozen=True, slots=True)
class FormerHolder:
    """Pages that a session of a former daemon held: EXTENT[n] and their rows, by kind.

    Once the core has taken them (`Core.restore`), the rows serve the new lease or reservation. Rows
    of pages that it did not take are erased.
    """

    holder: Holder
    leased: StructArray
    leased_rows: Rows
    reserved: StructArray
    reserved_rows: Rows


class HoldTable:
    """The session table. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._rows: Words = np.zeros((0, _ROW_WORDS), dtype=np.uint64)
        self._holders: Words = np.zeros((0, _HOLDER_WORDS), dtype=np.uint64)
        self._free: Rows = np.zeros(0, dtype=np.int64)
        self._free_count = 0
        self._places: dict[int, int] = {}  # session -> its record

    # -- open and close

    def open(self, *, distrust: Callable[[str], None] = lambda _fault: None) -> list[FormerHolder]:
        """Map the file, made if missing; return the pages held by former sessions of this boot.
        Erases all else.

        distrust(fault): called before the first erasure if the file is damaged, since unrecorded
        pages may be held. The caller holds the instance's lock. Raises VersionMismatch, TierFailed.
        """
        try:
            length = self._path.stat().st_size if self._path.exists() else 0
            self._map(max(_FIRST_ROWS, (length - _ROWS_AT) // HOLD.itemsize))
        except OSError as error:
            raise TierFailed(f"{self._path}: the session table cannot be opened: {error}") from error
        former = self._recover(self._find_faults(length), distrust=distrust)
        self._memory[: TABLE_HEADER.itemsize] = _pack_header()
        return former

    def close(self, *, release: bool) -> None:
        """Unmap; with release remove the file."""
        self._rows, self._holders = self._rows[:0].copy(), self._holders[:0].copy()
        self._memory = memoryview(b"")
        if release:
            self._path.unlink(missing_ok=True)

    @property
    def count(self) -> int:
        """Pages recorded as held."""
        return len(self._rows) - self._free_count

    # -- sessions

    def add_holder(self, holder: Holder) -> None:
        """Record a session. Raises Overloaded, InvalidArgument for a tenant's name over 64 bytes."""
        free = np.flatnonzero(self._holders[:, -1] == 0)
        if not len(free):
            raise Overloaded(f"sessions: the table holds {HOLDER_LIMIT}, its limit; end some of them")
        words = np.frombuffer(_pack_holder(holder), dtype="<u8")
        place = int(free[0])
        self._holders[place, :-1] = words[:-1]
        barrier()
        failpoint("holds.holder.before_seal")
        self._holders[place, -1] = words[-1]
        self._places[holder.session] = place

    def drop_holder(self, session: int) -> None:
        """Forget a session whose process has ended, and all its rows. Unknown sessions are ignored."""
        self.erase(np.flatnonzero((self._rows[:, 0] == session) & (self._rows[:, -1] != 0)))
        place = self._places.pop(session, None)
        if place is not None:
            self._holders[place, -1] = 0

    # -- pages

    def append(self, session: int, extents: StructArray, *, kind: HoldKind) -> Rows:
        """Record EXTENT[n] before their handles leave; the rows, for `erase`. Raises TierFailed."""
        count = len(extents)
        if count > self._free_count:
            self._grow(count)
        self._free_count -= count
        rows = self._free[self._free_count : self._free_count + count].copy()
        words = _pack_rows(session, extents, kind=kind)
        self._rows[rows, :-1] = words[:, :-1]
        barrier()
        failpoint("holds.append.before_seal")
        self._rows[rows, -1] = words[:, -1]
        return rows

    def erase(self, rows: Rows) -> None:
        """Forget these rows, after the core has taken their pages back. Erased rows are skipped."""
        rows = rows[self._rows[rows, -1] != 0]
        failpoint("holds.erase.before_clear")
        self._rows[rows, -1] = 0
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)

    # -- inner

    def _find_faults(self, length: int) -> list[str]:
        """Faults of the whole file. length: of the file before mapping; 0 if it is new."""
        if not length or not any(self._memory[: TABLE_HEADER.itemsize]):
            return ["it is missing or blank"]
        faults = [f"it was {length} bytes long"] if length < _ROWS_AT else []
        if not _is_header(bytes(self._memory[: TABLE_HEADER.itemsize]), name=str(self._path)):
            faults.append("its header's checksum does not match")
        return faults

    def _map(self, rows: int) -> None:
        size = -(-(_ROWS_AT + rows * HOLD.itemsize) // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            self._memory = map_file(fd, size)
        finally:
            os.close(fd)
        holders = words_of(self._memory, offset=PAGE_ALIGN_BYTES, count=HOLDER_LIMIT * _HOLDER_WORDS)
        self._holders = holders.reshape(HOLDER_LIMIT, _HOLDER_WORDS)
        count = (size - _ROWS_AT) // HOLD.itemsize
        self._rows = words_of(self._memory, offset=_ROWS_AT, count=count * _ROW_WORDS).reshape(count, _ROW_WORDS)

    def _grow(self, count: int) -> None:
        """At least double the rows; the old and the new mapping show the same file."""
        old = len(self._rows)
        try:
            failpoint("holds.grow.before_map")
            self._map(max(2 * old, old + count))
        except OSError as error:
            raise TierFailed(f"{self._path}: the session table cannot grow beyond {old} rows: {error}") from error
        free = np.zeros(len(self._rows), dtype=np.int64)
        fresh = np.arange(old, len(self._rows))
        free[: self._free_count] = self._free[: self._free_count]
        free[self._free_count : self._free_count + len(fresh)] = fresh
        self._free, self._free_count = free, self._free_count + len(fresh)

    def _recover(self, faults: list[str], *, distrust: Callable[[str], None]) -> list[FormerHolder]:
        found, boot = self._find_holders(), read_boot_id()
        holders = {h.session: h for h in found.values() if h.boot == boot}
        valid = _valid_rows(self._rows)
        owned = valid & (self._is_of(h.session for h in found.values()) | (self._rows[:, 0] < OWN_SESSIONS))
        kept = owned & self._is_of(holders)
        for what, count in (
            ("records of sessions", np.count_nonzero(self._holders[:, -1]) - len(found)),
            ("rows", np.count_nonzero(self._rows[:, -1]) - np.count_nonzero(owned)),
        ):
            faults += [f"{count} {what} are damaged or have no session"] if count else []
        if faults:
            distrust(f"{self._path}: {', '.join(faults)}")
        # Rows before holders, as in `drop_holder`: rows without a holder would be taken for damage.
        self._rows[~kept, -1] = 0
        barrier()
        self._places = {h.session: place for place, h in found.items() if h.session in holders}
        gone = np.ones(HOLDER_LIMIT, np.bool_)
        gone[list(self._places.values())] = False
        self._holders[gone, -1] = 0
        unused = np.flatnonzero(~kept)
        self._free = np.zeros(len(self._rows), dtype=np.int64)
        self._free[: len(unused)] = unused[::-1]
        self._free_count = len(unused)
        return [self._former(holder, np.flatnonzero(kept & (self._rows[:, 0] == s))) for s, holder in holders.items()]

    def _is_of(self, sessions: Iterable[int]) -> NDArray[np.bool_]:
        """The rows that name one of these sessions."""
        return np.isin(self._rows[:, 0], np.array(list(sessions), dtype=np.uint64))

    def _find_holders(self) -> dict[int, Holder]:
        """Holders whose checksums hold, by place."""
        places = np.flatnonzero(self._holders[:, -1]).tolist()
        read = {place: _read_holder(self._holders[place].tobytes()) for place in places}
        return {place: holder for place, holder in read.items() if holder is not None}

    def _former(self, holder: Holder, rows: Rows) -> FormerHolder:
        kinds = self._rows[rows].view(HOLD).reshape(-1)["kind"]
        leased, reserved = rows[kinds == HoldKind.LEASE], rows[kinds == HoldKind.RESERVATION]
        return FormerHolder(holder, self._extents(leased), leased, self._extents(reserved), reserved)

    def _extents(self, rows: Rows) -> StructArray:
        records = self._rows[rows].view(HOLD).reshape(-1)
        extents = np.zeros(len(rows), dtype=EXTENT)
        for name in ("tier", "segment", "slot", "length", "offset", "generation"):
            extents[name] = records[name]
        extents["page"] = NO_PAGE
        return extents


# -- processes


def read_boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> bytes:
    """The 16-byte id of this boot of the machine."""
    return bytes.fromhex(path.read_text().strip().replace("-", ""))


# -- records


def _pack_header() -> bytes:
    record = np.zeros(1, dtype=TABLE_HEADER)
    record["magic"], record["version"], record["holders"] = TABLE_MAGIC, versions.SESSIONS.current, HOLDER_LIMIT
    record["checksum"] = record_checksum(record.tobytes()[:16])
    return record.tobytes()


def _is_header(raw: bytes, *, name: str) -> bool:
    """Whether it is a session table's header. Raises VersionMismatch for an unsupported version."""
    record = np.frombuffer(raw, dtype=TABLE_HEADER)[0]
    if record["magic"] != TABLE_MAGIC or record_checksum(raw[:16]) != int(record["checksum"]):
        return False
    versions.SESSIONS.check(int(record["version"]), name=name)
    return bool(record["holders"] == HOLDER_LIMIT)


def _pack_holder(holder: Holder) -> bytes:
    record = np.zeros(1, dtype=HOLDER)
    tenant = holder.tenant.encode()
    if len(tenant) > 64:
        raise InvalidArgument(
            f"tenant {holder.tenant[:20]!r}...: {len(tenant)} bytes, the session table holds 64; choose a shorter name"
        )
    record["session"], record["start_time"], record["pid"] = holder.session, holder.start_time, holder.pid
    record["uid"], record["domain"] = holder.uid, holder.domain
    record["boot"] = np.frombuffer(holder.boot, dtype=np.uint8)
    record["tenant_length"] = len(tenant)
    record["tenant"][0, : len(tenant)] = np.frombuffer(tenant, dtype=np.uint8)
    record["checksum"] = record_checksum(record.tobytes()[:-8])
    return record.tobytes()


def _read_holder(raw: bytes) -> Holder | None:
    record = np.frombuffer(raw, dtype=HOLDER)[0]
    if record_checksum(raw[:-8]) != int(record["checksum"]):
        return None
    try:
        tenant = record["tenant"].tobytes()[: int(record["tenant_length"])].decode()
    except UnicodeDecodeError:
        return None
    return Holder(
        session=int(record["session"]),
        pid=int(record["pid"]),
        start_time=int(record["start_time"]),
        boot=record["boot"].tobytes(),
        uid=int(record["uid"]),
        domain=int(record["domain"]),
        tenant=tenant,
    )


def _pack_rows(session: int, extents: StructArray, *, kind: HoldKind) -> Words:
    records = np.zeros(len(extents), dtype=HOLD)
    records["session"], records["kind"] = session, kind
    for name in ("tier", "segment", "slot", "length", "offset", "generation"):
        records[name] = extents[name]
    words: Words = records.view("<u8").reshape(-1, _ROW_WORDS)
    records["check"] = _check(words)
    return words


def _valid_rows(words: Words) -> NDArray[np.bool_]:
    """Rows that count: a kind, and a check that holds."""
    last = words[:, -1]
    used = np.flatnonzero(last)
    valid = np.zeros(len(words), dtype=np.bool_)
    kinds = (last[used] >> np.uint64(16)) & np.uint64(0xFFFF)
    valid[used] = (kinds != 0) & (_check(words[used]) == (last[used] >> np.uint64(32)))
    return valid


def _check(words: Words) -> Words:
    """32 bits per row of [n, 6] words: each times an odd factor, summed, folded. Not secure."""
    mixed = words.copy()
    mixed[:, -1] &= _NO_CHECK
    mixed ^= mixed >> _FOLD
    total: Words = mixed @ _FACTORS
    total ^= total >> _FOLD_SUM
    return total >> _HALF
