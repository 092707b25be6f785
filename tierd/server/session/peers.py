"""The process at the other end of a unix socket, and a descriptor that becomes readable at its end.

A pidfd returned here belongs to the very process that connected, not to a later one with its
number. If there is no such proof, the client is refused.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

from tierd.errors import NotPermitted, Unsupported
from tierd.linux import trust
from tierd.linux.processes import find_start_time, has_ended
from tierd.server.session.identity import Peer

SO_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)
"""Linux 6.5 and newer; Python has no name for it yet."""

_ENDED = (errno.EINVAL, errno.ESRCH, errno.ENODATA)
"""The errors of SO_PEERPIDFD for a process that is gone."""


def peer_of(connection: socket.socket) -> tuple[Peer, int]:
    """The connected process, and its pidfd for the caller to close. Raises NotPermitted,
    Unsupported."""
    pid, uid = trust.peer_of(connection)
    if pid <= 0:
        raise NotPermitted(
            "session: the client's process is in a pid namespace that the daemon cannot see; run the daemon in the host's"
            " (hostPID, --pid=host), or both in one"
        )
    pidfd = _peer_pidfd(connection)
    if pidfd is None:
        return _opened(pid, uid)
    try:
        return Peer(pid, uid, _start_time(pid)), pidfd
    except BaseException:
        os.close(pidfd)
        raise


def _peer_pidfd(connection: socket.socket) -> int | None:
    """None if the kernel has no such option. Raises NotPermitted if the peer is gone already."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return None
        if error.errno in _ENDED:
            raise NotPermitted("session: the client's process has ended; connect again") from error
        raise


def _opened(pid: int, uid: int) -> tuple[Peer, int]:
    """Opens by number, on kernels before 6.5. The data before and after the open must agree."""
    before = _start_time(pid)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise Unsupported(
            f"session: no pidfd of process {pid} ({error.strerror}), so its end could not be noticed; use Linux 5.15 or newer"
            " and allow pidfd_open in the seccomp profile"
        ) from error
    if find_start_time(pid) == before and _uid_of(pid) == uid and not has_ended(pidfd):
        return Peer(pid, uid, before), pidfd
    os.close(pidfd)
    raise NotPermitted(f"session: process {pid} is not the one that connected; connect again")


def _start_time(pid: int) -> int:
    found = find_start_time(pid)
    if found is None:
        raise NotPermitted(
            f"session: the start time of process {pid} cannot be read; mount /proc without hidepid, or connect again if it ended"
        )
    return found


def _uid_of(pid: int) -> int | None:
    """The effective uid, as in SO_PEERCRED."""
    try:
        match = re.search(r"^Uid:\s+\d+\s+(\d+)", Path(f"/proc/{pid}/status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
