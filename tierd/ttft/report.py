"""Results of a measurement as plain values: a row of each series and prefix, bars, crossovers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TypedDict

import numpy as np

from tierd.ttft.bench import LOADED, Result, Series, Setup, by_series
from tierd.ttft.engine import stops_in
from tierd.ttft.timeline import Source, crossover

BARS = {Source.HOST: 0.05, Source.NVME: 0.10}
"""Share of the time to first token that loading by layer may add to that from the device."""
BAR_PREFIX, BAR_TAIL = 8192, 0.25
"""The bars hold from so many tokens on, if at least this share of the prompt is computed."""


class Row(TypedDict):
    """Seconds are medians of the runs; low, high: the least and the greatest.

    bound_s: by arithmetic alone. call_s, disk_s, link_s: waited for these; compute_s: the rest.
    loaded: tokens. layers: of the median run, each as seconds of [call, disk, link, compute].
    """

    source: str
    how: str
    prefix: int
    tail: int
    loaded: int
    runs: int
    first_token_s: float
    low_s: float
    high_s: float
    bound_s: float
    call_s: float
    disk_s: float
    link_s: float
    compute_s: float
    layers: list[list[float]]


class Bar(TypedDict):
    """added: share that loading by layer adds, median of the runs. limit: the least by arithmetic.
    limit_in_parts: the same if the disk reads in the daemon's `parts`."""

    source: str
    prefix: int
    added: float
    limit: float
    parts: int
    limit_in_parts: float
    bar: float
    verdict: str


class Crossing(TypedDict):
    """prefix: the least from which on loading by layer is faster than computing; 0: each that was
    measured; None: none."""

    source: str
    prefix: float | None


class Report(TypedDict):
    """All of a measurement. setup: the machine and shape that it stands for."""

    setup: dict[str, object]
    rows: list[Row]
    bars: list[Bar]
    crossovers: list[Crossing]


def report_of(setup: Setup, results: Sequence[Result]) -> Report:
    """The report of all requests."""
    found = by_series(results)
    rows = [row_of(setup, found[series, prefix]) for series in setup.series for prefix in setup.prefixes]
    return Report(
        setup=_setup(setup),
        rows=rows,
        bars=[bar_of(setup, results, source, prefix) for source, prefix in barred(setup)],
        crossovers=crossings(setup, rows),
    )


def _setup(setup: Setup) -> dict[str, object]:
    small = setup.small
    return {
        "machine": asdict(setup.machine),
        "shape": asdict(setup.shape) | {"token_bytes": setup.shape.token_bytes},
        "scale": setup.scale,
        "scaled_machine": asdict(setup.machine.scaled(setup.scale)),
        "scaled_shape": asdict(small) | {"token_bytes": small.token_bytes},
        "tail": setup.tail,
        "runs": setup.runs,
    }


def row_of(setup: Setup, results: Sequence[Result]) -> Row:
    """The row of one series and prefix."""
    times = [result.measured.first_token_s for result in results]
    middle = sorted(results, key=lambda result: result.measured.first_token_s)[len(results) // 2]
    series, line = middle.series, middle.measured.timeline
    stalls = line.stalls()
    parts = [float(part.sum()) for part in (stalls.call, stalls.disk, stalls.link)]
    compute = np.full(len(line.copied), line.layer_s)
    return Row(
        source=series.source.value,
        how=series.how,
        prefix=middle.prefix,
        tail=setup.job(middle.prefix, 0).tail,
        loaded=middle.loaded,
        runs=len(results),
        first_token_s=statistics.median(times),
        low_s=min(times),
        high_s=max(times),
        bound_s=setup.bound_s(series, middle.prefix),
        call_s=parts[0],
        disk_s=parts[1],
        link_s=parts[2],
        compute_s=float(compute.sum()),
        layers=np.stack([stalls.call, stalls.disk, stalls.link, compute], axis=1).round(7).tolist(),
    )


def barred(setup: Setup) -> list[tuple[Source, int]]:
    """The sources and prefixes to which a bar applies."""
    if Source.DEVICE not in setup.sources or setup.tail < BAR_TAIL:
        return []
    prefixes = [prefix for prefix in setup.prefixes if prefix >= BAR_PREFIX]
    return [(source, prefix) for source in LOADED if source in setup.sources for prefix in prefixes]


def shares_added(results: Sequence[Result], source: Source, prefix: int) -> list[float]:
    """Shares that loading by layer adds to the time to first token from the device, run by run."""
    found = by_series(results)
    near, far = (
        [result.measured.first_token_s for result in found[each, prefix]]
        for each in (Series(Source.DEVICE), Series(source, "by layer"))
    )
    return [loaded / device - 1 for device, loaded in zip(near, far, strict=True)]


def bar_of(setup: Setup, results: Sequence[Result], source: Source, prefix: int) -> Bar:
    """The bar of one source and prefix."""
    added, bar = statistics.median(shares_added(results, source, prefix)), BARS[source]
    stops = stops_in(setup.small, prefix // setup.small.tokens_per_block)
    near_s, far = setup.bound_s(Series(Source.DEVICE), prefix), Series(source, "by layer")
    limit = setup.bound_s(far, prefix) / near_s - 1
    return Bar(
        source=source.value,
        prefix=prefix,
        added=added,
        limit=limit,
        parts=len(stops) if source is Source.NVME else setup.shape.layers,
        limit_in_parts=setup.bound_s(far, prefix, stops=stops) / near_s - 1,
        bar=bar,
        verdict="kept" if added <= bar else "arithmetic forbids it" if limit > bar else "broken",
    )


def crossings(setup: Setup, rows: Sequence[Row]) -> list[Crossing]:
    """Of each source that is loaded, against computing; none if computing was not measured."""
    if Source.NOWHERE not in setup.sources:
        return []
    computed = [row["first_token_s"] for row in rows if row["source"] == Source.NOWHERE]
    out = []
    for source in LOADED:
        mine = [row["first_token_s"] for row in rows if row["source"] == source and row["how"] == "by layer"]
        if mine:
            prefix = crossover(list(setup.prefixes), mine, computed)
            out.append(Crossing(source=source.value, prefix=prefix))
    return out
