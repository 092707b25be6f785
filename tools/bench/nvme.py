"""The store: blocks written and read by the daemon, verified, against raw O_DIRECT I/O of as many pieces at the best depth on the same disk.

Writes first: a batch is put into memory, then written (a flush, or a put that asks for durability and finds it there already). Then reads: of the batches that
the store holds one after another, by a get of views, so that each has been displaced from memory when its turn comes again. At last puts that are copied and
made durable in one call. Batch by batch the raw file is written and read beside it, and the disk is synced before each work. A flush syncs what it writes:
`nvme_write` has it against raw writes that do not, `nvme_write_synced` against such as do, which are slower where the machine below keeps writes in its memory
until somebody syncs. `nvme_write_first`: slots that nobody has written yet, as they are for as long as a daemon has not written its store over with zeros
(`zero_ahead`); after that the first write is as any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
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
[scrub]
period = "0 s"
[mover]
prefetch_on_lookup = false
[[host]]
capacity = "{host} MiB"
segment = "{segment} MiB"
high_watermark = 1.0
low_watermark = 0.99
eviction = "lru"
[[nvme]]
path = "{{root}}/store"
capacity = "{nvme} MiB"
segment = "{segment} MiB"
zero_ahead = false
high_watermark = 1.0
low_watermark = 0.99
admission = "all"
eviction = "lru"
"""
HOST_BATCHES, NVME_BATCHES, WARM = 2, 10, 2
"""What the tiers hold at most, headers and what does not fill a segment included."""
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

    def put(self, number: int, *, count: int) -> None:
        """Into memory only."""
        assert self._client.put(self._space, chain(number, count), self._blocks(count)).stored == count

    def _blocks(self, count: int) -> list[NDArray[np.uint8]]:
        """Random bytes."""
        return list(self._noise.integers(0, 256, (count, self.block_bytes), dtype=np.uint8))

    def write(self, number: int) -> Callable[[], object]:
        """All that is in memory goes to the store, synced."""
        self.put(number, count=self.count)

        def work() -> None:
            assert self._operator.ask(pb.FlushRequest(deadline_s=30.0)).left == 0

        return work

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
        self._raw, self._pid = raw, pid
        self.costs: dict[str, list[Cost]] = defaultdict(list)
        self._works: dict[str, Work] = {
            "raw_write": lambda _: raw.write,
            "raw_flushed": lambda _: raw.write_synced,
            "write": bench.write,
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
            self._raw.sync()
            self.costs[under + name].append(cost_of(self._works[name](number), pid=self._pid))

    def first(self, batches: int) -> None:
        """Writes to slots that nobody has written yet: nothing leaves the store meanwhile."""
        for number in range(batches):
            self.run(number, ("raw_write", "write"), under="first_")

    def again(self, runs: int, *, first: int) -> None:
        """Writes into slots that were written before, then reads of what they brought; at last durable puts, which displace it."""
        count = WARM + max(runs, READ_BATCHES)
        for number in range(count):
            kept = "" if number >= WARM else "warm_"
            self.run(first + number, ("raw_write", "raw_flushed", "write", "raw_synced", "durable"), under=kept)
        for number in range(READ_BATCHES + runs):  # the oldest first: memory holds the last ones
            kept = "" if number >= READ_BATCHES else "warm_"
            self.run(first + count - READ_BATCHES + number % READ_BATCHES, ("raw_read", "read"), under=kept)
        for number in range(WARM + runs):
            self.run(first + number, ("raw_synced_put", "durable_put"), under="" if number >= WARM else "warm_")

    def row(self, name: str, verb: str, limit: str, *, size: int, meaning: str) -> Row:
        """GB/s of a verb against those of its limit."""
        costs, gigabytes = self.costs[verb], size / 1e9
        limits = rates(self.costs[limit], gigabytes)
        row = row_of(name, rates(costs, gigabytes), unit="GB/s", limits=limits, meaning=meaning)
        return row.with_cpu(cpus(costs), gigabytes=gigabytes)


def rows(effort: Effort = FULL) -> list[Row]:
    """`nvme_write_...`, `nvme_write_synced_...`, `nvme_read_...` and `nvme_write_first_...` of 2 MiB and 128 KiB; `nvme_durable_2MiB_x16`, `nvme_durable_put_2MiB_x16`; GB/s."""
    out: list[Row] = []
    for name, (count, block_bytes) in SHAPES.items():
        sizes = {"count": effort.pick(count, 16), "block_bytes": effort.pick(block_bytes, 64 * KIB)}
        batch = sizes["count"] * sizes["block_bytes"] // MIB
        config = CONFIG.format(host=HOST_BATCHES * batch, nvme=NVME_BATCHES * batch, segment=effort.pick(16, 1))
        with (
            Daemon(config) as daemon,
            Client(daemon.target, timeout_s=60) as client,
            connect(daemon.target) as operator,
        ):
            out += _rows_of(Bench(client, operator, **sizes), daemon, name, effort)
    return out


def _rows_of(bench: Bench, daemon: Daemon, name: str, effort: Effort) -> list[Row]:
    with RawFile(
        Path(daemon.root), length_bytes=4 * bench.size, piece_bytes=bench.block_bytes, count=bench.count
    ) as raw:
        raw.allocate()
        raw.calibrate()
        beside = Beside(bench, raw, daemon.pid)
        beside.first(NVME_BATCHES - 2)
        beside.again(effort.runs, first=NVME_BATCHES - 2)
        reads, writes = (f"raw O_DIRECT {verb}s at depth {raw.depths[verb]}" for verb in ("read", "write"))
    size = bench.size
    out = [
        beside.row(f"nvme_read_{name}", "read", "raw_read", size=size, meaning=f"verified, against {reads}"),
        beside.row(
            f"nvme_write_{name}", "write", "raw_write", size=size, meaning=f"synced, against {writes}, unsynced"
        ),
        beside.row(
            f"nvme_write_synced_{name}",
            "write",
            "raw_flushed",
            size=size,
            meaning=f"the same, against {writes} with one fdatasync",
        ),
        beside.row(
            f"nvme_write_first_{name}",
            "first_write",
            "first_raw_write",
            size=size,
            meaning=f"into slots that were never written, against {writes} into written ones",
        ),
    ]
    if name == "2MiB":
        against = "against raw O_DIRECT writes with one fdatasync a batch"
        size = DURABLE_COUNT * bench.block_bytes
        meaning = f"batches of 16 that are in memory become durable, {against}"
        out.append(beside.row("nvme_durable_2MiB_x16", "durable", "raw_synced", size=size, meaning=meaning))
        meaning = f"durable puts of 16 that are nowhere, copied and hashed meanwhile, {against}"
        out.append(beside.row("nvme_durable_put_2MiB_x16", "durable_put", "raw_synced_put", size=size, meaning=meaning))
    return out
