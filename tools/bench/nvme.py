"""The store: verified reads and writes of blocks by the daemon, against raw O_DIRECT on the same
disk.

The raw I/O has as many pieces, at the best depth. Blocks reach a store in three ways, each a row.
The row `nvme_write` is demotion, which verifies and does not sync, against raw writes without a
sync. Its daemon has a replay clock: it demotes only in a Quiesce, and then all of memory. The row
`nvme_flush` is a flush, which syncs, against raw writes and one fdatasync. Both are slower if the
machine below keeps writes in memory until a sync. The row `nvme_durable` is durable puts. A batch
is put into memory, then written. The row `nvme_write_first` is demotion to unwritten slots, as
before a daemon fills its store with zeros (`zero_ahead`). Later first writes are as fast as others.
Reads are gets of views of a store's batches in turn, so memory has displaced each by its next turn.
The raw file is written and read batch by batch beside the store. Both are synced before each work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import Connection, connect
from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, KIB, MIB, Cost, Effort, Work, cost_of, cpus, rates
from tools.bench.raw_disk import RawFile
from tools.bench.rows import Row, row_of

CONFIG = """\
[server]
clock = "{clock}"
[scrub]
period = "0 s"
[mover]
prefetch_on_lookup = false
[[host]]
capacity = "{host} MiB"
high_watermark = {high}
low_watermark = {low}
eviction = "lru"
[[nvme]]
path = "{{root}}/store"
capacity = "{nvme} MiB"
zero_ahead = false
admission = "all"
eviction = "lru"
"""
BY_ASKING = {"clock": "monotonic", "high": 1.0, "low": 0.99}
"""A daemon that writes only on request."""
AT_REST = {"clock": "replay", "high": 0.0002, "low": 0.0001}
"""A daemon that demotes all of memory, in a Quiesce."""
HOST_BATCHES, NVME_BATCHES, WARM = 2, 10, 2
"""The tiers' limits, with headers and unused rests of segments. Segments have their default length."""
READ_BATCHES = HOST_BATCHES + 2
"""Batches that are read in turn: memory does not hold them all."""
SHAPES = {"2MiB": (128, 2 * MIB), "128KiB": (1024, 128 * KIB)}
"""Of a batch. It is so large that its begin and end, some milliseconds, weigh little."""
DURABLE_COUNT = 16


class Bench:
    """A client that fills and empties the tiers of a daemon, batch by batch."""

    def __init__(self, client: Client, operator: Connection, *, count: int, block_bytes: int) -> None:
        self._client, self._operator, self.count, self.block_bytes = client, operator, count, block_bytes
        spec = NamespaceSpec(model=f"bench-{block_bytes}", tokens_per_block=16, block_bytes=block_bytes)
        self._space: OpenedNamespace = client.open_namespace(spec)
        self._noise = np.random.default_rng(0)
        self.size = count * block_bytes
        self._demoted_bytes = 0

    def put(self, number: int, *, count: int) -> None:
        """Into memory only."""
        assert self._client.put(self._space, chain(number, count), self._blocks(count)).stored == count

    def _blocks(self, count: int) -> list[NDArray[np.uint8]]:
        """Random bytes."""
        return list(self._noise.integers(0, 256, (count, self.block_bytes), dtype=np.uint8))

    def settle(self) -> None:
        """Flushes all of memory to the store."""
        assert self._operator.ask(pb.FlushRequest(deadline_s=30.0)).left == 0

    def demote(self, number: int) -> Callable[[], object]:
        """Demotes all of memory to the store. Raises RuntimeError if the last time failed."""
        self.check_demoted()
        self.put(number, count=self.count)

        def work() -> None:
            moved = self._operator.ask(pb.QuiesceRequest(deadline_s=30.0)).transfers
            assert moved == self.count, f"{moved} blocks of {self.count} were demoted"
            self._demoted_bytes += self.size

        return work

    def check_demoted(self) -> None:
        """Raises RuntimeError if the store has written less than was demoted."""
        written = self._operator.ask(pb.TiersRequest()).tiers[1].bytes_written
        if written < self._demoted_bytes:
            raise RuntimeError(f"nvme: {written} bytes were written of {self._demoted_bytes} that were demoted")

    def flush(self, number: int) -> Callable[[], object]:
        """Flushes all of memory to the store, synced."""
        self.put(number, count=self.count)
        return self.settle

    def durable(self, number: int) -> Callable[[], object]:
        """A put of blocks that are in memory already: it only makes them durable."""
        hashes = chain(number, DURABLE_COUNT)
        self.put(number, count=DURABLE_COUNT)
        same = [bytes(self.block_bytes)] * DURABLE_COUNT

        def work() -> None:
            assert self._client.put(self._space, hashes, same, durable=True).stored == DURABLE_COUNT

        return work

    def durable_put(self, number: int) -> Callable[[], object]:
        """A put of blocks that are nowhere yet, copied, hashed, published and made durable."""
        hashes = chain(number, DURABLE_COUNT)
        blocks = self._blocks(DURABLE_COUNT)

        def work() -> None:
            assert self._client.put(self._space, hashes, blocks, durable=True).stored == DURABLE_COUNT

        return work

    def read(self, number: int) -> Callable[[], object]:
        """A get of blocks that only the store holds."""
        hashes = chain(number, self.count)
        if (tiers := set(self._client.lookup(self._space, hashes).tier_of[0].flat)) != {1}:
            raise RuntimeError(f"nvme: batch {number} lies in tiers {tiers} and not in the store alone")

        def work() -> None:
            assert self._client.get(self._space, hashes).blocks == self.count

        return work


