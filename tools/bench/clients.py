"""One, four, sixteen and sixty-four clients, each a process of its own: what they get together, against what one gets alone.

A get copies 16 blocks of 128 KiB out, of a sequence of the client's own. All are connected the whole time; in each slice so many of them are at work.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
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
BLOCKS, BLOCK_BYTES = 16, 128 * KIB
START_S, END_S = 60.0, 30.0
CONFIG = """\
nvme = []
[[host]]
capacity = "{mib} MiB"
segment = "{segment} MiB"
"""


def serve(target: str, number: int, block_bytes: int, pipe: Connection) -> None:
    """A client: for each moment that it is told, gets until then, and how many they were. None ends it."""
    blocks = np.full((BLOCKS, block_bytes), number, dtype=np.uint8)
    out, hashes = np.ones_like(blocks), chain(number, BLOCKS)
    with Client(target, timeout_s=60) as client:
        space = client.open_namespace(
            NamespaceSpec(model="bench-clients", tokens_per_block=16, block_bytes=block_bytes)
        )
        client.put(space, hashes, list(blocks))
        client.get(space, hashes, out=list(out))
        pipe.send(0)
        while (until := pipe.recv()) is not None:
            done = 0
            while time.monotonic() < until:
                assert client.get(space, hashes, out=list(out)).blocks == BLOCKS
                done += 1
            pipe.send(done)


class Crowd:
    """So many clients of one daemon. Forked from a process that has made no call yet, so that they share what they have loaded."""

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

    def rate(self, count: int, slice_s: float) -> float:
        """Gets a second that so many of them make together."""
        at_work: Sequence[Connection] = self._pipes[:count]
        begun = time.monotonic()
        for pipe in at_work:
            pipe.send(begun + slice_s)
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
    """`clients_4`, `clients_16`, `clients_64`: gets a second of all together, against those of one alone in the same round."""
    counts, block_bytes = effort.pick(COUNTS, (1, 2)), effort.pick(BLOCK_BYTES, 4 * KIB)
    slice_s = effort.pick(0.5, 0.05)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    config = CONFIG.format(mib=effort.pick(512, 16), segment=effort.pick(4, 1))
    with Daemon(config) as daemon, Crowd(daemon.target, max(counts), block_bytes=block_bytes) as crowd:
        for number in range(effort.runs + 1):
            for count in counts if number % 2 else counts[::-1]:
                rates[count].append(crowd.rate(count, slice_s))
    alone = rates.pop(1)
    return [
        row_of(
            f"clients_{count if not effort.is_tiny else COUNTS[1]}",
            each[1:],
            unit="1/s",
            limits=alone[1:],
            meaning=f"gets of {BLOCKS} blocks of 128 KiB, {count} processes together, against one alone",
        )
        for count, each in rates.items()
    ]
