"""The cost of a call by blocks held: a daemon with a hundred thousand, against one with a thousand.

    python -m tools.bench.size [--blocks 1000000]      another size; a block takes 4 KiB of memory

Puts, gets as views and lookups of 256 blocks take turns between the two. The suite many_start has
ten million on NVMe, index_scale in one core.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, KIB, Effort, Work, interleaved
from tools.bench.rows import Row, row_of

FEW, MANY, BATCH, BLOCK_BYTES = 1000, 100_000, 256, 4 * KIB
CONFIG = """\
nvme = []
[[host]]
capacity = "{mib} MiB"
segment = "4 MiB"
"""
VERBS = {"put": "puts", "get": "gets as views", "lookup": "lookups"}


class Bench:
    """A client of a daemon that holds this many blocks. Its calls are of chains at random."""

    def __init__(self, client: Client, *, blocks: int, batch: int) -> None:
        self._client, self.batch, self._chains = client, batch, blocks // batch
        spec = NamespaceSpec(model="bench-size", tokens_per_block=16, block_bytes=BLOCK_BYTES)
        self._space: OpenedNamespace = client.open_namespace(spec)
        self._blocks = list(np.random.default_rng(0).integers(0, 256, (batch, BLOCK_BYTES), dtype=np.uint8))
        self._noise = np.random.default_rng(1)
        for number in range(self._chains):
            self.put(number)()
            client.get(self._space, chain(number, batch))  # verified and mapped, as blocks that are held for long

    def put(self, number: int) -> Callable[[], object]:
        """A new chain."""
        hashes = chain(number, self.batch)

        def work() -> None:
            assert self._client.put(self._space, hashes, self._blocks).stored == self.batch

        return work

    def get(self, number: int) -> Callable[[], object]:
        """A held chain."""
        hashes = chain(int(self._noise.integers(self._chains)), self.batch)

        def work() -> None:
            assert self._client.get(self._space, hashes).blocks == self.batch

        return work

    def lookup(self, number: int) -> Callable[[], object]:
        """A held chain."""
        hashes = chain(int(self._noise.integers(self._chains)), self.batch)

        def work() -> None:
            assert self._client.lookup(self._space, hashes).tokens == self.batch * 16

        return work


def _config(blocks: int, *, batch: int, runs: int) -> str:
    """With room for the blocks, and for all puts of the measurement."""
    mib = math.ceil((blocks + (runs + 8) * batch) * BLOCK_BYTES / 0.9 / (4 << 20)) * 4
    return CONFIG.format(mib=max(32, mib))


def rows(effort: Effort = FULL, *, many: int = MANY) -> list[Row]:
    """`put_at_100K`, `get_at_100K`, `lookup_at_100K`: milliseconds a call, against those at a
    thousand."""
    batch, runs = effort.pick(BATCH, 16), effort.at_least(31)
    sizes = {"few": effort.pick(FEW, 64), "many": effort.pick(many, 256)}
    few, many_held = (Daemon(_config(count, batch=batch, runs=runs)) for count in sizes.values())
    with few, many_held, Client(few.target) as first, Client(many_held.target) as second:
        benches = {
            name: Bench(client, blocks=sizes[name], batch=batch) for name, client in (("few", first), ("many", second))
        }
        against = f"among {sizes['many']:,}, against the same among {sizes['few']:,}"
        return compared(benches, runs=runs, label=label_of(many), against=against)


def label_of(blocks: int) -> str:
    """Of rows: 100K, 10M."""
    return f"{blocks // 1000}K" if blocks < 10**6 else f"{blocks / 1e6:g}M"


def compared(benches: dict[str, Bench], *, runs: int, label: str, against: str) -> list[Row]:
    """Milliseconds that the calls of "many" take, against those of "few"."""
    works: dict[str, Work] = {}
    for verb in VERBS:
        for name, bench in benches.items():
            works[f"{verb} {name}"] = _after_the_held(getattr(bench, verb))
    costs = interleaved(works, runs=runs)
    took = {name: [cost.wall_s * 1e3 for cost in each] for name, each in costs.items()}
    return [
        row_of(
            f"{verb}_at_{label}",
            took[f"{verb} many"],
            unit="ms",
            limits=took[f"{verb} few"],
            meaning=f"{what} of {benches['many'].batch} blocks {against}",
        )
        for verb, what in VERBS.items()
    ]


def _after_the_held(work: Work) -> Work:
    """Numbers of runs as numbers of chains that are not held yet."""
    return lambda n: work((1 << 40) + n)


def main() -> None:
    """Reads the size, prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=10 * MANY)
    begun = time.perf_counter()
    for row in rows(many=parser.parse_args().blocks):
        print(f"{row.name:16} {row.value:8.3f} {row.unit}, {row.ratio:.2f} of {row.limit:.3f}: {row.meaning}")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
