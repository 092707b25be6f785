"""What a stored tier asks of the file system, as one small object that is handed along.

Purpose: `Files`, and `OsFiles`, the real one; a simulated disk stands in its place (`tests/sim/disk.py`). Non-purpose: what the files
mean, loops over short reads and writes (`durable`, `slots`). Invariants: a store makes no file operation but through its Files, the
page cache of last resort (`buffered`) excepted; nothing here is tried twice.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tierd.tiers.io.lock import private_directory, take_lock

READ_WRITE = os.O_RDWR | os.O_CREAT
"""Flags of a file that is made if missing."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def remedy_of(error: OSError) -> str:
    """What to do about what a disk said."""
    return "free space there" if error.errno in NO_SPACE else "see the system's log of that disk"


class Lock(Protocol):
    """Held until `release` or the end of the process."""

    def release(self, *, remove: bool = False) -> None:
        """Lets go; twice is once. With remove the lock file is unlinked first."""


class Files(Protocol):
    """Operations on files, as the kernel has them: each may raise OSError, blocks, and may be called from any thread."""

    def lock(self, path: Path, *, what: str) -> Lock:
        """The lock on path, for what. Its directory is made, private, if missing. Raises AlreadyOwned, ConfigError, OSError."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor. flags: O_RDONLY, O_WRONLY or O_RDWR, and O_CREAT, O_EXCL, O_TRUNC, O_DIRECT. A new file is its owner's alone."""

    def close(self, fd: int) -> None:
        """Gives a descriptor back. Nothing becomes durable by it."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fills buffers in order from offset on; gives how many bytes came, fewer at the end of the file or for no reason."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes buffers in order from offset on; gives how many bytes went."""

    def truncate(self, fd: int, length: int) -> None:
        """Cuts the file, or fills it up with zeros."""

    def allocate(self, fd: int, length: int) -> None:
        """Sets space aside for the first length bytes; the file is at least that long afterwards, zeros where nothing was."""

    def find_unwritten(self, fd: int, start: int) -> tuple[int, int] | None:
        """The first space from start on that is set aside and was never written: where it begins and ends. None: there is none, or nobody knows."""

    def sync_data(self, fd: int) -> None:
        """The file's bytes and length are durable. Once it has failed the file behind fd must be abandoned: the kernel may have dropped the
        pages that it could not write, and would report success for them the next time."""

    def sync_directory(self, path: Path) -> None:
        """The names in a directory are durable."""

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file another name in one step; whatever had that name is gone."""

    def unlink(self, path: Path) -> None:
        """Removes a name; one that is not there is no error."""

    def list(self, directory: Path) -> list[str]:
        """The names in a directory, in no order."""

    def size(self, path: Path) -> int:
        """Length of a file in bytes."""

    def free_bytes(self, directory: Path) -> int:
        """What new files of a directory may still take."""

    def is_named(self, path: Path, fd: int) -> bool:
        """Whether path still names the file behind fd."""

    def random_bytes(self, count: int) -> bytes:
        """So many bytes that nobody has had before."""


class OsFiles:
    """The files of this machine. Descriptors are not inherited; a link in the place of a file is not followed."""

    def lock(self, path: Path, *, what: str) -> Lock:
        return take_lock(private_directory(path.parent) / path.name, what=what)

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def allocate(self, fd: int, length: int) -> None:
        os.posix_fallocate(fd, 0, length)

    def find_unwritten(self, fd: int, start: int) -> tuple[int, int] | None:
        length = os.fstat(fd).st_size
        try:
            hole = os.lseek(fd, start, os.SEEK_HOLE)
            return (hole, _data_from(fd, hole, length)) if hole < length else None
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.EINVAL):  # beyond the end; no such question to this file system
                return None
            raise

    def sync_data(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def list(self, directory: Path) -> list[str]:
        return os.listdir(directory)

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def free_bytes(self, directory: Path) -> int:
        room = os.statvfs(directory)
        return room.f_bavail * room.f_frsize

    def is_named(self, path: Path, fd: int) -> bool:
        try:
            return os.path.samestat(path.lstat(), os.fstat(fd))
        except OSError:
            return False

    def random_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)


def _data_from(fd: int, start: int, length: int) -> int:
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # there is none
            return length
        raise


OS = OsFiles()
"""What a store works on unless it is told otherwise."""
