"""A client that is killed while the daemon loads its lease by layer."""

from __future__ import annotations

import os
import signal
import sys

from tests.system.test_by_layer import NAMES, SPEC
from tierd.client import Client, Group

if __name__ == "__main__":
    client = Client(sys.argv[1])
    lease = client.acquire_by_layer(Group(client.open_namespace(SPEC), NAMES))
    assert lease
    os.kill(os.getpid(), signal.SIGKILL)
