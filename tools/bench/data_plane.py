"""Puts and gets of batches by a local client, against a memory copy of as many bytes.

The tier is full before the promised rows count, so a put displaces the coldest blocks. Fresh memory
costs several times as much, and a first get meets more cold data: both have separate rows. The
policy is LRU, so that the contents are known. No cache holds the copied bytes. The limit is the C
library's copy, as in others' publications. A get's is into one target, a put's into cold memory.
The row `copy_streamed` is tierd's own copy, perhaps faster. The rest of a ratio is tierd's
overhead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.client.blocks import copying
from tierd.client.blocks.buffers import address_of
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, KIB, MIB, Cold, Cost, Effort, Sums, Work, cpus, interleaved, rates
from tools.bench.rows import Row, row_of

CONFIG = """\
nvme = []
[[host]]
capacity = "{capacity} MiB"
segment = "{segment} MiB"
eviction = "lru"
"""
WARM = 2
SHAPES = {"2MiB_x16": (16, 2 * MIB), "128KiB_x64": (64, 128 * KIB)}
VERBS = {
    "put": "in place, displacing the coldest",
    "get_copy": "into the caller's buffers",
    "copy_streamed": "copied and summed as a put and a get do, in one process, nothing else",
    "put_fresh": "put into memory that nobody has touched yet",
    "put_sealed": "put into a tier with sealed puts: written to staging pages, copied and hashed by the daemon",
    "get_first": "first get of a batch",
}


class Bench:
    """A client that moves batches of this many blocks; batch number n is a separate sequence."""

    def __init__(self, client: Client, cold: Cold, *, count: int, block_bytes: int) -> None:
        self._client, self._cold, self._count, self._block_bytes = client, cold, count, block_bytes
        spec = NamespaceSpec(model=f"bench-{block_bytes}", tokens_per_block=16, block_bytes=block_bytes)
        self._space: OpenedNamespace = client.open_namespace(spec)
        self._target = np.ones((count, block_bytes), dtype=np.uint8)
        self._source, self._sums = self._target, Sums()
        self.size = count * block_bytes

    def copy(self, number: int) -> Callable[[], object]:
        """The limit of a get."""
        source, target = self._cold.blocks(self._count, self._block_bytes), self._target
        return lambda: np.copyto(target, source)

    def copy_apart(self, number: int) -> Callable[[], object]:
        """The limit of a put: the target is as cold as the source."""
        source, target = (self._cold.blocks(self._count, self._block_bytes) for _ in range(2))
        return lambda: np.copyto(target, source)

    def copy_streamed(self, number: int) -> Callable[[], object]:
        """Copies and sums as a put and a get do: past the processor's caches, if it can."""
        source, target = self._cold.blocks(self._count, self._block_bytes), self._target
        at, to = ([*map(address_of, rows)] for rows in (source, target))
        blocks = copying.blocks_of(at, to, [self._block_bytes] * self._count, 0)
        return lambda: copying.sum_and_copy(blocks)

    def put(self, number: int, *, wait: bool = True) -> Callable[[], object]:
        """In place."""
        self._source = self._cold.blocks(self._count, self._block_bytes)
        hashes, blocks = chain(number, self._count), list(self._source)

        def work() -> None:
            assert self._client.put(self._space, hashes, blocks, wait=wait).stored == self._count

        return work

    def get(self, number: int) -> Callable[[], object]:
        """Into the caller's buffers."""
        hashes, out = chain(number, self._count), list(self._target)

        def work() -> None:
            assert self._client.get(self._space, hashes, out=out).blocks == self._count

        return work

    def note(self, number: int) -> None:
        """Sums the last put's blocks. It is separate from `put`, whose source no cache may hold."""
        self._sums.note(number, self._source)

    def verify(self, number: int) -> None:
        """Raises RuntimeError unless the last get returned the bytes noted under its number."""
        self._sums.check(number, self._target)

    def check(self, number: int) -> None:
        """Puts a batch and gets it. Raises RuntimeError if other bytes come back."""
        self.put(number)()
        self.note(number)
        self.get(number)()
        self.verify(number)


def rows(effort: Effort = FULL) -> list[Row]:
    """`put_2MiB_x16` and `get_copy_2MiB_x16`, the same of 128 KiB x 64, and the first times, GB/s;
    and `put_sealed_2MiB_x16`."""
    cold = Cold(effort.pick(384 * MIB, 8 * MIB))
    out: list[Row] = []
    for name in SHAPES:
        with _bench(name, cold, effort) as (bench, pid):
            costs = _costs(bench, pid, batches=effort.pick(768, 4) * MIB // bench.size, effort=effort)
            bench.check(1 << 20)
        out += [_row_of(verb, name, costs, bench.size / 1e9) for verb in VERBS if verb in costs]
    name = next(iter(SHAPES))
    with _bench(name, cold, effort, sealed=True) as (bench, pid):
        batches = effort.pick(768, 4) * MIB // bench.size
        works: dict[str, Work] = {"copy_apart": bench.copy_apart, "put_sealed": bench.put}
        interleaved(works, runs=batches - WARM, warm=WARM, pid=pid)
        works["put_sealed"] = lambda n: bench.put(batches + n)
        costs = interleaved(works, runs=effort.at_least(21), warm=WARM, pid=pid)
        bench.check(1 << 20)
    return [*out, _row_of("put_sealed", name, costs, bench.size / 1e9)]


@contextlib.contextmanager
def _bench(name: str, cold: Cold, effort: Effort, *, sealed: bool = False) -> Iterator[tuple[Bench, int]]:
    """A bench of a shape and its own daemon's pid."""
    count, block_bytes = SHAPES[name]
    config = CONFIG.format(capacity=effort.pick(768, 16), segment=effort.pick(32, 1)) + "sealed_puts = true\n" * sealed
    with Daemon(config) as daemon, Client(daemon.target) as client:
        yield Bench(client, cold, count=count, block_bytes=effort.pick(block_bytes, 4 * KIB)), daemon.pid


def _costs(bench: Bench, pid: int, *, batches: int, effort: Effort) -> dict[str, list[Cost]]:
    """Fills the tier; then each run puts a batch, gets one for the first time, and gets one again.
    No cache holds either."""
    fresh = interleaved({"copy": bench.copy_apart, "put": bench.put}, runs=batches - WARM, warm=WARM, pid=pid)
    lag = batches // 6
    known = range(batches - 2 * lag, batches - lag)
    for number in known:
        bench.get(number)()
    works: dict[str, Work] = {
        "copy": bench.copy,
        "copy_apart": bench.copy_apart,
        "copy_streamed": bench.copy_streamed,
        "put": lambda n: bench.put(batches + n),
        "get_first": lambda n: bench.get(batches - lag + n),
        "get_copy": lambda n: bench.get(known[n % lag]),
    }
    costs = interleaved(works, runs=effort.at_least(21), warm=WARM, pid=pid)
    return costs | {"put_fresh": fresh["put"], "copy_fresh": fresh["copy"]}


def _row_of(verb: str, name: str, costs: dict[str, list[Cost]], gigabytes: float) -> Row:
    limit = {"put": "copy_apart", "put_sealed": "copy_apart", "put_fresh": "copy_fresh"}.get(verb, "copy")
    limits = rates(costs[limit], gigabytes)
    values = rates(costs[verb], gigabytes)
    row = row_of(f"{verb}_{name}", values, unit="GB/s", limits=limits, meaning=f"{VERBS[verb]}, against memcpy")
    return row.with_cpu(cpus(costs[verb]), gigabytes=gigabytes)
