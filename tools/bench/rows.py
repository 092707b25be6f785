"""What every benchmark gives: rows with the physical limit measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. limit: what the machine or the promise allows, in the same unit and run; spread: (max - min) / median of the runs."""

    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    spread: float
    meaning: str


def row_of(name: str, values: Sequence[float], *, unit: str, limits: Sequence[float], meaning: str) -> Row:
    """A row of medians. The ratio is value over limit, run by run, so that a drifting machine does not colour it."""
    value = statistics.median(values)
    ratios = [v / limit for v, limit in zip(values, limits, strict=True)]
    return Row(
        name=name,
        value=value,
        unit=unit,
        limit=statistics.median(limits),
        ratio=statistics.median(ratios),
        spread=(max(values) - min(values)) / value if value else 0.0,
        meaning=meaning,
    )