class Beside:
    """A daemon's store and a raw file on the same disk. costs: of each work, run by run."""

    def __init__(self, bench: Bench, raw: RawFile, pid: int) -> None:
        self._bench, self._raw, self._pid = bench, raw, pid
        self.costs: dict[str, list[Cost]] = defaultdict(list)
        self._works: dict[str, Work] = {
            "raw_write": lambda _: raw.write,
            "demote": bench.demote,
            "raw_flushed": lambda _: raw.write_synced,
            "flush": bench.flush,
            "raw_synced": lambda _: lambda: raw.write_synced(DURABLE_COUNT),
            "durable": lambda n: bench.durable(-2 * n - 1),
            "raw_synced_put": lambda _: lambda: raw.write_synced(DURABLE_COUNT),
            "durable_put": lambda n: bench.durable_put(-2 * n - 2),
            "raw_read": lambda _: raw.read,
            "read": bench.read,
        }

    def run(self, number: int, names: Iterable[str], *, under: str = "") -> None:
        """Runs these works once, in order; syncs both sides before each. under: names' prefix."""
        for name in names:
            self._bench.settle()
            self._raw.sync()
            self.costs[under + name].append(cost_of(self._works[name](number), pid=self._pid))

    def first(self, batches: int) -> None:
        """Demotion to slots that were never written: the store drops no block meanwhile."""
        for number in range(batches):
            self.run(number, ("raw_write", "demote"), under="first_")

    def again(self, runs: int, *, first: int) -> None:
        """Demotion into slots that were written before."""
        for number in range(WARM + runs):
            self.run(first + number, ("raw_write", "demote"), under="" if number >= WARM else "warm_")
        self._bench.check_demoted()

    def asked(self, runs: int) -> None:
        """Flushes, durable writes, reads of flushed batches, then durable puts that displace them."""
        full = NVME_BATCHES  # after this many each slot was written before
        count = full + max(runs, READ_BATCHES)
        for number in range(count):
            kept = "" if number >= full else "warm_"
            self.run(number, ("raw_flushed", "flush", "raw_synced", "durable"), under=kept)
        for number in range(READ_BATCHES + runs):  # the oldest first: memory holds the last ones
            kept = "" if number >= READ_BATCHES else "warm_"
            self.run(count - READ_BATCHES + number % READ_BATCHES, ("raw_read", "read"), under=kept)
        for number in range(WARM + runs):
            self.run(number, ("raw_synced_put", "durable_put"), under="" if number >= WARM else "warm_")

    def row(self, name: str, verb: str, limit: str, *, size: int, meaning: str) -> Row:
        """GB/s of a verb against those of its limit."""
        costs, gigabytes = self.costs[verb], size / 1e9
        limits = rates(self.costs[limit], gigabytes)
        row = row_of(name, rates(costs, gigabytes), unit="GB/s", limits=limits, meaning=meaning)
        return row.with_cpu(cpus(costs), gigabytes=gigabytes)


