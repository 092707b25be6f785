"""Rows as a picture, by matplotlib: each ratio beside its bar and its goal.

Two panels for two kinds of ratios: shares of a limit, of which more is better, and multiples of a
price, of which less is. A line spans the quartiles of the runs. matplotlib is imported only when a
picture is made; tierd does not require it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierd.pictures import require_matplotlib
from tools.bench.promises import Verdict
from tools.bench.rows import Row
from tools.bench.table import short

COLOURS = {
    Verdict.BELOW_BAR: "#d55e00",
    Verdict.BELOW_GOAL: "#e69f00",
    Verdict.GOAL: "#009e73",
    Verdict.NOTHING_PROMISED: "#888888",
}
"""Colour-blind people distinguish them too (M. Okabe and K. Ito)."""
ROW_INCHES, WIDTH_INCHES = 0.34, 11.0
FARTHEST = 4.0
"""Multiples of a limit at the axis's end; a ratio beyond shows as its number."""
BAR, GOAL = "#444444", "#009e73"


def draw(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Writes the picture; the suffix selects its format. Raises Unsupported without matplotlib,
    OSError."""
    panels = [
        ("share of the limit (more is better)", [row for row in rows if not row.at_most]),
        ("multiple of the limit (less is better)", [row for row in rows if row.at_most]),
    ]
    panels = [(label, shown) for label, shown in panels if shown]
    heights = [len(shown) + 1.6 for _, shown in panels]
    figure = require_matplotlib()(figsize=(WIDTH_INCHES, ROW_INCHES * sum(heights) + 1.2), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for each, (label, shown) in zip(axes, panels, strict=True):
        _draw_panel(each, shown, label)
    figure.suptitle(f"tierd bench: medians against limits of the same run\n{title}", x=0.01, ha="left", fontsize=10)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _draw_panel(axes: Any, rows: Sequence[Row], label: str) -> None:
    for y, row in enumerate(rows):
        _draw_row(axes, y, row)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    farthest = max([1.05, *(max(row.high, row.goal or 0, row.bar or 0) for row in rows)])
    axes.set_xlim(0, 1.08 * min(farthest, FARTHEST))
    axes.axvline(1.0, color="#bbbbbb", linewidth=1.0, zorder=0)
    axes.set_xlabel(label, fontsize=9)
    axes.grid(axis="x", color="#eeeeee", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_row(axes: Any, y: float, row: Row) -> None:
    colour = COLOURS[row.verdict]
    axes.barh(y, row.ratio, height=0.5, color=colour, alpha=0.35, zorder=1)
    axes.plot([row.low, row.high], [y, y], color=colour, linewidth=2.2, zorder=2)
    axes.plot([row.ratio], [y], "o", color=colour, markersize=6, zorder=3)
    for place, tick in ((row.bar, BAR), (row.goal, GOAL)):
        if place is not None:
            axes.plot([place, place], [y - 0.36, y + 0.36], color=tick, linewidth=2.4, zorder=4)
    text = f"{row.ratio:.2f}   ({short(row.value)} of {short(row.limit)} {row.unit})"
    axes.annotate(
        text,
        (1.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    dots = [Line2D([], [], marker="o", linestyle="", color=COLOURS[v], label=v.value) for v in COLOURS]
    dots.append(Line2D([], [], linewidth=2.2, color=COLOURS[Verdict.NOTHING_PROMISED], label="quartiles"))
    ticks = [Line2D([], [], marker="|", markersize=11, markeredgewidth=2.4, linestyle="", color=c) for c in (BAR, GOAL)]
    for tick, word in zip(ticks, ("bar", "goal"), strict=True):
        tick.set_label(word)
    return dots + ticks
