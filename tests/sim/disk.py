"""A disk in memory that can lose its power, with the outcomes that a file system permits.

    disk = SimDisk()
    store.disk = disk                           # an NvmeStore, before `open`; direct "auto" or "on"
    after = disk.crashed(random.Random(7))      # the disk after a power failure now; `disk` goes on
    disk.crash(random.Random(7))                # the same, in place: descriptors and locks are gone
    disk.end_process()                          # a process ends, the machine goes on
    disk.faults = DiskFaults(read_error=0.01)   # from now on, by the disk's own chance

Purpose: `tierd.tiers.io.files.Files` for simulations. Non-purpose: time (the simulation delays
calls), directories (they always exist), O_DIRECT beyond its alignment (it promises no more than the
page cache). Invariants: without a fault no crash loses bytes that `sync_data` and `sync_directory`
made durable. Every outcome follows from the given `random.Random`. One thread calls at a time.

A crash works in sectors of 512 bytes. Of an unsynced write all, none or any of its sectors survive.
A sector holds its content after one of the writes, in any order. The length is one that the file
had since its last sync. Of unsynced name changes any subset survives, a rename as a unit.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from random import Random

from tierd.errors import AlreadyOwned

SECTOR_BYTES = 512
"""A write of this size is atomic."""
PAGE_BYTES = 4096
"""A misdirected read or write is off by a multiple of it."""
OLD_WRITES = 16
"""Number of overwritten pieces of each file that a stale read can return."""


@dataclass(frozen=True, slots=True)
class DiskFaults:
    """Chances, 0 to 1, of each fault at each call on a file whose name matches names.
    failed_sync: EIO; any part of the unsynced bytes is dropped for good but can still be read.
    Reads: error (EIO), short, stale (a part as before its last change), misdirected (another page
    of the file), flipped (a bit). Writes: error (EIO), no_space, short, lost, torn (some of its
    sectors), misdirected, flipped. Except for the errors and short calls a faulty call reports
    success."""

    names: str = "*"
    failed_sync: float = 0.0
    read_error: float = 0.0
    read_short: float = 0.0
    read_stale: float = 0.0
    read_misdirected: float = 0.0
    read_flipped: float = 0.0
    write_error: float = 0.0
    no_space: float = 0.0
    write_short: float = 0.0
    write_lost: float = 0.0
    write_torn: float = 0.0
    write_misdirected: float = 0.0
    write_flipped: float = 0.0


@dataclass(frozen=True, slots=True)
class _Change:
    """A change that is not durable. data: sectors from offset on; length: the file's new length."""

    offset: int
    data: bytes
    length: int


