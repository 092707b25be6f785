"""One block at a time: what a put and a get of 2 MiB take beyond the C library's copy of as many bytes, counted in raw echoes on an open stream.

The copy reads what no cache holds, as the put and the get do, and writes to memory as warm as theirs: a put's is a page that was displaced, a get's the caller's. Each run is a median over single calls that take turns.
"""

from __future__ import annotations

from tierd.client import Client
from tierd.testing import Daemon
from tools.bench.data_plane import CONFIG, Bench
from tools.bench.echo import Echo, request_of
from tools.bench.measure import FULL, KIB, MIB, Cold, Effort, Work, interleaved, medians
from tools.bench.rows import Row, row_of

EACH = 15
MESSAGE_BYTES = 128
"""About what a call about one block and its answer weigh."""


def rows(effort: Effort = FULL) -> list[Row]:
    """`put_2MiB_p50` and `get_2MiB_p50`, whole, against their copy; `..._beyond_copy`: the rest, against an echo; microseconds."""
    each, request = effort.pick(EACH, 1), request_of(MESSAGE_BYTES, reply=MESSAGE_BYTES)
    config = CONFIG.format(capacity=effort.pick(768, 16), segment=effort.pick(32, 1))
    with Daemon(config) as daemon, Client(daemon.target) as client, Echo(f"unix:{daemon.root}/echo.sock") as echo:
        cold = Cold(effort.pick(384 * MIB, 8 * MIB))
        bench = Bench(client, cold, count=1, block_bytes=effort.pick(2 * MIB, 4 * KIB))
        held = effort.pick(400, 8)
        for number in range(held):
            bench.put(number)()
        known = range(held - held // 4, held)
        for number in known:
            bench.get(number)()
        works: dict[str, Work] = {
            "get_copy": bench.copy,
            "put_copy": bench.copy_apart,
            "put": lambda n: bench.put(held + n),
            "get": lambda n: bench.get(known[n % len(known)]),
            "echo": lambda _: lambda: echo.stream(request),
        }
        costs = interleaved(works, runs=effort.at_least(9) * each, pid=daemon.pid)
    took = {name: medians([cost.wall_s * 1e6 for cost in costs[name]], of=each) for name in works}
    out = []
    for verb in ("put", "get"):
        whole = "one 2 MiB block, p50, against its copy"
        out.append(row_of(f"{verb}_2MiB_p50", took[verb], unit="us", limits=took[f"{verb}_copy"], meaning=whole))
        beyond = [all_us - copy_us for all_us, copy_us in zip(took[verb], took[f"{verb}_copy"], strict=True)]
        meaning = "the same without its copy, against a raw echo on an open stream"
        out.append(row_of(f"{verb}_2MiB_beyond_copy", beyond, unit="us", limits=took["echo"], meaning=meaning))
    return out
