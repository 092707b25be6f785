"""Curves as a picture file, PNG or SVG, by matplotlib; page.py makes pages.

matplotlib is no requirement of tierd: it is imported only when a picture is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierd.pictures import require_matplotlib
from tierd.simulator.choices import CLAIRVOYANT, DEFAULT
from tierd.simulator.rows import Curve, Panel
from tierd.units import format_bytes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6bd0", "#8c564b")
"""Mostly distinct for colour-blind people too (M. Okabe and K. Ito); further lines are dashed."""
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
BOUND = "#888888"
COLUMNS = 2
PANEL_INCHES = (5.6, 4.0)


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Writes a picture; the ending gives its format. Raises Unsupported without matplotlib,
    OSError."""
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    policies = list(dict.fromkeys(curve.policy for panel in panels for curve in panel.curves))
    legend_lines = -(-len(policies) // (3 * columns))
    inches = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines + 0.3 + 0.25 * legend_lines)
    figure = require_matplotlib()(figsize=inches, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    for panel, axes in zip(panels, figure.subplots(lines, columns, squeeze=False).flat, strict=False):
        _draw_panel(axes, panel, policies)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    shown: dict[str, Any] = {}
    for axes in figure.axes:
        shown |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=3 * columns, frameon=False, handlelength=3.2
    )
    figure.savefig(path, dpi=160)


def _draw_panel(axes: Any, panel: Panel, policies: Sequence[str]) -> None:
    for curve in panel.curves:
        xs = [point.x for point in curve.points]
        misses = [100 * (1 - point.row["prefix_token_hit"]) for point in curve.points]
        (line,) = axes.plot(xs, misses, label=curve.policy, **_style(curve, policies))
        axes.plot(xs, misses, "o", markersize=3.5, color=line.get_color(), zorder=line.get_zorder())
        if curve.policy == CLAIRVOYANT and panel.is_exact and len(xs) > 1:
            axes.fill_between(xs, misses, color=BOUND, alpha=0.12, linewidth=0)
    values = [100 * (1 - point.row["prefix_token_hit"]) for curve in panel.curves for point in curve.points]
    margin = 0.05 * (max(values) - min(values) or 1.0)
    axes.set_ylim(max(0.0, min(values) - margin), max(values) + margin)
    ticks = {point.x: point.text for curve in panel.curves for point in curve.points}
    axes.set_xscale("log")
    axes.set_xticks(_apart(sorted(ticks)), [_tick(x, panel) for x in _apart(sorted(ticks))])
    axes.minorticks_off()
    axes.set_title(panel.trace + (f" ({panel.beside})" if panel.beside else ""), loc="left", weight="bold")
    axes.set_xlabel(panel.axis)
    axes.set_ylabel("prompt tokens missed, %")
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _style(curve: Curve, policies: Sequence[str]) -> dict[str, Any]:
    """Colour and dashes of a policy; the bound is grey and dashed."""
    if curve.is_bound:
        return {"color": BOUND, "linestyle": (0, (4, 3)), "linewidth": 1.4, "zorder": 1.5}
    if curve.policy == DEFAULT:
        return {"color": "black", "linewidth": 2.6, "zorder": 3}
    number = [policy for policy in policies if policy != DEFAULT and CLAIRVOYANT not in policy].index(curve.policy)
    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes, "linewidth": 1.8}


def _apart(xs: Sequence[float]) -> list[float]:
    """Those of the sorted sizes whose labels do not overlap."""
    span = math.log(xs[-1] / xs[0]) or 1.0
    kept: list[float] = []
    for x in xs:
        if not kept or math.log(x / kept[-1]) > 0.07 * span:
            kept.append(x)
    return kept


def _tick(x: float, panel: Panel) -> str:
    return format_bytes(round(x)) if panel.in_bytes else f"{100 * x:.2g} %"