@dataclass(slots=True)
class _File:
    """image: bytes to read. durable: bytes that survive a crash. overwritten: (offset, old
    bytes)."""

    image: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[_Change] = field(default_factory=list)
    overwritten: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        self.overwritten = [
            *self.overwritten[1 - OLD_WRITES :],
            (offset, bytes(self.image[offset : offset + len(data)])),
        ]
        _put(self.image, offset, data)
        start = offset // SECTOR_BYTES * SECTOR_BYTES
        end = -(-(offset + len(data)) // SECTOR_BYTES) * SECTOR_BYTES
        self.unsynced.append(_Change(start, bytes(self.image[start:end]), len(self.image)))

    def resize(self, length: int) -> None:
        before = len(self.image)
        _resize(self.image, length)
        start = min(before, length) // SECTOR_BYTES * SECTOR_BYTES
        cleared = bytes(self.image[start:length]) + bytes(before - length) if length < before else b""
        self.unsynced.append(_Change(start, cleared, length))

    def sync(self) -> None:
        for change in self.unsynced:
            _put(self.durable, change.offset, change.data)
        if self.unsynced:
            _resize(self.durable, self.unsynced[-1].length)
        self.unsynced.clear()

    def drop_some(self, chance: Random) -> None:
        """Drops changes as a kernel does after a failed write: it marks the pages clean."""
        self.unsynced = [change for change in self.unsynced if chance.random() < 0.5]
        self.sync()

    def crashed(self, chance: Random) -> _File:
        after, lengths = bytearray(self.durable), [len(self.durable)]
        for change, share in zip(self.unsynced, _shares(chance, len(self.unsynced)), strict=True):
            for at in range(0, len(change.data), SECTOR_BYTES):
                if share == 1 or chance.random() < share:
                    _put(after, change.offset + at, change.data[at : at + SECTOR_BYTES])
            if share == 1:
                lengths = [change.length]
            elif share:
                lengths.append(change.length)
        _resize(after, chance.choice(lengths))
        return _File(bytearray(after), after)


class _Lock:
    """A lock on a disk; a crash drops it."""

    def __init__(self, locked: set[Path], path: Path) -> None:
        self._locked, self._path = locked, path

    def release(self, *, remove: bool = False) -> None:
        """Releases the lock; a second call does nothing."""
        self._locked.discard(self._path)


class SimDisk:
    """An empty disk. chance: decides the faults. hits: how often each fault struck.
    before_change: called with the operation's name before each change. ops: number of changes."""

    def __init__(self, chance: Random | None = None) -> None:
        self.faults = DiskFaults()
        self.hits: Counter[str] = Counter()
        self.ops = 0
        self.before_change: Callable[[str], None] | None = None
        self._chance = chance or Random(0)
        self._names: dict[Path, _File] = {}
        self._durable_names: dict[Path, _File] = {}
        self._unsynced_names: dict[Path, list[Mapping[Path, _File | None]]] = {}
        self._open: dict[int, tuple[str, _File, bool]] = {}  # name, file, whether O_DIRECT
        self._locked: set[Path] = set()
        self._next_fd = self._ended_fd = 3

    # -- crashes

    def crashed(self, chance: Random) -> SimDisk:
        """The disk after a power failure now. This one stays as it is."""
        names = dict(self._durable_names)
        for changes in self._unsynced_names.values():
            for change, share in zip(changes, _shares(chance, len(changes)), strict=True):
                if share == 1 or chance.random() < share:
                    _apply(names, change)
        after, files = SimDisk(self._chance), dict[int, _File]()
        for path, file in names.items():
            if id(file) not in files:
                files[id(file)] = file.crashed(chance)
            after._names[path] = after._durable_names[path] = files[id(file)]
        return after

    def crash(self, chance: Random) -> None:
        """Power is lost and comes back: no descriptors, no locks, any unsynced changes."""
        after = self.crashed(chance)
        self._names, self._durable_names, self._unsynced_names = after._names, after._durable_names, {}
        self.end_process()

    def end_process(self) -> None:
        """The process ends, the machine goes on: writes stay, descriptors and locks do not."""
        self._open.clear()
        self._ended_fd = self._next_fd
        self._locked.clear()

    # -- whole files, for tests

    def get(self, path: Path) -> bytes:
        """A file's content. Raises OSError."""
        return bytes(self._at(path).image)

    def put(self, path: Path, data: bytes) -> None:
        """Creates a durable file with this content."""
        self._names[path] = self._durable_names[path] = _File(bytearray(data), bytearray(data))

    def flip(self, path: Path, *, bit: int) -> None:
        """Flips a bit for good. Raises OSError."""
        file = self._at(path)
        for image in {id(data): data for data in (file.image, file.durable)}.values():
            image[bit // 8] ^= 1 << bit % 8

    # -- Files

    def lock(self, path: Path, *, what: str) -> _Lock:
        """As `Files.lock`."""
        if path in self._locked:
            raise AlreadyOwned(f"{what}: {path} is held, and one owner is the limit; close the other one first")
        self._locked.add(path)
        return _Lock(self._locked, path)

    def open(self, path: Path, flags: int) -> int:
        """As `Files.open`. A crash may lose a new file's name until its directory is synced."""
        file = self._names.get(path)
        if file is not None and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        if file is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            file = _File()
            self._rename(path.parent, {path: file})
        if flags & os.O_TRUNC and file.image:
            self._change("open")
            file.resize(0)
        self._next_fd += 1
        self._open[self._next_fd] = path.name, file, bool(flags & os.O_DIRECT)
        return self._next_fd

    def close(self, fd: int) -> None:
        """As `Files.close`. Ignores an ended process's descriptors: garbage collection closes
        them."""
        if fd > self._ended_fd:
            self._file(fd)
            del self._open[fd]

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As `Files.preadv`."""
        file = self._file(fd, offset, buffers)
        length = sum(map(len, buffers))
        data = self._read(fd, file, offset, length)
        at = 0
        for buffer in buffers:
            piece = data[at : at + len(buffer)]
            buffer[: len(piece)] = piece
            at += len(piece)
        return len(data)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As `Files.pwritev`."""
        file = self._file(fd, offset, buffers)
        self._change("pwritev")
        return self._write(fd, file, offset, b"".join(buffers))

    def truncate(self, fd: int, length: int) -> None:
        """As `Files.truncate`."""
        self._change("truncate")
        self._file(fd).resize(length)

    def allocate(self, fd: int, length: int) -> None:
        """As `Files.allocate`."""
        file = self._file(fd)
        self._change("allocate")
        self._raise_if(fd, "no_space", errno.ENOSPC)
        if len(file.image) < length:
            file.resize(length)

    def find_unwritten(self, fd: int, start: int) -> tuple[int, int] | None:
        """As `Files.find_unwritten`: this disk does not know."""
        return None

    def sync_data(self, fd: int) -> None:
        """As `Files.sync_data`."""
        file = self._file(fd)
        self._change("sync_data")
        if self._strikes(fd, "failed_sync"):
            file.drop_some(self._chance)
            raise OSError(errno.EIO, "simulated: the sync failed")
        file.sync()

    def sync_directory(self, path: Path) -> None:
        """As `Files.sync_directory`."""
        self._change("sync_directory")
        for change in self._unsynced_names.pop(path, []):
            _apply(self._durable_names, change)

    def rename(self, source: Path, target: Path) -> None:
        """As `Files.rename`."""
        self._rename(target.parent, {source: None, target: self._at(source)})

    def unlink(self, path: Path) -> None:
        """As `Files.unlink`."""
        if path in self._names:
            self._rename(path.parent, {path: None})

    def list(self, directory: Path) -> list[str]:
        """As `Files.list`."""
        parts = (str(path).rpartition("/") for path in self._names)
        return [name for parent, _, name in parts if parent == str(directory)]

    def size(self, path: Path) -> int:
        """As `Files.size`."""
        return len(self._at(path).image)

    def free_bytes(self, directory: Path) -> int:
        """As `Files.free_bytes`: there is always space."""
        return 1 << 62

    def is_named(self, path: Path, fd: int) -> bool:
        """As `Files.is_named`."""
        return fd in self._open and self._names.get(path) is self._open[fd][1]

    def random_bytes(self, count: int) -> bytes:
        """As `Files.random_bytes`, from the seed."""
        return self._chance.randbytes(count)

    # -- inside

    def _change(self, operation: str) -> None:
        if self.before_change is not None:
            self.before_change(operation)
        self.ops += 1

    def _rename(self, directory: Path, change: Mapping[Path, _File | None]) -> None:
        self._change("rename")
        _apply(self._names, change)
        self._unsynced_names.setdefault(directory, []).append(change)

    def _at(self, path: Path) -> _File:
        if path not in self._names:
            raise _error(errno.ENOENT, path)
        return self._names[path]

    def _file(self, fd: int, offset: int = 0, buffers: Sequence[memoryview] = ()) -> _File:
        if fd not in self._open:
            raise OSError(errno.EBADF, f"simulated: descriptor {fd} is not open")
        _, file, is_direct = self._open[fd]
        if is_direct and any(number % SECTOR_BYTES for number in (offset, *map(len, buffers))):
            raise OSError(errno.EINVAL, "simulated: O_DIRECT at an offset or length that is not aligned")
        return file

    def _read(self, fd: int, file: _File, offset: int, length: int) -> bytes:
        self._raise_if(fd, "read_error", errno.EIO)
        if self._strikes(fd, "read_misdirected"):
            offset = self._elsewhere(file, offset, length)
        data = bytearray(file.image[offset : offset + length])
        if self._strikes(fd, "read_stale"):
            self._make_stale(file, data, offset)
        if self._strikes(fd, "read_flipped"):
            self._flip(data)
        return bytes(data[: self._cut(fd, "read_short", len(data))])

    def _write(self, fd: int, file: _File, offset: int, data: bytes) -> int:
        self._raise_if(fd, "write_error", errno.EIO)
        self._raise_if(fd, "no_space", errno.ENOSPC)
        count = self._cut(fd, "write_short", len(data))
        changed = bytearray(data[:count])
        if self._strikes(fd, "write_lost"):
            return count
        if self._strikes(fd, "write_misdirected"):
            offset = self._elsewhere(file, offset, count)
        if self._strikes(fd, "write_flipped"):
            self._flip(changed)
        if self._strikes(fd, "write_torn"):
            self._tear(file, changed, offset)
        file.write(offset, bytes(changed))
        return count

    def _strikes(self, fd: int, fault: str) -> bool:
        likely = getattr(self.faults, fault)
        struck = bool(likely) and fnmatch(self._open[fd][0], self.faults.names) and self._chance.random() < likely
        self.hits[fault] += struck
        return struck

    def _raise_if(self, fd: int, fault: str, code: int) -> None:
        if self._strikes(fd, fault):
            raise OSError(code, f"simulated: {os.strerror(code)}")

    def _cut(self, fd: int, fault: str, count: int) -> int:
        """A shorter count, never 0: that means the end of the file."""
        if count <= SECTOR_BYTES or not self._strikes(fd, fault):
            return count
        return self._chance.randrange(SECTOR_BYTES, count, SECTOR_BYTES)

    def _elsewhere(self, file: _File, offset: int, length: int) -> int:
        """Another offset in the file, whole pages away, or the same one if there is no other."""
        first = offset % PAGE_BYTES
        places = [at for at in range(first, len(file.image) - length + 1, PAGE_BYTES) if at != offset]
        return self._chance.choice(places) if places else offset

    def _flip(self, data: bytearray) -> None:
        if data:
            bit = self._chance.randrange(len(data) * 8)
            data[bit // 8] ^= 1 << bit % 8

    def _tear(self, file: _File, data: bytearray, offset: int) -> None:
        """Replaces some sectors by their present content."""
        for at in range(0, len(data), SECTOR_BYTES):
            if self._chance.random() < 0.5:
                old = file.image[offset + at : min(offset + at + SECTOR_BYTES, offset + len(data))]
                data[at : at + len(old)] = old

    def _make_stale(self, file: _File, data: bytearray, offset: int) -> None:
        end = offset + len(data)
        there = [(at, old) for at, old in file.overwritten if at < end and offset < at + len(old)]
        if there:
            at, old = self._chance.choice(there)
            start, stop = max(at, offset), min(at + len(old), end)
            data[start - offset : stop - offset] = old[start - at : stop - at]


def _shares(chance: Random, count: int) -> list[float]:
    """The share of each of count changes that survives a crash: 1 all, 0 none, else of its sectors.
    The manner is that of a disk that writes at random, in order, or anything between."""
    manner = chance.randrange(4)
    if manner == 0:
        return [float(chance.random() < 0.5)] * count
    if manner == 1:
        whole = chance.randrange(count + 1)
        return [1.0 if i < whole else 0.5 * (i == whole) for i in range(count)]
    return [chance.choice((0.0, 0.0, 1.0, 1.0, 1.0, 0.1, 0.9)) for _ in range(count)]


def _apply(names: dict[Path, _File], change: Mapping[Path, _File | None]) -> None:
    for path, file in change.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def _put(image: bytearray, offset: int, data: bytes) -> None:
    if offset > len(image):
        _resize(image, offset)
    image[offset : offset + len(data)] = data


def _resize(image: bytearray, length: int) -> None:
    if length < len(image):
        del image[length:]
    else:
        image.extend(bytes(length - len(image)))


def _error(code: int, path: Path) -> OSError:
    return OSError(code, f"simulated: {os.strerror(code)}", str(path))
