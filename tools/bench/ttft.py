"""Time to first token of an engine that loads its prefix by layer: `tierd.ttft` on its own daemon.

    python -m tools.bench ttft

The machine is an H100 with PCIe 5 and an NVMe drive of 7 GB/s, and the model Llama-3-8B. Both are
scaled down. A quarter of each prompt is computed. `tierctl bench ttft` has other machines, a
picture and timelines.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from tierd.cli.admin import connect
from tierd.cli.bench import evictor
from tierd.cli.bench_report import bar_line
from tierd.client import Client
from tierd.testing import Daemon
from tierd.ttft.bench import LOADED, Bench, Result, Series, Setup, by_series
from tierd.ttft.machine import PRESETS, Shape
from tierd.ttft.report import BAR_TAIL, report_of
from tierd.ttft.timeline import Source
from tools.bench.measure import Effort
from tools.bench.rows import Row, row_of

CONFIG = """\
[server]
session_share = 1.0
[scrub]
period = "0 s"
[[host]]
capacity = "{tier} MiB"
[[nvme]]
path = "{{root}}/store"
capacity = "{tier} MiB"
admission = "all"
"""
MEMORY_BYTES, LIMIT_S = 1 << 30, 900.0


def rows(effort: Effort) -> list[Row]:
    """`ttft_{host,nvme}_{8..64}K` in seconds against the device; `..._bound` against arithmetic;
    `ttft_advised_{host,nvme}` against the better of loading and computing. Prints the bars."""
    setup = Setup(
        PRESETS["h100"],
        Shape(),
        scale=effort.pick(32, 256),
        prefixes=effort.pick((8192, 16384, 32768, 65536), (8192,)),
        tail=BAR_TAIL,
        runs=min(effort.runs, 3),
    ).checked(memory_bytes=MEMORY_BYTES, limit_s=LIMIT_S)
    tier = max(128, setup.memory_bytes * 5 // 8 >> 20)
    with (
        Daemon(CONFIG.format(tier=tier)) as daemon,
        Client(daemon.target) as client,
        connect(daemon.target) as operator,
        Bench(client, setup, evictor(operator)) as bench,
    ):
        results = list(bench.results())
    for bar in report_of(setup, results)["bars"]:
        Console(stderr=True, highlight=False).print(bar_line(bar), soft_wrap=True)
    return [row for source in LOADED for row in _rows_of(setup, results, source)]


def _rows_of(setup: Setup, results: Sequence[Result], source: Source) -> list[Row]:
    found, series = by_series(results), Series(source, "by layer")

    def seconds(each: Series, prefix: int) -> list[float]:
        return [result.measured.first_token_s for result in found[each, prefix]]

    out, advised, better = [], [0.0] * setup.runs, [0.0] * setup.runs
    for prefix in setup.prefixes:
        name, mine = f"ttft_{source.value}_{prefix >> 10}K", seconds(series, prefix)
        near, computed = seconds(Series(Source.DEVICE), prefix), seconds(Series(Source.NOWHERE), prefix)
        meaning = f"first token with a prefix that comes from {source.value} by layer, against one on the device"
        out.append(row_of(name, mine, unit="s", limits=near, meaning=meaning))
        limits = [setup.bound_s(series, prefix)] * setup.runs
        out.append(row_of(f"{name}_bound", mine, unit="s", limits=limits, meaning="the same against arithmetic"))
        advised = [sum(pair) for pair in zip(advised, seconds(Series(source, "advised"), prefix), strict=True)]
        best = map(min, mine, computed)
        better = [sum(pair) for pair in zip(better, best, strict=True)]
    meaning = "sum over the prefixes, as the advisor chooses, against the better of loading and computing"
    return [*out, row_of(f"ttft_advised_{source.value}", advised, unit="s", limits=better, meaning=meaning)]
