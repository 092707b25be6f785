"""Results of runs, as rows of plain values and as curves over a tier's size.

Tables, JSON, plots and pages are made from them. Hits are shares of the prompt tokens of the trace;
those of the tiers add up to prefix_token_hit. The points of a curve differ only in the size of one
tier, the smallest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tierd.core.formats.model import TierKind
from tierd.simulator.choices import CLAIRVOYANT
from tierd.simulator.runs import Outcome, Scenario
from tierd.simulator.sequences import Trace
from tierd.simulator.sizes import KINDS

Row = dict[str, Any]


class Point(NamedTuple):
    """One run in a curve. x: the varying size, in bytes or as a share; text: as written."""

    x: float
    text: str
    row: Row


class Curve(NamedTuple):
    """One choice of policies over sizes."""

    policy: str
    points: list[Point]

    @property
    def is_bound(self) -> bool:
        """Whether its policy knows the future."""
        return CLAIRVOYANT in self.policy


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves of one diagram. trace: its name; axis: the variable; beside: the fixed sizes, as text;
    in_bytes: the unit of x."""

    trace: str
    axis: str
    beside: str
    in_bytes: bool
    curves: list[Curve]

    @property
    def is_exact(self) -> bool:
        """Whether the clairvoyant is a proven bound here: in one tier sized in blocks."""
        return not self.in_bytes and not self.beside


def row_of(trace: Trace, run: Scenario, outcome: Outcome) -> Row:
    """The result of a run. Writes count in footprints: the bytes of all distinct blocks."""
    kinds = [spec.kind for spec in run.tiers.specs]
    tokens = {kind: sum(t for k, t in zip(kinds, outcome.tier_tokens, strict=True) if k is kind) for kind in KINDS}
    written = sum(size for kind, size in zip(kinds, outcome.copied_bytes, strict=True) if kind is TierKind.NVME)
    whole = max(1, trace.prompt_tokens)
    return {
        "trace": trace.name,
        "policy": run.choice.text,
        **{kind.name.lower(): run.tiers.texts.get(kind) or None for kind in KINDS},
        "prefix_token_hit": sum(tokens.values()) / whole,
        **{f"{kind.name.lower()}_hit": tokens[kind] / whole for kind in KINDS},
        "nvme_writes_footprints": written / max(1, trace.distinct_bytes(run.tiers.measure)),
        "seconds": outcome.seconds,
        **_asked_writes(run),
    }


def panels_of(runs: Sequence[Scenario], rows: Sequence[Row]) -> list[Panel]:
    """The rows as curves, in their order."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    axes = [_axis(run, runs) for run in runs]
    for i, (run, axis) in enumerate(zip(runs, axes, strict=True)):
        others = tuple(run.tiers.texts.get(kind) for kind in KINDS if kind is not axis)
        groups.setdefault((run.trace, run.tiers.measure.whole, axis, others), []).append(i)
    return [_panel(axes[found[0]], [(runs[i], rows[i]) for i in found]) for found in groups.values()]


def short_name(trace: str) -> str:
    """A trace's name without its folder and its endings."""
    return Path(trace).name.removesuffix(".gz").removesuffix(".jsonl")


def _asked_writes(run: Scenario) -> Row:
    """Options other than tiers and policies."""
    admission, budget = run.writes.admission, run.writes.budget
    return ({"admission": admission} if admission else {}) | ({"wear_budget": budget.text} if budget else {})


def _axis(run: Scenario, runs: Sequence[Scenario]) -> TierKind:
    """The run's kind of tier with the most sizes in these runs; the farthest of several."""
    texts = {kind: {r.tiers.texts.get(kind) for r in runs if r.trace == run.trace} for kind in run.tiers.amounts}
    return max(run.tiers.amounts, key=lambda kind: (len(texts[kind]), kind))


def _panel(axis: TierKind, found: Sequence[tuple[Scenario, Row]]) -> Panel:
    curves: dict[str, list[Point]] = {}
    for run, row in found:
        point = Point(run.tiers.amounts[axis], run.tiers.texts[axis], row)
        curves.setdefault(run.label, []).append(point)
    run, row = found[0]
    in_bytes = not run.tiers.measure.whole
    others = [f"{kind.name.lower()} {run.tiers.texts[kind]}" for kind in KINDS if kind in run.tiers.amounts]
    unit = "bytes" if in_bytes else "share of the distinct blocks"
    return Panel(
        trace=short_name(row["trace"]),
        axis=f"{axis.name.lower()} tier, {unit}",
        beside=", ".join(text for text in others if not text.startswith(axis.name.lower())),
        in_bytes=in_bytes,
        curves=[Curve(policy, sorted(points, key=lambda p: p.x)) for policy, points in curves.items()],
    )
