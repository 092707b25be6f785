"""Checking files that no daemon has open: what is found, and how to look without touching.

Purpose: `Finding` and `Part`, a store's view of files that changes nothing, locks that leave no trace. Non-purpose: what lies in the files
(fsck_store.py, fsck_arena.py). Invariant: after a check every file has the bytes that it had before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierd.tiers.io.files import OsFiles
from tierd.tiers.io.lock import take_lock


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. part: the tier, or "instance"; where: file, and place in it; outcome: what the daemon's start or the next hit makes of it."""

    part: str
    where: str
    fault: str
    outcome: str


@dataclass
class Part:
    """One tier, or the instance, as far as it has been checked. total_bytes: of payload, known before any of it is read.

    notes: what a crash leaves behind in the ordinary way, and nothing is lost by.
    """

    name: str
    place: str
    files: int = 0
    blocks: int = 0
    bytes: int = 0
    total_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, where: str, fault: str, outcome: str) -> None:
        """Notes something that is wrong."""
        self.findings.append(Finding(self.name, where, fault, outcome))

    def add_told(self, notice: str) -> None:
        """A notice of the daemon's own readers: where, fault and outcome as they write them."""
        where, _, rest = notice.partition(": ")
        fault, _, outcome = rest.rpartition("; ")
        self.add(where, fault or rest, outcome if fault else "said at the start")


class ReadOnlyFiles(OsFiles):
    """The files of this machine, of which nothing changes: what would be renamed or removed stays."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def rename(self, source: Path, target: Path) -> None:
        """Nothing."""

    def unlink(self, path: Path) -> None:
        """Nothing."""


@contextlib.contextmanager
def borrowed_lock(path: Path, *, what: str) -> Iterator[None]:
    """The lock on path for as long as the block lasts, and the file as it was. Nothing where its directory is missing. Raises AlreadyOwned."""
    if not path.parent.is_dir():
        yield
        return
    before = path.read_bytes() if path.exists() else None
    lock = take_lock(path, what=what)
    try:
        yield
    finally:
        if before is not None:
            path.write_bytes(before)
        lock.release(remove=before is None)


@contextlib.contextmanager
def copied(path: Path) -> Iterator[Path]:
    """A copy of a small file, for a reader that mends what it reads."""
    with tempfile.TemporaryDirectory(prefix="tierd-fsck-") as directory:
        yield Path(shutil.copyfile(path, Path(directory) / path.name))
