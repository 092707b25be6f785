"""Checks of files that no daemon has open: findings, and access that changes nothing.

It has `Finding` and `Part`, a read-only `Files`, and locks that leave no trace. `fsck_store.py` and
`fsck_arena.py` check contents. After a check every file has the bytes that it had before.
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
    """One fault. part: the tier, or "instance". where: file, and position in it.
    outcome: its effect at the daemon's start or the next hit."""

    part: str
    where: str
    fault: str
    outcome: str


@dataclass
class Part:
    """One tier, or the instance, as checked so far. total_bytes: of payload, known before any is
    read.

    notes: normal traces of a crash, which lose nothing.
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
        """Record a fault."""
        self.findings.append(Finding(self.name, where, fault, outcome))

    def add_notice(self, notice: str) -> None:
        """Record a notice of the daemon's own readers, split into where, fault and outcome."""
        where, _, rest = notice.partition(": ")
        fault, _, outcome = rest.rpartition("; ")
        self.add(where, fault or rest, outcome if fault else "reported at the start")


class ReadOnlyFiles(OsFiles):
    """The files of this machine, read-only: renames and removals do nothing."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def rename(self, source: Path, target: Path) -> None:
        """Nothing."""

    def unlink(self, path: Path) -> None:
        """Nothing."""


@contextlib.contextmanager
def borrowed_lock(path: Path, *, what: str) -> Iterator[None]:
    """Hold the lock, then restore the file. No-op without its directory. Raises AlreadyOwned."""
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
    """A copy of a small file, for a reader that repairs what it reads."""
    with tempfile.TemporaryDirectory(prefix="tierd-fsck-") as directory:
        yield Path(shutil.copyfile(path, Path(directory) / path.name))
