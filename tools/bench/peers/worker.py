"""A peer's client, in the peer's own environment: runs the verbs of its input, and answers with
costs.

    python -m tools.bench.peers.worker NAME COUNT BLOCK_BYTES

Lines are `put N` and `get N`; answers are JSON, one a line: {"wall_s", "cpu_s"}, with the peer's
server, or {"error"}. It ends with its input. After each get, untimed, its bytes are compared with
those that were put, by their sums.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tools.bench.measure import MIB, Cold, Cost, Sums, cost_of, cpu_s
from tools.bench.peers.known import KNOWN
from tools.bench.peers.peer import Peer

COLD_BYTES = 192 * MIB


class Worker:
    """Batches of this many blocks, put and got."""

    def __init__(self, peer: Peer, *, count: int, block_bytes: int) -> None:
        self._peer, self._count, self._block_bytes = peer, count, block_bytes
        self._cold = Cold(memory=peer.memory(max(COLD_BYTES, count * block_bytes)))
        self._target = peer.memory(count * block_bytes).reshape(count, block_bytes)
        self._target[:] = 1
        self._sums = Sums()

    def answer(self, verb: str, number: int) -> Cost:
        """Of one verb."""
        if verb == "get":
            cost = self._cost(lambda: self._peer.get(str(number), self._target))
            self._sums.check(number, self._target)
            return cost
        blocks = self._cold.blocks(self._count, self._block_bytes)
        self._peer.make_room(blocks.nbytes)
        cost = self._cost(lambda: self._peer.put(str(number), blocks))
        self._sums.note(number, blocks)
        return cost

    def _cost(self, work: Callable[[], object]) -> Cost:
        """All of the peer's processes count."""
        before = sum(map(cpu_s, self._peer.pids))
        cost = cost_of(work)
        return Cost(cost.wall_s, cost.cpu_s + sum(map(cpu_s, self._peer.pids)) - before)


def main() -> None:
    """Serves its input."""
    name, count, block_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a peer's libraries may print
    with tempfile.TemporaryDirectory(prefix="peer-") as directory:
        try:
            peer = KNOWN[name].make(Path(directory))
        except Exception as error:  # noqa: BLE001 -- the reason is the answer
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)
            return
        with contextlib.closing(peer):
            worker = Worker(peer, count=count, block_bytes=block_bytes)
            print(json.dumps({"ready": True}), file=out, flush=True)
            for line in sys.stdin:
                verb, number = line.split()
                told: dict[str, object]
                try:
                    told = asdict(worker.answer(verb, int(number)))
                except Exception as error:  # noqa: BLE001 -- as above
                    told = {"error": f"{type(error).__name__}: {error}"}
                print(json.dumps(told), file=out, flush=True)


if __name__ == "__main__":
    main()
