"""Recovery of a store's index from its files, and compaction of those files.

Snapshot N and the journals from N on, in order, are complete. Older files are removed only after a
newer snapshot, or an equivalent journal, is durable. So a crash at any point leaves at least one
complete set. Damaged files are renamed, those of a newer format refused; neither is deleted.
`slots` and `nvme` handle slots and the running store.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from tierd.core.formats.meta import META
from tierd.core.formats.model import StructArray
from tierd.errors import CorruptRecord
from tierd.failpoint import failpoint
from tierd.tiers.io.files import NO_SPACE, OS, Files
from tierd.tiers.store.journal import Journal, JournalText, Marks, Record, read_journal
from tierd.tiers.store.snapshot import open_snapshot, snapshot_path, write_snapshot
from tierd.tiers.store.stored_index import Filed, StoredIndex, changes_since, gathered, replay

_NAME = re.compile(r"(snapshot|journal)-(\d{16})\.(bin|log)")
LOST = "beside slots that hold blocks"
REJOURNALED_SHARE = 2
"""A start repeats old journals in its new one if they are at most 1/2 of the snapshot."""
JOURNALS_LIMIT = 4
"""A run leaves one or two. More come from interrupted starts, one each, and go into a snapshot."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """index: from the files, with a snapshot's rows still in it. base: number of its snapshot, or
    None. next_number: above every file's.

    snapshot: as read. journals: number of later ones. changes: their records other than marks.
    notices: for the operator. is_refitted: segments were dropped or moved since, which no record
    can describe.
    """

    index: StoredIndex
    base: int | None
    next_number: int
    snapshot: StoredIndex = field(default_factory=StoredIndex)
    journals: int = 0
    changes: int = 0
    notices: list[str] = field(default_factory=list)
    is_refitted: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """journal: the new one. snapshot_bytes: length of its snapshot. index: the content of both.
    has_news: the journal has more than marks.
    fault: on a full disk, why there is no journal. Then the old files are complete, and the journal
    must be replaced before a write."""

    journal: Journal
    snapshot_bytes: int
    index: StoredIndex
    has_news: bool
    fault: str = ""


def load_index(directory: Path, *, store: bytes, disk: Files = OS) -> Loaded:
    """`open_index`, with every block in memory."""
    loaded = open_index(directory, store=store, disk=disk)
    return replace(loaded, index=gathered(loaded.index))


def open_index(directory: Path, *, store: bytes, below: int | None = None, disk: Files = OS) -> Loaded:
    """Open the newest valid snapshot and read the journals after it; with below, only files of
    smaller numbers.

    Raises VersionMismatch for a newer format, OSError.
    """
    names, notices = disk.list(directory), list[str]()
    snapshots, journals = (_numbers(names, kind, below) for kind in ("snapshot", "journal"))
    base, snapshot = _newest_snapshot(directory, snapshots, store=store, notices=notices, disk=disk)
    following = [n for n in journals if base is None or n >= base]
    lost = [kind for kind, there in (("snapshot", snapshots), ("journal", following)) if not there]
    if lost and any(_has_begun(directory / name, disk) for name in names if name.endswith(".slots")):
        notices.append(
            f"{directory}: no {' and no '.join(lost)} {LOST}; blocks recorded only there are misses"
        )  # every start leaves both
    records = _JournalRecords([(n, read_journal(directory, store=store, number=n, disk=disk)) for n in following])
    index = replay(snapshot, records)
    next_number = max([0, *snapshots, *journals]) + 1
    return Loaded(index, base, next_number, snapshot, len(following), records.changes, notices + records.notices)


def _has_begun(path: Path, disk: Files) -> bool:
    """Whether the first slot of a file was ever written."""
    fd, head = disk.open(path, os.O_RDONLY), bytearray(META.itemsize)
    try:
        disk.preadv(fd, [memoryview(head)], 0)
    finally:
        disk.close(fd)
    return any(head)


class _JournalRecords:
    """The records of journals in order. changes: records other than marks; notices: torn tails."""

    def __init__(self, journals: list[tuple[int, JournalText]]) -> None:
        self.changes, self.notices = 0, list[str]()
        self._journals = journals

    def __iter__(self) -> Iterator[Record]:
        for number, text in self._journals:
            for record in text:
                self.changes += not isinstance(record, Marks)
                yield record
            if text.cut_bytes:
                self.notices.append(
                    f"journal {number}: a torn tail of {text.cut_bytes} bytes is cut; blocks recorded in it are misses"
                )


def settle(directory: Path, loaded: Loaded, *, store: bytes, first: list[Record], disk: Files = OS) -> Settled:
    """`_settle`; on a full disk, the old index without a journal. Raises OSError."""
    try:
        return _settle(directory, loaded, store=store, first=first, disk=disk)
    except OSError as error:
        if error.errno not in NO_SPACE or loaded.is_refitted:
            raise
        journal = Journal.unwritten(directory, store=store, number=loaded.next_number + 1, disk=disk)
        fault = f"no journal can be created ({error.strerror}); no block becomes durable there: free space"
        return Settled(journal, 0, loaded.index, has_news=True, fault=fault)


def _settle(directory: Path, loaded: Loaded, *, store: bytes, first: list[Record], disk: Files) -> Settled:
    """Make the loaded index durable, begin a journal with these records, remove the rest. Raises
    OSError.

    After a failed fsync in the previous run, content may be only in the page cache. So all that did
    not come from a snapshot is written again: if it is little, into the new journal, and the
    snapshot stays. Else there is a new snapshot.
    """
    number, index, is_whole = loaded.next_number, loaded.index, True
    if keeps_snapshot := _keeps_snapshot(directory, loaded, disk):
        kept = snapshot_path(directory, loaded.base or 0)
    else:
        write_snapshot(directory, index, store=store, number=number, disk=disk)
        kept = snapshot_path(directory, number)
        try:
            index = open_snapshot(directory, store=store, number=number, disk=disk)
        except CorruptRecord:  # the disk returns other bytes than were written: the old files stay too
            index, is_whole = gathered(index), False
    has_news = keeps_snapshot and loaded.changes > 0
    records = chain(first, changes_since(loaded.snapshot, index) if has_news else ())
    failpoint("nvme.settle.before_journal")
    journal = Journal.create(directory, store=store, number=number, first=records, disk=disk)
    failpoint("nvme.settle.before_removal")
    if is_whole:
        _remove_below(number, keep=kept, disk=disk)
    return Settled(journal, disk.size(kept), index, has_news)


def _keeps_snapshot(directory: Path, loaded: Loaded, disk: Files) -> bool:
    if loaded.base is None or loaded.is_refitted or loaded.journals > JOURNALS_LIMIT:
        return False
    journaled_bytes = len(loaded.index.journaled) * META.itemsize
    is_little = journaled_bytes * REJOURNALED_SHARE <= disk.size(snapshot_path(directory, loaded.base))
    return not loaded.changes or (loaded.index.filed is not None and is_little)


def compact(
    directory: Path, *, store: bytes, number: int, disk: Files = OS, is_given_up: Callable[[], bool] = lambda: False
) -> int:
    """Fold every file below number into snapshot number; returns its bytes. For a running store,
    whose journals below number are complete.

    Raises OSError, also when given up; nothing has changed then.
    """
    index = open_index(directory, store=store, below=number, disk=disk).index
    if index.filed:
        index = replace(index, filed=_Wanted(index.filed, is_given_up))
    failpoint("nvme.compact.before_snapshot")
    length = write_snapshot(directory, index, store=store, number=number, disk=disk)
    failpoint("nvme.compact.before_removal")
    _remove_below(number, keep=snapshot_path(directory, number), disk=disk)
    return length


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Rows in a file, until the snapshot is given up."""

    rows: Filed
    is_given_up: Callable[[], bool]

    @property
    def count(self) -> int:
        return self.rows.count

    def stretches(self) -> Iterator[StructArray]:
        for metas in self.rows.stretches():
            if self.is_given_up():
                raise OSError(errno.ECANCELED, "the snapshot was cancelled")
            yield metas


def _newest_snapshot(
    directory: Path, numbers: list[int], *, store: bytes, notices: list[str], disk: Files
) -> tuple[int | None, StoredIndex]:
    for number in reversed(numbers):
        try:
            return number, open_snapshot(directory, store=store, number=number, disk=disk)
        except CorruptRecord as error:
            notices.append(str(error))
            path = snapshot_path(directory, number)
            disk.rename(path, path.with_suffix(".damaged"))
    return None, StoredIndex()


def _numbers(names: list[str], kind: str, below: int | None) -> list[int]:
    found = map(_NAME.fullmatch, names)
    numbers = sorted(int(m[2]) for m in found if m and m[1] == kind)
    return [n for n in numbers if below is None or n < below]


def _remove_below(number: int, *, keep: Path, disk: Files) -> None:
    for name in disk.list(keep.parent):
        match = _NAME.fullmatch(name)
        is_old = match is not None and int(match[2]) <= number and (match[1] == "snapshot" or int(match[2]) < number)
        if (is_old and name != keep.name) or name.endswith(".tmp"):
            disk.unlink(keep.parent / name)
