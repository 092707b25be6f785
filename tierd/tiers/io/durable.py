"""Whole files: read, written, and replaced durably.

`files` has the single operations. A sync is never retried. A file under its final name is whole and
durable.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tierd.checksum import Buffer
from tierd.failpoint import failpoint
from tierd.tiers.io.files import OS, Files

WINDOW_BYTES = 4 << 20
"""Of a long file, in memory at one time; more if one read asks for more."""


def read_file(path: Path, *, disk: Files = OS) -> bytearray:
    """All of a file, up to its length at the start. Raises OSError."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        data = bytearray(disk.size(path))
        count = read_into(fd, data, offset=0, disk=disk)
        return data if count == len(data) else data[:count]
    finally:
        disk.close(fd)


class Window:
    """Part of an open file in memory, read on demand. bytes: the file's length. Made by `opened`."""

    def __init__(self, fd: int, length: int, disk: Files) -> None:
        self.bytes = length
        self._fd, self._disk = fd, disk
        self._memory = np.empty(0, np.uint8)
        self._begin, self._here = 0, memoryview(b"")

    def read(self, offset: int, length: int) -> memoryview:
        """length bytes from offset on, fewer at the end. Valid until the next call. Raises OSError."""
        length = max(0, min(length, self.bytes - offset))
        if not self._begin <= offset <= offset + length <= self._begin + len(self._here):
            if len(self._memory) < length:
                self._memory = np.empty(max(length, min(self.bytes, WINDOW_BYTES)), np.uint8)
            here = self._memory[: self.bytes - offset]
            count = read_into(self._fd, here, offset=offset, disk=self._disk)
            self._begin, self._here = offset, here[:count].data
        return self._here[offset - self._begin :][:length]


@contextmanager
def opened(path: Path, *, disk: Files = OS) -> Iterator[Window]:
    """A file to be read through a window. Raises OSError."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        yield Window(fd, disk.size(path), disk)
    finally:
        disk.close(fd)


def read_into(fd: int, buffer: Buffer, *, offset: int, disk: Files = OS) -> int:
    """Fill the buffer from offset on, in several calls; returns the bytes read. Raises OSError."""
    rest, begin = memoryview(buffer).cast("B"), offset  # type: ignore[arg-type]  # numpy's buffers are typed from Python 3.12 on
    while rest and (count := disk.preadv(fd, [rest], offset)):
        rest, offset = rest[count:], offset + count
    return offset - begin


def write_fully(fd: int, data: Buffer, *, offset: int, disk: Files = OS) -> int:
    """Write all of data from offset on, in several calls; returns the end. Raises OSError."""
    rest = memoryview(data).cast("B")  # type: ignore[arg-type]  # numpy's buffers are typed from Python 3.12 on
    while rest:
        count = disk.pwritev(fd, [rest], offset)
        if count == 0:
            raise OSError(errno.EIO, "pwritev wrote nothing")
        rest, offset = rest[count:], offset + count
    return offset


def replace_file(path: Path, parts: Iterable[Buffer], *, disk: Files = OS) -> int:
    """Write parts to a temporary name, sync, rename to path, sync the directory. Returns the bytes.

    Raises OSError; path is then the old file, or the new one whole.
    """
    temporary = path.with_name(path.name + ".tmp")
    fd, length = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 0
    try:
        for part in parts:
            length = write_fully(fd, part, offset=length, disk=disk)
        failpoint("file.replace.before_sync")
        disk.sync_data(fd)
    except OSError:
        disk.unlink(temporary)
        raise
    finally:
        disk.close(fd)
    failpoint("file.replace.before_rename")
    disk.rename(temporary, path)
    failpoint("file.replace.before_directory_sync")
    disk.sync_directory(path.parent)
    return length
