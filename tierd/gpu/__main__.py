"""`python -m tierd.gpu FD ORDINAL`: the GPU process, started by `tierd.gpu.process` and by nobody else.

Purpose: to end with the daemon. Non-purpose: what it does until then. Invariants: those of linux/children.py; it ends with its socket.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from tierd.gpu.child import Child
from tierd.linux import children


def main() -> None:
    """Serves until the socket ends."""
    descriptor, ordinal = map(int, sys.argv[1:])
    peer = children.begun_by_daemon(descriptor)
    with suppress(ConnectionResetError):  # a daemon that was killed may leave answers unread
        Child(peer, ordinal).serve()
    # Not sys.exit: the driver's own ending would wait for a GPU that hangs.
    os._exit(0)


main()
