"""One owner per directory: an exclusive lock held for life, and directories that only the owner can
change.

The lock ends with the process, however that ends (flock on a descriptor that no other program
inherits). Only its holder removes a lock file. A lock taken on a file that was removed meanwhile
does not count.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from tierd.errors import AlreadyOwned, ConfigError
from tierd.linux.trust import find_stranger

_ATTEMPTS = 5
_PAUSE_S = 0.01  # `find_owner` may hold the lock for a moment


class OwnerLock:
    """An exclusive lock on a path, held until `release` or the end of the process. Made by `take_lock`."""

    def __init__(self, path: Path, *, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd

    def release(self, *, remove: bool = False) -> None:
        """Release; a second call does nothing. With remove, the lock file is unlinked first."""
        if self._fd is None:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None


def take_lock(path: Path, *, what: str) -> OwnerLock:
    """Lock path, a file made if missing, in an existing directory. what: the locked thing, for the
    message.

    Raises AlreadyOwned with the holder's process id; ConfigError if another user owns a step of the
    path; OSError if the file cannot be opened.
    """
    check_way(path.parent)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _lock(fd, fcntl.LOCK_EX) and _is_same_file(fd, path):
            os.truncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return OwnerLock(path, fd=fd)
        os.close(fd)
    holder = _read_pid(path)
    who = f"process {holder}" if holder else "another process"
    raise AlreadyOwned(
        f"{what}: {path} is held by {who}, and one owner is the limit; stop that process or use another directory"
    )


def find_owner(path: Path) -> int | None:
    """Process id of the lock's holder (0 if unknown), or None if it is free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return None if _lock(fd, fcntl.LOCK_SH) else _read_pid(path)
    finally:
        os.close(fd)


def private_directory(path: Path) -> Path:
    """The directory, made 0700 if missing, with its missing parents.

    Raises ConfigError if another user owns it, or others may write to it or swap it, since its
    contents are trusted.
    """
    check_way(path)
    if not path.parent.exists():
        private_directory(path.parent)
    parent = path.parent.stat()
    is_shared = bool(parent.st_mode & 0o022) and not parent.st_mode & stat.S_ISVTX
    if is_shared or parent.st_uid not in (0, os.geteuid()):
        raise ConfigError(_refusal(path.parent, parent))
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(_refusal(path, found))
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def check_way(path: Path) -> None:
    """Raise ConfigError if another user owns a step of the path, for example a link."""
    if stranger := find_stranger(path):
        raise ConfigError(
            f"{path}: another user owns a part of the path, {stranger}; remove it, or use another directory"
        )


def _refusal(path: Path, found: os.stat_result) -> str:
    kind = "directory" if stat.S_ISDIR(found.st_mode) else "file or link"
    return (
        f"{path}: a {kind} of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; it must be a directory "
        f"that only uid {os.geteuid()} can change; remove it, or chmod and chown it, or use another directory"
    )


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _read_pid(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except (OSError, ValueError):
        return 0
