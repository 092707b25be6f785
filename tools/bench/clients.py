"""One, four, sixteen and sixty-four client processes: their rate together, against one alone.

A get copies 16 blocks of 128 KiB of the client's own sequence, again and again. It asks the daemon
once in 33 times, so clients mostly share processors and caches. A lookup of the same sequence asks
each time. All are connected the whole time; in each slice some of them work.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

import numpy as np

from tierd.client import Client, NamespaceSpec
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, KIB, Effort
from tools.bench.rows import Row, row_of

COUNTS = (1, 4, 16, 64)
BLOCKS, BLOCK_BYTES, TOKENS = 16, 128 * KIB, 16
VERBS = {"clients": "gets of {blocks} blocks of 128 KiB", "lookups": "lookups of {blocks} blocks"}
START_S, END_S = 60.0, 30.0
CONFIG = """\
nvme = []
[[host]]
capacity = "{mib} MiB"
segment = "{segment} MiB"
"""


def serve(target: str, number: int, block_bytes: int, pipe: Connection) -> None:
    """A client: repeats each received verb until the deadline, and sends the count. None ends it."""
    blocks = np.full((BLOCKS, block_bytes), number, dtype=np.uint8)
    out, hashes = np.ones_like(blocks), chain(number, BLOCKS)
    with Client(target, timeout_s=60) as client:
        space = client.open_namespace(
            NamespaceSpec(model="bench-clients", tokens_per_block=TOKENS, block_bytes=block_bytes)
        )
        client.put(space, hashes, list(blocks))
        client.get(space, hashes, out=list(out))
        verbs: dict[str, Callable[[], int]] = {
            "clients": lambda: client.get(space, hashes, out=list(out)).blocks,
            "lookups": lambda: client.lookup(space, hashes).tokens // TOKENS,
        }
        pipe.send(0)
        while (told := pipe.recv()) is not None:
            verb, until, done = verbs[told[0]], told[1], 0
            while time.monotonic() < until:
                assert verb() == BLOCKS
                done += 1
            pipe.send(done)


class Crowd:
    """This many clients of one daemon, forked from a process without calls to share its imports."""

    def __init__(self, target: str, count: int, *, block_bytes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tools.bench.__main__"])
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for number in range(count):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(target, number, block_bytes, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            _told(pipe, START_S)

    def rate(self, verb: str, count: int, slice_s: float) -> float:
        """How often a second this many clients do it together."""
        at_work: Sequence[Connection] = self._pipes[:count]
        begun = time.monotonic()
        for pipe in at_work:
            pipe.send((verb, begun + slice_s))
        done = sum(_told(pipe, END_S) for pipe in at_work)
        return done / (time.monotonic() - begun)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()


def _told(pipe: Connection, timeout_s: float) -> int:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"clients: one did not answer within {timeout_s:g} s; is the machine busy?")
    return int(pipe.recv())


def rows(effort: Effort = FULL) -> list[Row]:
    """`clients_4`, `clients_16`, `clients_64`: gets a second together, against one alone;
    `lookups_4` and so on."""
    counts, block_bytes = effort.pick(COUNTS, (1, 2)), effort.pick(BLOCK_BYTES, 4 * KIB)
    slice_s = effort.pick(0.5, 0.05)
    rates: dict[tuple[str, int], list[float]] = {(verb, count): [] for verb in VERBS for count in counts}
    config = CONFIG.format(mib=effort.pick(512, 16), segment=effort.pick(4, 1))
    with Daemon(config) as daemon, Crowd(daemon.target, max(counts), block_bytes=block_bytes) as crowd:
        for number in range(effort.runs + 1):
            for verb in VERBS:
                for count in counts if number % 2 else counts[::-1]:
                    rates[verb, count].append(crowd.rate(verb, count, slice_s))
    return [
        row_of(
            f"{verb}_{count if not effort.is_tiny else COUNTS[1]}",
            each[1:],
            unit="1/s",
            limits=rates[verb, 1][1:],
            meaning=f"{VERBS[verb].format(blocks=BLOCKS)}, {count} processes together, against one alone",
        )
        for (verb, count), each in rates.items()
        if count > 1
    ]