def rows(effort: Effort = FULL) -> list[Row]:
    """`nvme_read_...`, `nvme_write_...`, `nvme_write_first_...`, `nvme_flush_...` of both shapes;
    `nvme_durable_2MiB_x16`, `nvme_durable_put_2MiB_x16`; GB/s."""
    return [row for name in SHAPES for suite in (_demoted, _asked) for row in suite(name, effort)]


@contextmanager
def _beside(name: str, effort: Effort, how: Mapping[str, object]) -> Iterator[tuple[Beside, RawFile, Bench]]:
    """A daemon and a raw file beside it. how: BY_ASKING or AT_REST."""
    count, block_bytes = SHAPES[name]
    count, block_bytes = effort.pick(count, 16), effort.pick(block_bytes, 64 * KIB)
    batch = count * block_bytes // MIB
    config = CONFIG.format(host=HOST_BATCHES * batch, nvme=NVME_BATCHES * batch, **how)
    with (
        Daemon(config) as daemon,
        Client(daemon.target, timeout_s=60) as client,
        connect(daemon.target) as operator,
        RawFile(Path(daemon.root), length_bytes=4 * count * block_bytes, piece_bytes=block_bytes, count=count) as raw,
    ):
        raw.allocate()
        raw.calibrate()
        bench = Bench(client, operator, count=count, block_bytes=block_bytes)
        yield Beside(bench, raw, daemon.pid), raw, bench


def _demoted(name: str, effort: Effort) -> list[Row]:
    """Rows of demotion."""
    with _beside(name, effort, AT_REST) as (beside, raw, bench):
        beside.first(NVME_BATCHES - 2)
        beside.again(effort.runs, first=NVME_BATCHES - 2)
    limit = f"raw O_DIRECT writes at depth {raw.depths['write']}"
    meaning = f"demotion, verified, neither side synced, against {limit}"
    first = f"the same into slots that were never written, against {limit} into written ones"
    return [
        beside.row(f"nvme_write_{name}", "demote", "raw_write", size=bench.size, meaning=meaning),
        beside.row(f"nvme_write_first_{name}", "first_demote", "first_raw_write", size=bench.size, meaning=first),
    ]


def _asked(name: str, effort: Effort) -> list[Row]:
    """Rows of reads and writes on request."""
    with _beside(name, effort, BY_ASKING) as (beside, raw, bench):
        beside.asked(effort.runs)
    reads, writes = (f"raw O_DIRECT {verb}s at depth {raw.depths[verb]}" for verb in ("read", "write"))
    read, flush = f"verified, against {reads}", f"verified, synced, against {writes} with one fdatasync"
    out = [
        beside.row(f"nvme_read_{name}", "read", "raw_read", size=bench.size, meaning=read),
        beside.row(f"nvme_flush_{name}", "flush", "raw_flushed", size=bench.size, meaning=flush),
    ]
    if name == "2MiB":
        against = "against raw O_DIRECT writes with one fdatasync a batch"
        size = DURABLE_COUNT * bench.block_bytes
        meaning = f"batches of 16 that are in memory become durable, {against}"
        out.append(beside.row("nvme_durable_2MiB_x16", "durable", "raw_synced", size=size, meaning=meaning))
        meaning = f"durable puts of 16 that are nowhere, copied and hashed meanwhile, {against}"
        out.append(beside.row("nvme_durable_put_2MiB_x16", "durable_put", "raw_synced_put", size=size, meaning=meaning))
    return out
