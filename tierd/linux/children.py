"""Child processes of a daemon that end with it: the GPU process.

A child ends with its parent, whatever its threads wait for. It ignores signals that a terminal or a
supervisor sends to all processes of a daemon: the daemon handles them. Other processes of the user
cannot reach its memory or descriptors through /proc. Its Python has the daemon's module path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def start(module: str, *arguments: str, kind: socket.SocketKind) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs `python -m module FD arguments` in this thread. Raises OSError. The kernel ends the
    child with the thread that started it. The daemon's end of the pair does not block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        with theirs:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    except OSError:
        ours.close()
        raise
    ours.setblocking(False)
    return child, ours


def begun_by_daemon(descriptor: int) -> socket.socket:
    """The first call in such a process; returns its end of the pair."""
    end_with_parent()
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    peer = socket.socket(fileno=descriptor)
    peer.set_inheritable(False)
    return peer


def end_with_parent() -> None:
    """The kernel ends this process with the thread that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
