"""Rows of a benchmark: a figure, the physical limit of the same run, and the promise of the ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from tools.bench.promises import PROMISES, Verdict


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. limit: of the machine or the promise, in the same unit and run.
    ratio: value over limit, the median of the runs; low and high: its quartiles.
    spread: between the value's quartiles, as a share of it.
    cpu_s_per_gb: processor seconds of client and daemon together.
    bar, goal: of the ratio, None if nothing is promised; at_most: less is better."""

    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    spread: float
    meaning: str
    low: float = 0.0
    high: float = 0.0
    runs: int = 1
    cpu_s_per_gb: float | None = None
    bar: float | None = None
    goal: float | None = None
    at_most: bool = False

    def with_cpu(self, cpu_s: Sequence[float], *, gigabytes: float) -> Self:
        """The same with processor seconds of each run; gigabytes: the amount that each moved."""
        return replace(self, cpu_s_per_gb=statistics.median(cpu_s) / gigabytes)

    @property
    def verdict(self) -> Verdict:
        """The ratio against its bar and goal."""
        if self.bar is None:
            return Verdict.NOTHING_PROMISED
        sign = -1 if self.at_most else 1
        if sign * self.ratio < sign * self.bar:
            return Verdict.BELOW_BAR
        return Verdict.BELOW_GOAL if self.goal is not None and sign * self.ratio < sign * self.goal else Verdict.GOAL


def row_of(name: str, values: Sequence[float], *, unit: str, limits: Sequence[float], meaning: str) -> Row:
    """A row of medians. The ratio is value over limit, run by run, to exclude the machine's drift."""
    value = statistics.median(values)
    ratios = [v / limit for v, limit in zip(values, limits, strict=True)]
    first, last = quartiles(values)
    low, high = quartiles(ratios)
    promise = PROMISES.get(name)
    return Row(
        name=name,
        value=value,
        unit=unit,
        limit=statistics.median(limits),
        ratio=statistics.median(ratios),
        spread=(last - first) / value if value else 0.0,
        meaning=meaning,
        low=low,
        high=high,
        runs=len(values),
        bar=promise.bar if promise else None,
        goal=promise.goal if promise else None,
        at_most=bool(promise and promise.at_most),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of one value, itself twice."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
