"""Removal of arenas and stores, and search for arenas without a daemon.

`tierd purge` and an arena's own release use it. Sessions that still map the files keep the memory
until they end. An arena's files are removed only under its lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tierd.linux.trust import find_stranger
from tierd.tiers.arena.arena_files import LOCK_NAME, SHM, read_mounts, tables_base, user_directory
from tierd.tiers.io.lock import find_owner, private_directory, take_lock
from tierd.tiers.store.store_files import LOCK_NAME as STORE_LOCK

STORE_FILES = ("store.json*", "seg-*.slots*", "snapshot-*.bin*", "journal-*.log*", "probe.tmp")


@dataclass(frozen=True, slots=True)
class ArenaFiles:
    """One tier's files on this machine. owner: process id (0: unknown), None for an orphan.
    data: directory of its data files; tables: of the rest, and of its lock."""

    instance: str
    tier: str
    data: Path
    tables: Path
    bytes: int
    owner: int | None


def list_arenas(arena_dirs: Iterable[str] = ()) -> list[ArenaFiles]:
    """This user's arenas in /dev/shm, hugetlbfs and the given directories; orphans have no owner."""
    mounts = list(read_mounts())
    huge = [mount.path for mount in mounts if mount.kind == "hugetlbfs"]
    found: dict[Path, ArenaFiles] = {}
    for base in dict.fromkeys([*huge, *(Path(d).resolve() for d in arena_dirs if d), SHM]):
        if find_stranger(user_directory(base)):
            continue  # owned by another user
        for data in sorted(user_directory(base).glob("*/*")):
            tables = user_directory(tables_base(base, mounts)) / data.parent.name / data.name
            if data.is_dir() and not data.is_symlink() and tables not in found:
                found[tables] = _describe(data, tables)
    return list(found.values())


def purge(instance: str, *, arena_dirs: Iterable[str] = ()) -> int:
    """Remove an instance's arenas; returns the bytes that their files used (0: none existed).

    Raises AlreadyOwned if a daemon uses any of them; then nothing is removed.
    """
    arenas = [a for a in list_arenas(arena_dirs) if a.instance == instance]
    with contextlib.ExitStack() as locks:
        for arena in arenas:
            lock = take_lock(private_directory(arena.tables) / LOCK_NAME, what=f"arena of instance {instance}")
            locks.callback(lock.release)
        directories = {d for arena in arenas for d in (arena.data, arena.tables)}
        freed = remove_files(*directories)
        for path in {p for directory in directories for p in _files(directory.parent)}:
            path.unlink()  # the session table
        for arena in arenas:
            (arena.tables / LOCK_NAME).unlink()
    remove_empty(*directories)
    return freed


def purge_store(directory: Path) -> int:
    """Remove only a store's files; returns their bytes (0: no store). Raises AlreadyOwned."""
    files = [path for pattern in STORE_FILES for path in directory.glob(pattern)]
    if not files:
        return 0
    lock = take_lock(directory / STORE_LOCK, what=f"store in {directory}")
    freed = sum(path.lstat().st_blocks * 512 for path in files)
    for path in files:
        path.unlink()
    lock.release(remove=True)
    remove_empty(directory)
    return freed


def remove_files(*directories: Path) -> int:
    """Unlink an arena's files but its lock; returns their bytes. Processes keep their mappings."""
    freed = 0
    for path in {path for directory in directories for path in _files(directory) if path.name != LOCK_NAME}:
        freed += path.lstat().st_blocks * 512
        path.unlink(missing_ok=True)
    return freed


def remove_empty(*directories: Path) -> None:
    """Remove the directories of an arena and of the instance, if empty."""
    for directory in [*dict.fromkeys(directories), *dict.fromkeys(d.parent for d in directories)]:
        with contextlib.suppress(OSError):
            directory.rmdir()


def _files(directory: Path) -> list[Path]:
    return (
        [path for path in directory.iterdir() if path.is_file() and not path.is_symlink()] if directory.is_dir() else []
    )


def _describe(data: Path, tables: Path) -> ArenaFiles:
    size = sum(path.lstat().st_blocks * 512 for directory in {data, tables} for path in _files(directory))
    return ArenaFiles(data.parent.name, data.name, data, tables, size, find_owner(tables / LOCK_NAME))
