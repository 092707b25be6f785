"""A part's results, and their form as lines of JSON.

Kinds: rows with a limit of the same run, checks, facts, and omissions. Non-purpose: judging them,
which `forecasts` does. Invariants: a ratio is value over limit, pair by pair if both are lists.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. limit: the machine's, measured in the same run and in the same unit; None: there
    is none."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check that passed or failed."""

    name: str
    passed: bool
    said: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A driver's answer, if no answer is wrong."""

    name: str
    said: str


@dataclass(frozen=True, slots=True)
class Left:
    """An omitted result, and the reason."""

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
    """The result of such a line."""
    told = json.loads(line)
    return KINDS[told.pop("kind")](**told)
