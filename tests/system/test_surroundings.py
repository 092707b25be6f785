"""What happens around the daemon: blocks that go meanwhile, disks and memory that are full or taken away, files that are removed."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tests.system.blocks import SOON_S, connected
from tests.system.sdk import SMALL
from tests.system.tcp import free_port, remote_config
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import Client
from tierd.core.model import BlockStatus
from tierd.testing import chain, content_of

PUTS = 40
STORED = """\
[[host]]
capacity = "16 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "16 MiB"
segment = "1 MiB"
"""


@pytest.mark.parametrize("is_remote", [False, True], ids=["mapped", "tcp"])
def test_durable_put_beside_eviction(tmp_path: Path, *, is_remote: bool) -> None:
    """A durable put of blocks that exist, and go while it is made, writes them again; none is FAILED."""
    port = free_port()
    config, begun = remote_config(tmp_path, port, host=STORED), threading.Semaphore(0)
    with Daemon(config) as daemon, connected(daemon) as operator:
        target = f"127.0.0.1:{port}" if is_remote else daemon.target

        def evict() -> None:
            for i in range(PUTS):
                begun.acquire(timeout=SOON_S)
                threading.Event().wait(0.002 * (i % 10))  # another moment of the put each time
                operator.call(operator.admin.Evict, apb.EvictRequest())

        beside = threading.Thread(target=evict)
        with Client(target, credential_file=str(tmp_path / "secret") if is_remote else "") as client:
            namespace, hashes = client.open_namespace(SMALL), chain(1, 64)
            blocks = [content_of(name, SMALL.block_bytes) for name in hashes]
            results = list[np.ndarray]()
            beside.start()
            try:
                for _ in range(PUTS):
                    begun.release()
                    results.append(client.put(namespace, hashes, blocks, durable=True).statuses)
            finally:
                begun.release(PUTS)
                beside.join()
        statuses = np.concatenate(results)
        assert not (statuses == BlockStatus.FAILED).sum()
        assert "blocks not made durable" in daemon.log, "no block went meanwhile: this test shows nothing"
