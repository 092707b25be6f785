"""Detects files that other users placed on a path, in /tmp say, and the peer of a unix socket.

The callers decide what to do. Nothing is created; standard library only.
"""

from __future__ import annotations

import os
import socket
import stat
import struct

LINKS_LIMIT = 40
SHARED = 0o022
"""Of a directory's mode: others may write to it."""
_CREDENTIALS = struct.Struct("iII")


def find_stranger(path: str | os.PathLike[str]) -> str:
    """The first step of a path that a stranger placed, with its owner; "" if none or missing.

    Strangers are all users but root, this user and the owner of "/". A step of theirs counts in a
    directory that others may write to; a link of theirs counts everywhere. The owner of a directory
    that root or this user made elsewhere is no stranger below it.
    """
    base = os.lstat("/")
    ours = {0, os.geteuid(), base.st_uid}
    trusted, at, found, links = set(ours), "/", base, 0
    steps = os.path.join(os.getcwd(), path).split("/")[::-1]
    while steps:
        step = steps.pop()
        if step in ("", ".", ".."):
            at = os.path.dirname(at) if step == ".." else at
            found = os.lstat(at)
            continue
        is_shared, here = bool(found.st_mode & SHARED), os.path.join(at, step)
        try:
            found = os.lstat(here)
        except OSError:
            return ""
        is_link = stat.S_ISLNK(found.st_mode)
        links += is_link
        if ((is_shared or is_link) and found.st_uid not in (ours if is_link else trusted)) or links > LINKS_LIMIT:
            return f"{here}, a {'link' if is_link else 'file or directory'} of uid {found.st_uid}"
        if is_link:
            target = os.readlink(here)
            steps += target.split("/")[::-1]
            at = "/" if target.startswith("/") else at
            found = os.lstat(at)
        else:
            trusted.add(found.st_uid)
            at = here
    return ""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and uid of the peer of a unix socket, or of its listener."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid, uid
