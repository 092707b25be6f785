"""The store: blocks written and read by the daemon, verified, against raw O_DIRECT I/O of as many pieces at the best depth on the same disk.

Blocks come to a store in three ways, and each has its row. `nvme_write`: demotion, which verifies what it writes and does not sync, against raw writes that do not
either; by a daemon on a replay clock, which demotes only in a Quiesce, and then all that is in memory. `nvme_flush`: a flush, which syncs, against raw writes and one
fdatasync; these are slower where the machine below keeps writes in its memory until somebody syncs. `nvme_durable`: puts that ask for it. A batch is put into
memory, then written. `nvme_write_first`: demotion to slots that nobody has written yet, as they are for as long as a daemon has not written its store over with zeros
(`zero_ahead`); after that the first write is as any other.

Reads are of the batches that a store holds one after another, by a get of views, so that each has been displaced from memory when its turn comes again. Batch by batch the
raw file is written and read beside the store, and before each work both are synced.
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
"""A daemon that writes what it is asked to write."""
AT_REST = {"clock": "replay", "high": 0.0002, "low": 0.0001}
"""A daemon that demotes all that is in memory, in a Quiesce."""
HOST_BATCHES, NVME_BATCHES, WARM = 2, 10, 2
"""What the tiers hold at most, headers and what does not fill a segment included. Segments are as long as they are by default."""
READ_BATCHES = HOST_BATCHES + 2
"""So many are read in turns: memory does not hold them all."""
SHAPES = {"2MiB": (128, 2 * MIB), "128KiB": (1024, 128 * KIB)}
"""Of a batch, which is so large that its begin and its end, some milliseconds, do not count for more than they do in a long transfer."""
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
        """Whatever is in memory is in the store too, synced."""
        assert self._operator.ask(pb.FlushRequest(deadline_s=30.0)).left == 0

    def demote(self, number: int) -> Callable[[], object]:
        """All that is in memory goes to the store, as it does in the background. Raises RuntimeError where it did not the last time."""
        self.check_demoted()
        self.put(number, count=self.count)

        def work() -> None:
            moved = self._operator.ask(pb.QuiesceRequest(deadline_s=30.0)).transfers
            assert moved == self.count, f"{moved} blocks of {self.count} were demoted"
            self._demoted_bytes += self.size

        return work

    def check_demoted(self) -> None:
        """The store was given all that was demoted. Raises RuntimeError."""
        written = self._operator.ask(pb.TiersRequest()).tiers[1].bytes_written
        if written < self._demoted_bytes:
            raise RuntimeError(f"nvme: {written} bytes were written of {self._demoted_bytes} that were demoted")

    def flush(self, number: int) -> Callable[[], object]:
        """All that is in memory goes to the store, synced."""
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
        """A get of what only the store holds."""
        hashes = chain(number, self.count)
        if (tiers := set(self._client.lookup(self._space, hashes).tier_of[0].flat)) != {1}:
            raise RuntimeError(f"nvme: batch {number} lies in tiers {tiers} and not in the store alone")

        def work() -> None:
            assert self._client.get(self._space, hashes).blocks == self.count

        return work


class Beside:
    """A daemon's store and a raw file on the same disk, batch by batch. costs: of each work, run by run."""

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
        """Each of these works once, in order, and none finds what the one before has left unsynced. under: begins the names that they are kept by."""
        for name in names:
            self._bench.settle()
            self._raw.sync()
            self.costs[under + name].append(cost_of(self._works[name](number), pid=self._pid))

    def first(self, batches: int) -> None:
        """Demotion to slots that nobody has written yet: nothing leaves the store meanwhile."""
        for number in range(batches):
            self.run(number, ("raw_write", "demote"), under="first_")

    def again(self, runs: int, *, first: int) -> None:
        """Demotion into slots that were written before."""
        for number in range(WARM + runs):
            self.run(first + number, ("raw_write", "demote"), under="" if number >= WARM else "warm_")
        self._bench.check_demoted()

    def asked(self, runs: int) -> None:
        """Flushes and durable writes, then reads of what the flushes brought; at last durable puts, which displace it."""
        full = NVME_BATCHES  # so many and each slot was written before
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
    """`nvme_read_...`, `nvme_write_...`, `nvme_write_first_...` and `nvme_flush_...` of 2 MiB and 128 KiB; `nvme_durable_2MiB_x16`, `nvme_durable_put_2MiB_x16`; GB/s."""
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
    """What demotion writes."""
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
    """What is read and written because somebody asks for it."""
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
