"""`python -m tierd.gpu FD ORDINAL`: the GPU process, started only by `tierd.gpu.process`.

It ends with the daemon, and with its socket. The invariants of linux/children.py hold.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from tierd.gpu.child import Child
from tierd.linux import children


def main() -> None:
    """Serve until the socket ends."""
    descriptor, ordinal = map(int, sys.argv[1:])
    peer = children.begun_by_daemon(descriptor)
    with suppress(ConnectionResetError):  # a killed daemon may leave answers unread
        Child(peer, ordinal).serve()
    # Not sys.exit: the driver's cleanup would wait for a GPU that hangs.
    os._exit(0)


main()
