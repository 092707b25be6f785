"""The files of a store: lock, id, slot files and index, opened in order and closed together.

`nvme` and `ledger` use the open store. The lock is taken before any read and released last. All
space is reserved before the store serves. A failed opening leaves no file open.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from tierd.core.formats import versions
from tierd.core.formats.model import PAGE_ALIGN_BYTES, TierSpec
from tierd.errors import ConfigError, TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.io import durable
from tierd.tiers.io.files import OS, Files, Lock, remedy_of
from tierd.tiers.store import recovery
from tierd.tiers.store.journal import Journal, Marks
from tierd.tiers.store.slots import DirectIO, SlotFile, SlotIO, allows_direct, read_at, write_at
from tierd.tiers.store.stored_index import StoredIndex, count_of, latest_times, moved, select

LOCK_NAME = "store.lock"
GENERATION_LEAP = 1 << 20
SEGMENT_LEAP = 256
"""Marks run this far ahead of used numbers, so that they are written rarely."""
COPY_BYTES = 1 << 20
INDEX_SHARE = 64
"""This part (1/64) of the capacity stays free for journals and snapshots."""

Direct = Literal["auto", "on", "off"]


@dataclass(slots=True)
class OpenStore:
    """A store under its lock. name: the tier's. store: its id, 16 bytes. index: of the previous
    run.

    files: slot files by place; retired: those that were replaced.
    journal: a new one, after a snapshot of snapshot_bytes.
    marks: its first record; has_news: it has records of previous runs too.
    notices: for the operator. fault: why the journal cannot be written, or empty.
    set_aside: slot files that this opening made or extended, with their old lengths.
    """

    name: str
    directory: Path
    store: bytes
    disk: Files
    lock: Lock
    io: SlotIO
    files: dict[int, SlotFile]
    index: StoredIndex
    journal: Journal
    snapshot_bytes: int
    marks: Marks
    notices: list[str]
    has_news: bool = False
    fault: str = ""
    set_aside: dict[Path, int] = field(default_factory=dict)
    retired: list[SlotFile] = field(default_factory=list)

    def close_retired(self) -> None:
        """Close the descriptors of replaced files. No call may be in flight on them."""
        while self.retired:
            self.disk.close(self.retired.pop().fd)

    def close(self, *, release: bool, undo: bool = False) -> None:
        """Close everything; with release, remove all files; with undo, free newly reserved space."""
        self.close_retired()
        for file in self.files.values():
            self.disk.close(file.fd)
        self.files.clear()
        self.journal.close()
        if undo:
            _give_back(self.set_aside, self.disk)
        if release:
            for name in self.disk.list(self.directory):
                if name != LOCK_NAME:
                    self.disk.unlink(self.directory / name)
        self.lock.release(remove=release)


def open_store(spec: TierSpec, *, directory: Path, direct: Direct, buffered: SlotIO, disk: Files = OS) -> OpenStore:
    """Open the store of this directory, or make it. Raises AlreadyOwned, ConfigError,
    VersionMismatch, TierFailed.

    buffered: moves slots if O_DIRECT is not used.
    """
    try:
        with ExitStack() as undo:
            lock = disk.lock(directory / LOCK_NAME, what=f"{spec.name}: store")
            undo.callback(lock.release)
            opened = _open_locked(_Opening(spec, directory, direct, buffered, disk, undo), lock)
            undo.pop_all()
            return opened
    except OSError as error:
        raise TierFailed(f"{spec.name}: {directory}: {error.strerror or error}; {remedy_of(error)}") from error


@dataclass(frozen=True, slots=True)
class _Opening:
    spec: TierSpec
    directory: Path
    direct: Direct
    buffered: SlotIO
    disk: Files
    undo: ExitStack


def _open_locked(opening: _Opening, lock: Lock) -> OpenStore:
    spec, directory, disk, notices = opening.spec, opening.directory, opening.disk, list[str]()
    _check_room(spec, directory, disk)
    store = _store_id(directory, disk, notices)
    io = _choose_io(opening, notices)
    failpoint("nvme.open.before_index")
    loaded = recovery.open_index(directory, store=store, disk=disk)
    names, places = set(disk.list(directory)), range(spec.capacity_bytes // spec.segment_bytes)
    used = {s.place for s in loaded.index.segments.values()}.intersection(places)  # segments beyond them may have moved
    index, moves = _fitting(loaded, spec, {at for at in used if slots_path(directory, at).name not in names})
    # A snapshot with the old places would restore ended segments, and move others again.
    loaded = replace(loaded, index=index, is_refitted=index is not loaded.index)
    files, set_aside = _open_files(opening, io, moves)
    marks = Marks(loaded.index.next_segment + SEGMENT_LEAP, loaded.index.next_generation + GENERATION_LEAP)
    failpoint("nvme.open.before_settle")
    settled = recovery.settle(directory, loaded, store=store, first=[marks], disk=disk)
    return OpenStore(
        name=spec.name,
        directory=directory,
        store=store,
        disk=disk,
        lock=lock,
        io=io,
        files=files,
        index=settled.index,
        journal=settled.journal,
        snapshot_bytes=settled.snapshot_bytes,
        marks=marks,
        notices=notices + loaded.notices,
        has_news=settled.has_news,
        fault=settled.fault and f"{spec.name}: {directory}: {settled.fault}",
        set_aside=set_aside,
    )


def _check_room(spec: TierSpec, directory: Path, disk: Files) -> None:
    """Check the room for all space before reserving any. Raises ConfigError, OSError."""
    held = sum(disk.size(directory / name) for name in disk.list(directory) if fnmatch(name, "seg-*.slots"))
    missing = spec.capacity_bytes // spec.segment_bytes * spec.segment_bytes - held
    free, index_bytes = disk.free_bytes(directory), spec.capacity_bytes // INDEX_SHARE
    if missing > 0 and missing + index_bytes > free:
        raise ConfigError(
            f"{spec.name}.capacity: {spec.capacity_bytes} bytes need {missing} more in {directory}, and {index_bytes} for the index;"
            f" {free} are free there; lower it, or free space"
        )


def _give_back(set_aside: dict[Path, int], disk: Files) -> None:
    """Restore the lengths of slot files, and remove new ones."""
    for path, length in set_aside.items():
        if not length:
            disk.unlink(path)
        else:
            fd = disk.open(path, os.O_WRONLY)
            disk.truncate(fd, length)
            disk.close(fd)


def _choose_io(opening: _Opening, notices: list[str]) -> SlotIO:
    name, directory = opening.spec.name, opening.directory
    if opening.direct == "off":
        return opening.buffered
    if allows_direct(directory, opening.disk):
        return DirectIO(opening.disk)
    if opening.direct == "on":
        raise ConfigError(
            f'{name}.direct: "on", but the file system of {directory} refuses O_DIRECT; use another, or "auto"'
        )
    notices.append(f"{name}: {directory} refuses O_DIRECT; it is served through the page cache")
    return opening.buffered


def _fitting(loaded: recovery.Loaded, spec: TierSpec, missing: set[int]) -> tuple[StoredIndex, dict[int, int]]:
    """The index without the coldest segments that no longer fit and those with missing files; and
    the places that change: from, to.

    An interrupted start decides the same again, and skips files that have moved.
    """
    places = spec.capacity_bytes // spec.segment_bytes
    segments = loaded.index.segments.values()
    fitting = [s for s in segments if s.pages * s.class_bytes <= spec.segment_bytes and s.place not in missing]
    if len(fitting) == len(segments) and all(s.place < places for s in segments):
        return loaded.index, {}
    heat = latest_times(loaded.index)
    kept = sorted(fitting, key=lambda s: (heat[s.segment], s.segment), reverse=True)[:places]
    free = iter(sorted(set(range(places)) - {s.place for s in kept}))
    moves = {s.place: next(free) for s in sorted(kept, key=lambda s: s.segment) if s.place >= places}
    ids = {s.segment for s in kept}
    index = select(loaded.index, within=lambda s: s.segment in ids)
    lost = len(segments) - len(kept)
    if lost:
        blocks = count_of(loaded.index) - count_of(index)
        loaded.notices.append(
            f"{spec.name}: {lost} segments with {blocks} blocks do not fit {spec.capacity_bytes} bytes in segments of"
            f" {spec.segment_bytes}, or have lost their files ({len(missing)} of which are missing); they are dropped"
        )
    return moved(index, moves), moves


def _open_files(opening: _Opening, io: SlotIO, moves: dict[int, int]) -> tuple[dict[int, SlotFile], dict[Path, int]]:
    """The files of all places, space reserved, and the old lengths of shorter ones. Files beyond
    the capacity are moved or removed first, and longer ones cut, for their room."""
    spec, disk, files, set_aside = opening.spec, opening.disk, dict[int, SlotFile](), dict[Path, int]()
    opening.undo.callback(_give_back, set_aside, disk)
    places = spec.capacity_bytes // spec.segment_bytes
    for old, new in moves.items():
        if slots_path(opening.directory, old).name in disk.list(opening.directory):
            disk.rename(slots_path(opening.directory, old), slots_path(opening.directory, new))
    for name in disk.list(opening.directory):
        path = opening.directory / name
        if fnmatch(name, "seg-*.slots") and name >= slots_path(opening.directory, places).name:
            disk.unlink(path)
        elif fnmatch(name, "seg-*.slots") and disk.size(path) > spec.segment_bytes:
            fd = io.open(path)
            disk.truncate(fd, spec.segment_bytes)
            disk.close(fd)
    names = set(disk.list(opening.directory))
    for place in range(places):
        path = slots_path(opening.directory, place)
        length = disk.size(path) if path.name in names else 0
        if length < spec.segment_bytes:
            set_aside[path] = length
        files[place] = SlotFile(path, io.open(path))
        opening.undo.callback(disk.close, files[place].fd)
        _set_aside(files[place], spec, disk)
    failpoint("nvme.open.before_directory_sync")
    disk.sync_directory(opening.directory)
    return files, set_aside


def _set_aside(file: SlotFile, spec: TierSpec, disk: Files) -> None:
    if disk.size(file.path) >= spec.segment_bytes:
        return
    try:
        disk.allocate(file.fd, spec.segment_bytes)
    except OSError as error:
        raise TierFailed(
            f"{spec.name}.capacity: {spec.capacity_bytes} bytes cannot be allocated; {file.path} failed"
            f" ({error.strerror}); lower it or free space"
        ) from error


def renew(
    opened: OpenStore, place: int, spans: Sequence[tuple[int, int]], *, is_strict: bool
) -> tuple[SlotFile, list[int]]:
    """Replace a slot file whose sync failed by a new one with its durable spans (offset and length
    in bytes). Returns the new file and the offsets of dropped spans.

    is_strict: an unreadable span is an error; else it is dropped. Raises OSError. Blocks.
    """
    disk, old = opened.disk, opened.files[place]
    path = old.path.with_name(old.path.name + ".tmp")
    disk.unlink(path)  # never one that was synced before
    new = SlotFile(old.path, opened.io.open(path))
    try:
        disk.allocate(new.fd, disk.size(old.path))
        copied = [
            _copy(disk, (old.fd, new.fd), range(offset, offset + length, COPY_BYTES), is_strict=is_strict)
            for offset, length in spans
        ]
        disk.sync_data(new.fd)
        disk.rename(path, old.path)
        disk.sync_directory(opened.directory)
    except OSError:
        disk.close(new.fd)
        disk.unlink(path)
        raise
    return new, [offset for (offset, _), is_whole in zip(spans, copied, strict=True) if not is_whole]


def _copy(disk: Files, fds: tuple[int, int], offsets: range, *, is_strict: bool) -> bool:
    """Copy spans; returns whether all of it was readable."""
    buffer, is_whole = memoryview(mmap.mmap(-1, COPY_BYTES)), True
    for offset in offsets:
        part = buffer[: min(COPY_BYTES, offsets.stop - offset)]
        try:
            count = read_at(fds[0], offset, [part], disk)
        except OSError:
            if is_strict:
                raise
            is_whole = False
            continue
        write_at(fds[1], offset, [part[:count]], disk)
    return is_whole


def try_disk(opened: OpenStore) -> None:
    """Write, sync and read a temporary file, and read the first slot. Raises OSError. Blocks."""
    disk, path = opened.disk, opened.directory / "probe.tmp"
    page = memoryview(mmap.mmap(-1, PAGE_ALIGN_BYTES))
    fd = opened.io.open(path)
    try:
        write_at(fd, 0, [page], disk)
        disk.sync_data(fd)
        for readable in (fd, opened.files[0].fd):
            read_at(readable, 0, [page], disk)
    finally:
        disk.close(fd)
        disk.unlink(path)


def slots_path(directory: Path, place: int) -> Path:
    """The slot file of a place."""
    return directory / f"seg-{place:06d}.slots"


def _store_id(directory: Path, disk: Files, notices: list[str]) -> bytes:
    """The store's id, 16 bytes, made with the store. Raises VersionMismatch, TierFailed, OSError."""
    path, names = directory / "store.json", disk.list(directory)
    if path.name not in names:
        if any(fnmatch(name, "seg-*.slots") for name in names):
            notices.append(
                f"{path}: missing beside slot files; a new store begins, every block of the old one is a miss"
            )
        store = disk.random_bytes(16)
        text = json.dumps({"format": versions.STORE.current, "store": store.hex()})
        durable.replace_file(path, [text.encode()], disk=disk)
        return store
    try:
        description = json.loads(durable.read_file(path, disk=disk))
        version, store = int(description["format"]), bytes.fromhex(description["store"])
    except (ValueError, KeyError, TypeError) as error:
        raise TierFailed(
            f"{path}: not a description of a store ({error}); restore it, or remove the directory"
        ) from error
    versions.STORE.check(version, name=str(path))
    return store
