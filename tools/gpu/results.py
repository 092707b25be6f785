"""What a part gives: rows with a limit of the same run, checks, facts, and what was left out; and how they travel as lines of JSON.

Non-purpose: judging them, which `forecasts` does. Invariants: a ratio is value over limit, pair by pair where both are lists.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. limit: what the machine allows, measured in the same run and in the same unit; None: there is none."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is right or not."""

    name: str
    passed: bool
    said: str


@dataclass(frozen=True, slots=True)
class Fact:
    """What a driver answers, where no answer is wrong."""

    name: str
    said: str


@dataclass(frozen=True, slots=True)
class Left:
    """What was left out, and why."""

    name: str
    said: str


Result = Row | Check | Fact | Left
KINDS = {kind.__name__.lower(): kind for kind in (Row, Check, Fact, Left)}


def row_of(name: str, values: Sequence[float], unit: str, limits: Sequence[float] = (), note: str = "") -> Row:
    """A row of medians. limits: one for each value, or one for all; none: no limit."""
    value = statistics.median(values)
    if not limits:
        return Row(name, value, unit, note=note)
    of = limits if len(limits) == len(values) else [statistics.median(limits)] * len(values)
    ratio = statistics.median(v / limit for v, limit in zip(values, of, strict=True))
    return Row(name, value, unit, statistics.median(limits), ratio, note)


def as_object(result: Result) -> dict[str, object]:
    """For JSON."""
    return {"kind": type(result).__name__.lower(), **asdict(result)}


def line_of(result: Result) -> bytes:
    """One line of JSON."""
    return json.dumps(as_object(result)).encode() + b"\n"


def result_of(line: bytes) -> Result:
    """Of such a line."""
    told = json.loads(line)
    return KINDS[told.pop("kind")](**told)
