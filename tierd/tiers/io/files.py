"""The file operations of a stored tier, as one small object that callers pass on.

`OsFiles` is the real one; a simulated disk replaces it (`tests/sim/disk.py`). `durable` and `slots`
have the loops over short reads and writes. A store makes all file operations through its Files,
except its fallback on the page cache (`buffered`). Nothing here is retried.
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
    """The remedy for an error of a disk."""
    return "free space there" if error.errno in NO_SPACE else "see the system log for that disk"


class Lock(Protocol):
    """Held until `release` or the end of the process."""

    def release(self, *, remove: bool = False) -> None:
        """Release; a second call does nothing. With remove, the lock file is unlinked first."""


class Files(Protocol):
    """File operations as in the kernel: each may raise OSError, blocks, and works in any thread."""

    def lock(self, path: Path, *, what: str) -> Lock:
        """Lock path; makes its directory, private. Raises AlreadyOwned, ConfigError, OSError."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor. flags: O_RDONLY, O_WRONLY or O_RDWR, and O_CREAT, O_EXCL, O_TRUNC,
        O_DIRECT. Only the owner can access a new file."""

    def close(self, fd: int) -> None:
        """Close a descriptor. This makes nothing durable."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers in order from offset on; returns the bytes read, which may be fewer."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write buffers in order from offset on; returns the bytes written."""

    def truncate(self, fd: int, length: int) -> None:
        """Cut the file, or extend it with zeros."""

    def allocate(self, fd: int, length: int) -> None:
        """Reserve space for the first length bytes; extends a shorter file with zeros."""

    def find_unwritten(self, fd: int, start: int) -> tuple[int, int] | None:
        """Begin and end of the first allocated, never written space after start; None if unknown."""

    def sync_data(self, fd: int) -> None:
        """Make the file's bytes and length durable. After a failure, abandon the file behind fd.
        The kernel may have dropped pages that it could not write, and would report success the next
        time."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file in one step, replacing an existing target."""

    def unlink(self, path: Path) -> None:
        """Remove a name; a missing one is no error."""

    def list(self, directory: Path) -> list[str]:
        """The names in a directory, in no order."""

    def size(self, path: Path) -> int:
        """Length of a file in bytes."""

    def free_bytes(self, directory: Path) -> int:
        """Space left for new files of a directory."""

    def is_named(self, path: Path, fd: int) -> bool:
        """Whether path still names the file behind fd."""

    def random_bytes(self, count: int) -> bytes:
        """New random bytes."""


class OsFiles:
    """The files of this machine. Descriptors are not inherited; symbolic links are not followed."""

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
            if error.errno in (errno.ENXIO, errno.EINVAL):  # beyond the end, or unsupported by the file system
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
        if error.errno == errno.ENXIO:  # no data follows
            return length
        raise


OS = OsFiles()
"""The default of a store."""
