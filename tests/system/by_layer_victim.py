"""A client that is killed while the daemon loads its lease by layer."""

from __future__ import annotations

import os
import signal
import sys

from tests.system.test_by_layer import by_layer
from tierd.client import Client

if __name__ == "__main__":
    client = Client(sys.argv[1])
    lease = by_layer(client)
    assert lease
    os.kill(os.getpid(), signal.SIGKILL)
