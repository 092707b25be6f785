"""The cost of the record of decisions: processor time of gets and puts with it, against without.

A daemon with the record and one without take turns in short slices, so a drifting machine affects
both alike. Several pairs of daemons do so, since each has its own memory. The time is that of
client and daemon together: other processes do not add to it. Gets are views, which always call the
daemon. Puts evict a block for each that they store.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

from tierd.client import Client, NamespaceSpec
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, Cost, Effort, cost_of, take_turns
from tools.bench.rows import Row, row_of

BLOCK_BYTES, CHAINS = 4096, 16
CONFIG = """\
nvme = []

[server]
decisions = {decisions}

[[host]]
capacity = "16 MiB"
segment = "1 MiB"
"""
RECORDS = {"on": 100_000, "off": 0}


class Side:
    """A daemon with a full tier, and a client that gets and puts. decisions: of its record."""

    def __init__(self, stack: contextlib.ExitStack, *, decisions: int, calls: int) -> None:
        daemon = stack.enter_context(Daemon(CONFIG.format(decisions=decisions)))
        self._client, self._pid, self._calls = stack.enter_context(Client(daemon.target)), daemon.pid, calls
        spec = NamespaceSpec(model="bench", tokens_per_block=16, block_bytes=BLOCK_BYTES)
        self._space, self._numbers = self._client.open_namespace(spec), itertools.count(CHAINS)
        for _ in range(256):  # fills the tier
            self._put(chain(next(self._numbers), 32), 32)

    def get(self, blocks: int) -> Cost:
        """The cost of gets of so many blocks, as views."""
        kept = [chain(number, blocks) for number in range(CHAINS)]
        for hashes in kept:
            self._put(hashes, blocks)
        turns = itertools.cycle(kept)
        return self._cost(lambda: self._client.get(self._space, next(turns)).blocks == blocks)

    def put(self, blocks: int) -> Cost:
        """The cost of puts of so many new blocks."""
        new = iter([chain(next(self._numbers), blocks) for _ in range(self._calls)])
        return self._cost(lambda: self._put(next(new), blocks))

    def _put(self, hashes: object, blocks: int) -> bool:
        return bool(self._client.put(self._space, hashes, [bytes(BLOCK_BYTES)] * blocks))  # type: ignore[arg-type]

    def _cost(self, work: Callable[[], bool]) -> Cost:
        done: list[bool] = []
        cost = cost_of(lambda: done.extend(work() for _ in range(self._calls)), pid=self._pid)
        assert all(done)
        return cost


WORKS: dict[str, tuple[Callable[[Side, int], Cost], int]] = {
    f"decisions_{verb}_{blocks}": (work, blocks)
    for verb, work in (("get", Side.get), ("put", Side.put))
    for blocks in (1, 32)
}


def rows(effort: Effort = FULL) -> list[Row]:
    """A row for each of WORKS: microseconds of a call with the record, against without."""
    calls, costs = effort.pick(100, 4), {(name, record): list[float]() for name in WORKS for record in RECORDS}
    for _ in range(effort.pick(4, 1)):
        with contextlib.ExitStack() as stack:
            sides = {name: Side(stack, decisions=rows, calls=calls) for name, rows in RECORDS.items()}
            for name, (work, blocks) in WORKS.items():
                turns = {
                    record: lambda _, side=side, work=work, blocks=blocks: work(side, blocks)  # type: ignore[misc]
                    for record, side in sides.items()
                }
                for record, found in take_turns(turns, runs=effort.at_least(12)).items():
                    costs[name, record] += [1e6 * cost.cpu_s / calls for cost in found]
    meaning = "processor time of a call with the record of decisions, against without"
    return [row_of(name, costs[name, "on"], unit="us", limits=costs[name, "off"], meaning=meaning) for name in WORKS]
