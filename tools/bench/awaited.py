"""The cost of awaiting: verbs of AsyncClient in turn, against the same verbs of Client in the same
run.

Each client has its own namespace. It puts, gets and looks up sequences of 16 blocks of 128 KiB. The
first get of one is `async_get`, with a call. The next one is `async_get_again`, without.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tierd.client import AsyncClient, Client, NamespaceSpec
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, KIB, Cost, Effort, cost_of
from tools.bench.rows import Row, row_of

BLOCKS, BLOCK_BYTES, WARM = 16, 128 * KIB, 40
CONFIG = """\
nvme = []
[[host]]
capacity = "512 MiB"
eviction = "lru"
"""
MEANINGS = {
    "put": "a put of 16 x 128 KiB, awaited",
    "get": "the first get of it into the caller's buffers, awaited",
    "get_again": "the next one, awaited",
    "lookup": "a lookup of it, awaited",
}


class Bench:
    """One client, its verbs by name. run: executes a verb."""

    def __init__(self, client: Any, run: Callable[[Any], Any], *, block_bytes: int) -> None:
        self._client, self._run = client, run
        spec = NamespaceSpec(model=type(client).__name__, tokens_per_block=16, block_bytes=block_bytes)
        self._space = run(client.open_namespace(spec))
        self._blocks = list(np.random.default_rng(0).integers(0, 256, (BLOCKS, block_bytes), dtype=np.uint8))
        self._out = np.ones((BLOCKS, block_bytes), np.uint8)

    def costs(self, number: int) -> Iterator[tuple[str, Cost]]:
        """The cost of each verb of a new sequence, in order."""
        yield "put", cost_of(self._put(number))
        yield "get", cost_of(self._get(number))
        yield "get_again", cost_of(self._get(number))
        yield "lookup", cost_of(self._lookup(number))

    def _put(self, number: int) -> Callable[[], object]:
        hashes = chain(number, BLOCKS)
        return lambda: self._run(self._client.put(self._space, hashes, self._blocks))

    def _get(self, number: int) -> Callable[[], object]:
        hashes = chain(number, BLOCKS)

        def work() -> None:
            assert self._run(self._client.get(self._space, hashes, out=self._out)).blocks == BLOCKS

        return work

    def _lookup(self, number: int) -> Callable[[], object]:
        hashes = chain(number, BLOCKS)
        return lambda: self._run(self._client.lookup(self._space, hashes))


def rows(effort: Effort = FULL) -> list[Row]:
    """`async_put`, `async_get`, `async_get_again` and `async_lookup`, microseconds."""
    took = defaultdict[str, list[float]](list)
    loop, block_bytes = asyncio.new_event_loop(), effort.pick(BLOCK_BYTES, 4 * KIB)
    with Daemon(CONFIG) as daemon, Client(daemon.target) as client:
        awaited = AsyncClient(daemon.target)
        sides = {
            "": Bench(client, lambda answer: answer, block_bytes=block_bytes),
            "async_": Bench(awaited, loop.run_until_complete, block_bytes=block_bytes),
        }
        for number in range(WARM + effort.at_least(200)):
            for side in sorted(sides, reverse=number % 2 == 1):
                for name, cost in sides[side].costs(number):
                    if number >= WARM:
                        took[side + name].append(cost.wall_s * 1e6)
        loop.run_until_complete(awaited.close())
    loop.close()
    return [
        row_of(
            f"async_{name}", took[f"async_{name}"], unit="us", limits=took[name], meaning=f"{meaning}, against Client"
        )
        for name, meaning in MEANINGS.items()
    ]
