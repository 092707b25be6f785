"""The cost of a recording: acquires a second of a real daemon with one, against those without.

Both take turns in short slices, in either order, so a drifting machine affects both alike. They
share the interpreter's lock and the second core with the writing thread. An idle machine shows the
least cost.
"""

from __future__ import annotations

import time

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import Connection, connect
from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, Effort
from tools.bench.rows import Row, row_of

BLOCK_BYTES, CHAINS = 4096, 16
CONFIG = """\
[[host]]
capacity = "128 MiB"
"""


class Bench:
    """A client that acquires and releases chains of this many blocks, all of them held."""

    def __init__(self, client: Client, operator: Connection, *, blocks: int, slice_s: float) -> None:
        self._client, self._operator, self._blocks, self._slice_s = client, operator, blocks, slice_s
        spec = NamespaceSpec(model=f"bench-{blocks}", tokens_per_block=16, block_bytes=BLOCK_BYTES)
        self._space: OpenedNamespace = client.open_namespace(spec)
        self._chains = [chain(number, blocks) for number in range(CHAINS)]
        for hashes in self._chains:
            client.put(self._space, hashes, [bytes(BLOCK_BYTES)] * blocks)

    def rate(self) -> float:
        """Acquires a second, each with its release, over one slice."""
        begun, done = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begun) < self._slice_s:
            with self._client.acquire(self._space, self._chains[done % CHAINS]) as lease:
                assert len(lease.handles) == self._blocks
            done += 1
        return done / elapsed

    def recorded_rate(self) -> float:
        """The same under a recording that loses nothing."""
        self._operator.ask(pb.RecordStartRequest(name=f"bench-{time.monotonic_ns()}"))
        rate = self.rate()
        told = self._operator.ask(pb.RecordStopRequest())
        assert (told.lost, told.reason) == (0, "stopped")
        return rate


def rows(effort: Effort = FULL) -> list[Row]:
    """`record_acquire_32` and `record_acquire_256`: acquires a second under recording, against
    those without."""
    found = []
    with Daemon(CONFIG) as daemon, Client(daemon.target) as client, connect(daemon.target) as operator:
        for blocks in (32, 256):
            bench = Bench(client, operator, blocks=blocks, slice_s=effort.pick(1.0, 0.02))
            bench.rate()  # the first ones touch fresh memory
            plain, recorded = list[float](), list[float]()
            sides = ((plain, bench.rate), (recorded, bench.recorded_rate))
            for number in range(effort.at_least(13)):
                for rates, measure in sides[:: -1 if number % 2 else 1]:
                    rates.append(measure())
            meaning = f"acquires of {blocks} blocks under recording, against those without"
            found.append(row_of(f"record_acquire_{blocks}", recorded, unit="1/s", limits=plain, meaning=meaning))
    return found
