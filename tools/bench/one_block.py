"""One block at a time: what a put and a get take beyond the C library's copy of as many bytes, counted in raw echoes
on an open stream.

The copy reads what no cache holds, as the put and the get do, and writes to memory as warm as theirs: a put's is a page that was displaced, a get's the caller's. Each run is a median over single calls that take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tierd.client import Client
from tierd.testing import Daemon
from tools.bench.data_plane import CONFIG, Bench
from tools.bench.echo import Echo, request_of
from tools.bench.measure import FULL, KIB, MIB, Cold, Effort, Work, interleaved, medians
from tools.bench.rows import Row, row_of

EACH = 15
SIZES = {"2MiB": 2 * MIB, "128KiB": 128 * KIB}
MESSAGE_BYTES = 128
"""About what a call about one block and its answer weigh."""


def rows(effort: Effort = FULL) -> list[Row]:
    """Of each size and verb a row of the whole and one of the rest beside its copy, in microseconds.

    `put_nowait`: until a put with wait=False returns; its answer is awaited before the next one begins.
    """
    out: list[Row] = []
    for name, block_bytes in SIZES.items():
        took = _took(effort, effort.pick(block_bytes, 4 * KIB), held=effort.pick(384 * MIB // block_bytes, 8))
        for verb in ("put", "put_nowait", "get"):
            copy = took["get_copy" if verb == "get" else "put_copy"]
            whole = f"one block of {name}, p50, against its copy"
            out.append(row_of(f"{verb}_{name}_p50", took[verb], unit="us", limits=copy, meaning=whole))
            beyond = [all_us - copy_us for all_us, copy_us in zip(took[verb], copy, strict=True)]
            meaning = "the same without its copy, against a raw echo on an open stream"
            out.append(row_of(f"{verb}_{name}_beyond_copy", beyond, unit="us", limits=took["echo"], meaning=meaning))
    return out


def _took(effort: Effort, block_bytes: int, *, held: int) -> dict[str, list[float]]:
    """Microseconds by what was done. held: blocks that fill the tier."""
    each, request = effort.pick(EACH, 1), request_of(MESSAGE_BYTES, reply=MESSAGE_BYTES)
    config = CONFIG.format(capacity=effort.pick(384, 16), segment=effort.pick(32, 1))
    with Daemon(config) as daemon, Client(daemon.target) as client, Echo(f"unix:{daemon.root}/echo.sock") as echo:
        cold = Cold(effort.pick(384 * MIB, 8 * MIB))
        bench = Bench(client, cold, count=1, block_bytes=block_bytes)
        for number in range(held):
            bench.put(number)()
        known, numbers = range(held - held // 4, held), itertools.count(held)
        for number in known:
            bench.get(number)()

        def put_nowait(_: int) -> Callable[[], object]:
            client.flush()
            return bench.put(next(numbers), wait=False)

        works: dict[str, Work] = {
            "get_copy": bench.copy,
            "put_copy": bench.copy_apart,
            "put": lambda _: bench.put(next(numbers)),
            "put_nowait": put_nowait,
            "get": lambda n: bench.get(known[n % len(known)]),
            "echo": lambda _: lambda: echo.stream(request),
        }
        costs = interleaved(works, runs=effort.at_least(9) * each, pid=daemon.pid)
    return {name: medians([cost.wall_s * 1e6 for cost in costs[name]], of=each) for name in works}
