"""Removing arenas, and finding those that nobody uses.

Purpose: what `tierd purge`, `tierctl doctor` and an arena's own release need. Non-purpose: sessions that still map the files
(they keep the memory until they end). Invariant: nothing of an arena is removed but under its lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tierd.tiers.arena_files import LOCK_NAME, SHM, read_mounts
from tierd.tiers.lock import find_owner, take_lock


@dataclass(frozen=True, slots=True)
class ArenaFiles:
    """One tier's files on this machine. owner: process id (0: unknown), None for an orphan."""

    instance: str
    tier: str
    directory: Path
    bytes: int
    owner: int | None


def list_arenas(arena_dirs: Iterable[str] = ()) -> list[ArenaFiles]:
    """The arenas of this user below /dev/shm, every hugetlbfs and the directories given; orphans have no owner."""
    found = []
    for base in _bases(arena_dirs):
        for directory in sorted((base / f"tierd-{os.geteuid()}").glob("*/*")):
            if directory.is_dir() and not directory.is_symlink():
                owner = find_owner(directory / LOCK_NAME)
                size = sum(path.lstat().st_blocks * 512 for path in _files(directory))
                found.append(ArenaFiles(directory.parent.name, directory.name, directory, size, owner))
    return found


def purge(instance: str, *, arena_dirs: Iterable[str] = ()) -> int:
    """Remove everything of an instance's arenas; how many bytes its files took (0: there was nothing).

    Raises AlreadyOwned, and then nothing has been removed, if a daemon uses any of them.
    """
    directories = [a.directory for a in list_arenas(arena_dirs) if a.instance == instance]
    with contextlib.ExitStack() as locks:
        for directory in directories:
            lock = take_lock(directory / LOCK_NAME, what=f"arena of instance {instance}")
            locks.callback(lock.release, remove=False)
        freed = remove_files(*directories)
        for path in {p for directory in directories for p in _files(directory.parent)}:
            path.unlink()  # the session table
        for directory in directories:
            (directory / LOCK_NAME).unlink()
    remove_empty(*directories)
    return freed


def remove_files(*directories: Path) -> int:
    """Unlink every file of an arena but its lock; how many bytes they took. Who maps them keeps the memory until it ends."""
    freed = 0
    for path in {path for directory in directories for path in _files(directory) if path.name != LOCK_NAME}:
        freed += path.lstat().st_blocks * 512
        path.unlink(missing_ok=True)
    return freed


def remove_empty(*directories: Path) -> None:
    """Remove an arena's directories and the instance's, as far as they hold nothing."""
    for directory in [*dict.fromkeys(directories), *dict.fromkeys(d.parent for d in directories)]:
        with contextlib.suppress(OSError):
            directory.rmdir()


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file() and not path.is_symlink()]


def _bases(arena_dirs: Iterable[str]) -> list[Path]:
    huge = [mount.path for mount in read_mounts() if mount.kind == "hugetlbfs"]
    return list(dict.fromkeys([SHM, *huge, *(Path(d).resolve() for d in arena_dirs if d)]))
