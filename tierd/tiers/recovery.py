"""From the files of a store's directory to its index, and back to few files.

Purpose: `open_index`, `load_index`, `settle` and `compact`. Non-purpose: the slots (`slots`), the living store (`nvme`). Invariants: snapshot N and the
journals from N on, in order, are the whole truth; older files are removed only after a newer snapshot is durable, so a crash
at any point leaves at least one complete set; damaged files are renamed, those of a newer format refused, neither deleted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from tierd.errors import CorruptRecord
from tierd.failpoint import failpoint
from tierd.tiers.files import OS, Files
from tierd.tiers.journal import Journal, Marks, Record, read_journal
from tierd.tiers.snapshot import open_snapshot, snapshot_path, write_snapshot
from tierd.tiers.stored_index import StoredIndex, gathered, replay

_NAME = re.compile(r"(snapshot|journal)-(\d{16})\.(bin|log)")


@dataclass(frozen=True, slots=True)
class Loaded:
    """index: what the files say, the rows of a snapshot still in it. base: number of the snapshot it began with, None for none. next_number: above every file's.

    changes: how many records of journals told more than marks, and segments were moved since. notices: what an operator should hear.
    """

    index: StoredIndex
    base: int | None
    next_number: int
    changes: int = 0
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Settled:
    """journal: the one to write. snapshot_bytes: length of the snapshot that it follows. index: what that snapshot holds."""

    journal: Journal
    snapshot_bytes: int
    index: StoredIndex


def load_index(directory: Path, *, store: bytes, disk: Files = OS) -> Loaded:
    """`open_index`, with every block in memory."""
    loaded = open_index(directory, store=store, disk=disk)
    return replace(loaded, index=gathered(loaded.index))


def open_index(directory: Path, *, store: bytes, below: int | None = None, disk: Files = OS) -> Loaded:
    """Opens the newest good snapshot and reads the journals that follow it; with below, only files of smaller numbers.

    Raises VersionMismatch for a newer format, OSError.
    """
    names, notices = disk.list(directory), list[str]()
    snapshots, journals = (_numbers(names, kind, below) for kind in ("snapshot", "journal"))
    base, index = _newest_snapshot(directory, snapshots, store=store, notices=notices, disk=disk)
    count = 0
    for number in (n for n in journals if base is None or n >= base):
        text = read_journal(directory, store=store, number=number, disk=disk)
        index = replay(index, text.records)
        count += sum(not isinstance(record, Marks) for record in text.records)
        if text.cut_bytes:
            notices.append(
                f"journal {number}: a tail of {text.cut_bytes} bytes was torn and is cut; what it told is a miss"
            )
    return Loaded(index, base, max([0, *snapshots, *journals]) + 1, count, notices)


def settle(directory: Path, loaded: Loaded, *, store: bytes, first: list[Record], disk: Files = OS) -> Settled:
    """Makes what was loaded durable in one snapshot, begins a journal with these records, removes all else. Raises OSError.

    Even after an fsync that failed in a former life nothing is trusted that lies in the page cache alone: the
    index is written anew unless it came from a snapshot whole.
    """
    number, index = loaded.next_number, loaded.index
    if loaded.base is None or loaded.changes or loaded.notices:
        length = write_snapshot(directory, loaded.index, store=store, number=number, disk=disk)
        kept = snapshot_path(directory, number)
        index = open_snapshot(directory, store=store, number=number, disk=disk)
    else:
        kept = snapshot_path(directory, loaded.base)
        length = disk.size(kept)
    failpoint("nvme.settle.before_journal")
    journal = Journal.create(directory, store=store, number=number, first=first, disk=disk)
    failpoint("nvme.settle.before_removal")
    _remove_below(number, keep=kept, disk=disk)
    return Settled(journal, length, index)


def compact(directory: Path, *, store: bytes, number: int, disk: Files = OS) -> int:
    """Folds every file below number into snapshot number. Gives its length in bytes. Raises OSError.

    For a living store, whose journals below number are complete and no longer written.
    """
    loaded = open_index(directory, store=store, below=number, disk=disk)
    failpoint("nvme.compact.before_snapshot")
    length = write_snapshot(directory, loaded.index, store=store, number=number, disk=disk)
    failpoint("nvme.compact.before_removal")
    _remove_below(number, keep=snapshot_path(directory, number), disk=disk)
    return length


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
