"""Making files durable: the only place of the stored tiers that syncs.

Purpose: data sync, directory sync, whole-file replacement. Non-purpose: what the files mean. Invariants: a sync is never tried
twice, since the kernel may have dropped the pages that it could not write and would then report success; a file under
its final name is whole and durable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tierd.failpoint import failpoint
from tierd.tiers.checksum import Buffer


def sync_data(fd: int) -> None:
    """fdatasync. Raises OSError; the file behind fd must then be abandoned."""
    os.fdatasync(fd)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_fully(fd: int, data: Buffer) -> None:
    """Writes all of data at the descriptor's position, however many calls it takes. Raises OSError."""
    rest = memoryview(data).cast("B")  # type: ignore[arg-type]  # numpy's buffers are typed from Python 3.12 on
    while rest:
        rest = rest[os.write(fd, rest) :]


def replace_file(path: Path, parts: Iterable[Buffer]) -> int:
    """Writes parts to a temporary name, syncs, renames to path, syncs the directory. Gives the length in bytes.

    Raises OSError; path is then what it was before, or the new file whole.
    """
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for part in parts:
            write_fully(fd, part)
        failpoint("file.replace.before_sync")
        length = os.fstat(fd).st_size
        sync_data(fd)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    failpoint("file.replace.before_rename")
    os.rename(temporary, path)
    failpoint("file.replace.before_directory_sync")
    sync_directory(path.parent)
    return length
