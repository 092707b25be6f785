"""The process at the other end of a socket: one that has ended or is invisible is refused."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tierd.errors import NotPermitted
from tierd.server.session import peers

CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])"


class Asked:
    """A connection with chosen kernel answers: the credentials, and a pidfd or an error."""

    def __init__(self, *, pid: int = 0, code: int = 0) -> None:
        self.pid, self.code = pid or os.getpid(), code
        self.pidfds: list[int] = []

    def getsockopt(self, _level: int, option: int, _size: int = 0) -> object:
        if option == socket.SO_PEERCRED:
            return struct.pack("3i", max(self.pid, 0), os.getuid(), os.getgid())
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        self.pidfds.append(os.pidfd_open(os.getpid()))
        return self.pidfds[-1]


def test_a_client_that_has_ended(tmp_path: Path) -> None:
    """A process that connects and ends before the check is refused, and no descriptor stays open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        subprocess.run([sys.executable, "-c", CONNECT, str(tmp_path / "s")], check=True, timeout=60)
        accepted, _ = listener.accept()
        before = len(os.listdir("/proc/self/fd"))
        with accepted, pytest.raises(NotPermitted):
            peers.peer_of(accepted)
        assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_process_of_another_namespace() -> None:
    """A client without a pid here is refused with the advice to share the pid namespace."""
    with pytest.raises(NotPermitted, match="pid namespace"):
        peers.peer_of(Asked(pid=-1))  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [errno.ESRCH, errno.EINVAL, errno.ENODATA])
def test_what_the_kernel_says_of_a_client_that_has_ended(code: int) -> None:
    """Any kernel error for an ended process is a refusal that says so."""
    with pytest.raises(NotPermitted, match="has ended"):
        peers.peer_of(Asked(code=code))  # type: ignore[arg-type]


def test_trouble_that_is_none_of_the_clients() -> None:
    """A daemon without free descriptors does not blame the client."""
    with pytest.raises(OSError, match="Too many open files"):
        peers.peer_of(Asked(code=errno.EMFILE))  # type: ignore[arg-type]


def test_a_process_that_is_hidden() -> None:
    """A client with an unreadable start time is refused with the remedy, and its pidfd is closed."""
    asked = Asked(pid=2**22 + 1)
    with pytest.raises(NotPermitted, match="hidepid"):
        peers.peer_of(asked)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(asked.pidfds[0])
