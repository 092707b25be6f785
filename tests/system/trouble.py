"""A daemon on a disk that a shim makes fail: its configuration, its store's files, and its
guarantees.

Purpose: code that `test_errno`, `test_hung` and `test_stores` share. Non-purpose: the faults
themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from tests.system.blocks import BlockClient, connected
from tests.system.raw import BLOCK_BYTES
from tests.system.shim.iofault import IoFaults
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.core.formats.model import HANDLE
from tierd.testing import chain

CONFIG = """\
[server]
shutdown_deadline = "3 s"
{server}

[[host]]
capacity = "8 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "16 MiB"
segment = "1 MiB"
direct = "{direct}"
hang_limit = "1 s"
queue_depth = 4
"""
BACKENDS = ("auto", "off")
"""Values of nvme.direct: O_DIRECT if the file system supports it, and the page cache."""
STORE = "*/state/nvme-0/*"
RESUME_S = 5.0
"""Writes resume within this on a disk that works again. Asserted with tenfold slack."""


def config(*, direct: str = "auto", server: str = "") -> str:
    """CONFIG with {root} left for the daemon to fill in."""
    return CONFIG.replace("{direct}", direct).replace("{server}", server)


@dataclass
class Troubled:
    """A live daemon and a client. durable: seeds of chains to durable blocks. block_bytes: the longest."""

    daemon: Daemon
    io: IoFaults
    client: BlockClient
    durable: dict[int, int] = field(default_factory=dict)
    next_seed: int = 1000
    block_bytes: int = BLOCK_BYTES

    def put(self, count: int = 1, *, durable: bool = True, length: int | np.ndarray = BLOCK_BYTES) -> int:
        """Puts a new chain. Returns its leading blocks acknowledged. length: of all, or of each."""
        self.next_seed += 1
        stored = self.client.put(self.namespace, chain(self.next_seed, count), length=length, durable=durable)
        if durable and stored:
            self.durable[self.next_seed] = stored
        return stored

    @property
    def namespace(self) -> int:
        return self.client.open_namespace(block_bytes=self.block_bytes)

    def forget_memory(self) -> None:
        """Evicts host memory, so that later gets read the store."""
        self.client.call(self.client.admin.Evict, apb.EvictRequest(tier="host.0"))

    def await_writes(self) -> float:
        """Puts until a durable put is acknowledged. Returns the seconds that it took."""
        begun = time.monotonic()
        while self.put() != 1:
            assert time.monotonic() - begun < 10 * RESUME_S, (
                f"no durable put after {10 * RESUME_S:g} s:\n{self.daemon.log[-3000:]}"
            )
            time.sleep(0.02)
        return time.monotonic() - begun

    def lost(self, seeds: list[int] | None = None) -> list[int]:
        """Seeds of chains whose acknowledged blocks are not all there now. Raises WrongBytes."""
        namespace = self.namespace
        wanted = self.durable if seeds is None else {seed: self.durable[seed] for seed in seeds}
        return [s for s, count in wanted.items() if self.client.read(namespace, chain(s, count)) < count]

    def get_within(self, hashes: np.ndarray, timeout_s: float) -> tuple[int, float]:
        """Blocks that a get with this deadline returns (0 if it times out), and its seconds."""
        group = pb.Group(namespace=self.namespace, hashes=hashes.tobytes())
        request = pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST)
        begun = time.monotonic()
        try:
            reply = self.client.cache.Acquire(request, metadata=self.client.metadata, timeout=timeout_s)
        except grpc.RpcError:
            return 0, time.monotonic() - begun
        took_s = time.monotonic() - begun
        if reply.lease:
            self.client.call(self.client.cache.Release, pb.ReleaseRequest(leases=[reply.lease]))
        return sum(len(np.frombuffer(g.handles, dtype=HANDLE)) for g in reply.groups), took_s


@contextmanager
def troubled(directory: Path, text: str) -> Iterator[Troubled]:
    """A daemon with the shim loaded, and a client. The shim is disarmed before the daemon stops."""
    with Daemon(text, env=(io := IoFaults(directory)).env) as daemon:
        try:
            assert io.loaded, "the shim was not loaded"
            with connected(daemon) as client:
                yield Troubled(daemon, io, client)
        finally:
            io.disarm()
