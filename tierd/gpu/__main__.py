"""`python -m tierd.gpu FD ORDINAL`: the GPU process, started by `tierd.gpu.process` and by nobody else.

Purpose: to end with the daemon. Non-purpose: what it does until then. Invariants: it ends with its socket and with its parent, whatever its threads wait for; signals that
a terminal or a supervisor sends to all processes of a daemon are the daemon's to answer; other processes of the user cannot reach its memory or its
descriptors through /proc.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress

from tierd.gpu.child import Child

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def main() -> None:
    """Serves until the socket ends."""
    descriptor, ordinal = map(int, sys.argv[1:])
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    peer = socket.socket(fileno=descriptor)
    peer.set_inheritable(False)
    with suppress(ConnectionResetError):  # a daemon that was killed may leave answers unread
        Child(peer, ordinal).serve()
    # Not sys.exit: the driver's own ending would wait for a GPU that hangs.
    os._exit(0)


main()
