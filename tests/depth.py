"""The depth of a test run, by TIERD_DEPTH and SCALE; its figures go to build/figures.jsonl."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

DEPTH = os.environ.get("TIERD_DEPTH", "test")
"""`test` (make test), `nightly` or `weekly`."""
SCALE = float(os.environ.get("SCALE", "1"))
"""`make nightly SCALE=0.1`: multiplies the counts of a deep run."""
FIGURES = Path(__file__).resolve().parents[1] / "build" / "figures.jsonl"


def count(*, test: int = 1, nightly: int, weekly: int) -> int:
    """The count at this depth; at least that of `make test`."""
    if DEPTH == "test":
        return test
    return max(test, round((weekly if DEPTH == "weekly" else nightly) * SCALE))


def slow(*values: Any) -> list[Any]:
    """Parameters of a test that `make test` omits."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def percentile(values: list[float], share: float) -> float:
    """The value with this share of the values below it; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def report(what: str, **figures: object) -> None:
    """Prints a line of figures and appends it to FIGURES, so that one file has a night's figures."""
    print(f"{what}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    FIGURES.parent.mkdir(exist_ok=True)
    line = json.dumps({"what": what, "depth": DEPTH, "at": round(time.time()), **figures}, default=str)
    fd = os.open(FIGURES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, line.encode() + b"\n")
    finally:
        os.close(fd)
