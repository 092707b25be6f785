"""Whole files: read, written, and replaced so that they are durable.

Purpose: `read_file`, `read_into`, `write_fully`, `replace_file`. Non-purpose: what the files mean; single operations (`files`). Invariants: a sync is never
tried twice; a file under its final name is whole and durable.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from tierd.failpoint import failpoint
from tierd.tiers.checksum import Buffer
from tierd.tiers.files import OS, Files


def read_file(path: Path, *, disk: Files = OS) -> bytearray:
    """All of a file, as much of it as its length says. Raises OSError."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        data = bytearray(disk.size(path))
        count = read_into(fd, data, offset=0, disk=disk)
        return data if count == len(data) else data[:count]
    finally:
        disk.close(fd)


def read_into(fd: int, buffer: Buffer, *, offset: int, disk: Files = OS) -> int:
    """Fills the buffer with what lies from offset on, however many calls it takes; gives how many bytes that were. Raises OSError."""
    rest, begin = memoryview(buffer).cast("B"), offset  # type: ignore[arg-type]  # numpy's buffers are typed from Python 3.12 on
    while rest and (count := disk.preadv(fd, [rest], offset)):
        rest, offset = rest[count:], offset + count
    return offset - begin


def write_fully(fd: int, data: Buffer, *, offset: int, disk: Files = OS) -> int:
    """Writes all of data from offset on, however many calls it takes; gives the offset behind it. Raises OSError."""
    rest = memoryview(data).cast("B")  # type: ignore[arg-type]  # numpy's buffers are typed from Python 3.12 on
    while rest:
        count = disk.pwritev(fd, [rest], offset)
        if count == 0:
            raise OSError(errno.EIO, "pwritev wrote nothing")
        rest, offset = rest[count:], offset + count
    return offset


def replace_file(path: Path, parts: Iterable[Buffer], *, disk: Files = OS) -> int:
    """Writes parts to a temporary name, syncs, renames to path, syncs the directory. Gives the length in bytes.

    Raises OSError; path is then what it was before, or the new file whole.
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
