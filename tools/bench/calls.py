"""The cost of a call: lookups, and gets as views, against raw gRPC echoes in the same run.

The echoes' messages are as long as the calls', on an open stream; they have no session, no checks
and no search. Slices of calls and of echoes take turns. Local calls use a socket instead of gRPC:
`lookup_empty_raw` is against an echo on a raw socket, the limit of that way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.client import Client, Group, NamespaceSpec, OpenedNamespace
from tierd.client.transport import requests
from tierd.core.formats.model import HANDLE
from tierd.testing import Daemon, chain
from tools.bench.echo import Echo, request_of
from tools.bench.measure import FULL, KIB, Effort, interleaved
from tools.bench.rows import Row, row_of

BLOCKS, BLOCK_BYTES = 256, 4 * KIB
CONFIG = """\
nvme = []
[[host]]
capacity = "64 MiB"
"""


class Bench:
    """A client of a daemon that holds one chain, and the lengths of messages about it."""

    def __init__(self, client: Client, echo: Echo, *, blocks: int) -> None:
        self._client, self._echo, self.blocks = client, echo, blocks
        spec = NamespaceSpec(model="bench-calls", tokens_per_block=16, block_bytes=BLOCK_BYTES)
        self._space: OpenedNamespace = client.open_namespace(spec)
        self._held, self._missing = chain(0, blocks), chain(1, 1)
        noise = np.random.default_rng(0).integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
        client.put(self._space, self._held, list(noise))

    def lookup_empty(self) -> None:
        """Of one block that is nowhere."""
        assert not self._client.lookup(self._space, self._missing).tokens

    def lookup(self) -> None:
        """Of all blocks, which are held."""
        assert self._client.lookup(self._space, self._held).tokens == self.blocks * 16

    def view(self) -> None:
        """All in one call. The client then drops the views, and so the lease."""
        assert self._client.get(self._space, self._held).blocks == self.blocks

    def echo_of(self, verb: str, *, raw: bool = False) -> Callable[[], object]:
        """An echo of messages as long as the verb's: on a stream, or on a raw socket."""
        groups = [requests.group_message(Group(self._space, self._missing if verb == "lookup_empty" else self._held))]
        count = len(groups[0].hashes) // 32
        if verb == "view":
            asked: int = pb.AcquireRequest(groups=groups, tier=1).ByteSize()  # type: ignore[arg-type]
            answer = count * HANDLE.itemsize + 32
        else:
            asked, answer = pb.LookupRequest(groups=groups).ByteSize(), count + 16
        request = request_of(asked, reply=answer)
        return lambda: (self._echo.raw if raw else self._echo.stream)(request)


def _slice(work: Callable[[], object], count: int) -> Callable[[int], Callable[[], object]]:
    """This many calls, as one work."""

    def calls() -> None:
        for _ in range(count):
            work()

    return lambda _: calls


def rows(effort: Effort = FULL) -> list[Row]:
    """`lookup_empty`, `lookup_empty_raw` and `get_view_256`, microseconds; `lookup_256`, calls a
    second."""
    with Daemon(CONFIG) as daemon, Client(daemon.target) as client, Echo(f"unix:{daemon.root}/echo.sock") as echo:
        bench = Bench(client, echo, blocks=effort.pick(BLOCKS, 8))
        verbs = {"lookup_empty": bench.lookup_empty, "lookup": bench.lookup, "view": bench.view}
        count = effort.pick(40, 2)
        works = {name: _slice(verb, count) for name, verb in verbs.items()}
        works |= {f"echo_{name}": _slice(bench.echo_of(name), count) for name in verbs}
        works["raw"] = _slice(bench.echo_of("lookup_empty", raw=True), count)
        costs = interleaved(works, runs=effort.at_least(21), pid=daemon.pid)
    took = {name: [cost.wall_s / count * 1e6 for cost in each] for name, each in costs.items()}
    cpu = {name: np.median([cost.cpu_s / count * 1e6 for cost in costs[name]]) for name in verbs}
    against = "against a raw gRPC echo of that size on an open stream"

    def told(name: str, meaning: str) -> str:
        return f"{meaning}, {against}; {cpu[name]:.0f} us of processor a call"

    a_second, echoes = ([1e6 / each for each in took[name]] for name in ("lookup", "echo_lookup"))
    return [
        row_of(
            "lookup_empty",
            took["lookup_empty"],
            unit="us",
            limits=took["echo_lookup_empty"],
            meaning=told("lookup_empty", "of one block that is nowhere"),
        ),
        row_of(
            "lookup_empty_raw",
            took["lookup_empty"],
            unit="us",
            limits=took["raw"],
            meaning="the same, against an echo of that size on a raw socket",
        ),
        row_of("lookup_256", a_second, unit="1/s", limits=echoes, meaning=told("lookup", "of 256 hashes, one client")),
        row_of(
            "get_view_256",
            took["view"],
            unit="us",
            limits=took["echo_view"],
            meaning=told("view", "256 blocks as views in one call, and their release"),
        ),
    ]
