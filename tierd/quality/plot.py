"""Quality against size as a picture, PNG or SVG, by matplotlib, which tierd does not require."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierd.pictures import require_matplotlib
from tierd.quality.rows import Exact, Row

LEAST_KL = 1e-6
"""Smaller divergences are drawn here: the axis is logarithmic."""
LEAST_SPAN = 1.0
"""Per cent shown above and below all shares: smaller differences are noise."""
RESTORE, RECALL = "#0072b2", "#d55e00"
PLAIN_BITS = 16


def draw(rows: Sequence[Row], exact: Exact, path: Path) -> None:
    """Writes a picture; the ending gives its format. Raises Unsupported without matplotlib, OSError."""
    figure = require_matplotlib()(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    bits = [row["bits"] for row in rows]
    for way, colour in (("restore", RESTORE), ("recall", RECALL)):
        kl = [max(LEAST_KL, row[f"{way}_kl"]) for row in rows]  # type: ignore[literal-required]
        left.plot(bits, kl, "o", color=colour, label=way, markersize=5)
    left.set_yscale("log")
    left.set_ylabel("divergence from exact KV, nats a token")
    left.legend(frameon=False)
    shares = [100 * row["recall_top1"] for row in rows]
    bound = 100 * exact["recall_top1"]
    right.axhline(bound, color="#888888", linestyle=(0, (4, 3)), linewidth=1.2)
    right.plot(bits, shares, "o", color=RECALL, markersize=5)
    right.set_ylim(min(*shares, bound) - LEAST_SPAN, max(*shares, bound) + LEAST_SPAN)
    right.set_ylabel("right tokens of a repeated passage, % (line: exact KV)")
    for axes, heights in ((left, [max(LEAST_KL, row["restore_kl"]) for row in rows]), (right, shares)):
        _label(axes, rows, heights)
        _finish(axes, bits)
    figure.savefig(path, dpi=160)


def _label(axes: Any, rows: Sequence[Row], heights: Sequence[float]) -> None:
    """Names the points, of the most bits first: in turns on their left and on their right."""
    ordered = sorted(zip(rows, heights, strict=True), key=lambda pair: -pair[0]["bits"])
    for place, (row, height) in enumerate(ordered):
        name = row["codec"] if row["tokens"] is None else f"{row['codec']} {row['tokens']}"
        side, off = ("right", -5) if place % 2 == 0 else ("left", 5)
        axes.annotate(name, (row["bits"], height), (off, 4), textcoords="offset points", ha=side, fontsize=8)


def _finish(axes: Any, bits: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    ticks = [
        tick for tick in (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, PLAIN_BITS) if 0.8 * min(bits) <= tick <= 1.2 * max(bits)
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("stored bits a value (bfloat16: 16)")
    axes.margins(x=0.12)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
