"""Connects to a daemon's sockets, after checking who owns them.

The directory must be one that no other user could create or write to. The listener must run as its
owner, root or this user. These checks come before the first message.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tierd.errors import NotPermitted, Overloaded, Unavailable
from tierd.linux.trust import SHARED, find_stranger, peer_of


def connect(connection: socket.socket, path: str) -> None:
    """Connects to a socket of a daemon's directory. Raises NotPermitted, Unavailable, Overloaded,
    TimeoutError."""
    owner = _checked_owner(os.path.dirname(path))
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise Unavailable(
            f"no daemon at {path} ({error.strerror}); start `tierd serve`, or set TIERD_TARGET"
        ) from error
    except PermissionError as error:
        raise NotPermitted(
            f"daemon at {path}: this user may not connect; join the daemon's group, or run a daemon of your own"
        ) from error
    except BlockingIOError as error:
        raise Overloaded(f"daemon at {path}: its queue of new connections is full; try again") from error
    _, uid = peer_of(connection)
    if uid not in (0, os.geteuid(), owner):
        connection.close()  # without a farewell
        raise NotPermitted(
            f"daemon at {path}: uid {uid} listens there, but uid {owner} owns the directory; end that process, or set "
            "TIERD_TARGET to your daemon's directory"
        )


def check(path: str) -> None:
    """Checks that a daemon's other socket can be trusted too. Raises what `connect` raises."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        connect(probe, path)


def _checked_owner(directory: str) -> int:
    """Uid of the directory's owner; -1: there is no directory. Raises NotPermitted."""
    remedy = "remove it, or set TIERD_TARGET to a daemon's directory on a path that only its user and root can change"
    if stranger := find_stranger(directory):
        raise NotPermitted(f"daemon at {directory}: another user owns a part of its path, {stranger}; {remedy}")
    try:
        found = Path(directory).stat()
    except OSError:
        return -1
    if found.st_mode & SHARED:
        mode = f"{found.st_mode & 0o7777:04o}"
        raise NotPermitted(
            f"daemon at {directory}: the directory's mode is {mode}, so other users can create sockets there; {remedy}"
        )
    return found.st_uid
