"""One block at a time: time of a put and a get beyond the C library's copy of as many bytes.

Raw echoes on an open stream measure that time. The copy reads bytes that no cache holds, as the put
and the get do. It writes to memory as warm as theirs: a put's is a displaced page, a get's the
caller's. Each run is a median over single calls that take turns. The bytes of every get are
verified after its time was taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from tierd.client import Client
from tierd.testing import Daemon
from tools.bench.data_plane import CONFIG, Bench
from tools.bench.echo import Echo, request_of
from tools.bench.measure import FULL, KIB, MIB, Cold, Effort, Measure, Work, measured, medians, take_turns
from tools.bench.rows import Row, row_of

EACH = 15
SIZES = {"2MiB": 2 * MIB, "128KiB": 128 * KIB}
VERBS = {"put": "", "put_nowait": " with wait=False", "get": ""}
LIMITS = ("put_copy", "get_copy", "echo")
HELD_BYTES, GOT_BYTES = 384 * MIB, 96 * MIB
"""HELD_BYTES: fill the tier. GOT_BYTES: gets read these in turn, more than caches hold."""
MESSAGE_BYTES = 128
"""About the length of a call for one block and of its answer."""


def rows(effort: Effort = FULL) -> list[Row]:
    """Rows of each size and verb, as `rows_of` returns them.

    `put_nowait`: until a put with wait=False returns; a flush awaits its answer before the next
    one.
    """
    return [row for size in SIZES for row in rows_of(took(size, effort), size)]


def rows_of(times: Mapping[str, Sequence[float]], size: str, *, who: str = "", whose: str = "") -> list[Row]:
    """Two rows for each verb in `times`: the whole time, and the time beyond its copy.

    times: microseconds of each run, by VERBS and LIMITS. who, whose: prefixes of the rows' names
    and meanings.
    """
    out: list[Row] = []
    for verb in (verb for verb in VERBS if verb in times):
        copy = times["get_copy" if verb == "get" else "put_copy"]
        name, whole = f"{who}{verb}_{size}", f"{whose}one block of {size}{VERBS[verb]}, p50, against memcpy"
        out.append(row_of(f"{name}_p50", times[verb], unit="us", limits=copy, meaning=whole))
        beyond = [all_us - copy_us for all_us, copy_us in zip(times[verb], copy, strict=True)]
        meaning = f"{whose}the same{VERBS[verb]} beyond its memcpy, against a gRPC echo on an open stream"
        out.append(row_of(f"{name}_beyond_copy", beyond, unit="us", limits=times["echo"], meaning=meaning))
    return out


def took(size: str, effort: Effort, beside: Mapping[str, Measure] | None = None) -> dict[str, list[float]]:
    """Microseconds of each run by VERBS, LIMITS and the names of `beside`; all take turns.

    Raises RuntimeError if a get returns other bytes than were put.
    """
    each, block_bytes = effort.pick(EACH, 1), effort.pick(SIZES[size], 4 * KIB)
    config = CONFIG.format(capacity=effort.pick(HELD_BYTES // MIB, 16), segment=effort.pick(32, 1))
    with Daemon(config) as daemon, Client(daemon.target) as client, Echo(f"unix:{daemon.root}/echo.sock") as echo:
        bench = Bench(client, Cold(effort.pick(384 * MIB, 8 * MIB)), count=1, block_bytes=block_bytes)
        held, got = (effort.pick(all_bytes // block_bytes, few) for all_bytes, few in ((HELD_BYTES, 8), (GOT_BYTES, 2)))
        for number in range(held):
            bench.put(number)()
            bench.note(number)
        for number in range(held - got, held):
            bench.get(number)()
        numbers, request = itertools.count(held), request_of(MESSAGE_BYTES, reply=MESSAGE_BYTES)

        def put_nowait(_: int) -> Callable[[], object]:
            client.flush()
            return bench.put(next(numbers), wait=False)

        def number_of(run: int) -> int:
            return held - got + run % got

        works: dict[str, Work] = {
            "get_copy": bench.copy,
            "put_copy": bench.copy_apart,
            "put": lambda _: bench.put(next(numbers)),
            "put_nowait": put_nowait,
            "echo": lambda _: lambda: echo.stream(request),
        }
        measures = {name: measured(work) for name, work in works.items()}
        measures["get"] = measured(lambda run: bench.get(number_of(run)), then=lambda run: bench.verify(number_of(run)))
        costs = take_turns(measures | dict(beside or {}), runs=effort.at_least(9) * each)
    return {name: medians([cost.wall_s * 1e6 for cost in costs[name]], of=each) for name in costs}
