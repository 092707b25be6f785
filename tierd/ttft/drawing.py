"""Time to first token against prefix length: as a picture by matplotlib, and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierd.pictures import require_matplotlib
from tierd.ttft.report import BAR_PREFIX, Report, Row
from tierd.units import format_bytes

COLOURS = {"device": "#000000", "host": "#0072b2", "nvme": "#d55e00", "nowhere": "#009e73"}
"""Colour-blind people distinguish them too (M. Okabe and K. Ito)."""
DASHES: Mapping[str, Any] = {"": "-", "by layer": "-", "whole": (0, (5, 2)), "advised": ""}
MARKS = {
    "device": "d",
    "host whole": "H",
    "host by layer": "h",
    "nvme whole": "N",
    "nvme by layer": "n",
    "nowhere": "c",
}
"""Letters of the series in a text plot. Advised ones lie on others."""
STALLS = {"call": "waits for the call", "disk": "for the disk", "link": "for the link", "compute": "computes"}
"""Of a timeline: what the engine does, in the order of Row.layers."""
STALL_COLOURS = {"call": "#cc79a7", "disk": "#d55e00", "link": "#56b4e9", "compute": "#999999"}
SIGNS = {"call": "?", "disk": "n", "link": "-", "compute": "#"}
PLOT_LINES, COLUMNS_PER_PREFIX = 14, 9


def name_of(row: Row) -> str:
    """The row's series, such as "host by layer"."""
    return f"{row['source']} {row['how']}".rstrip()


def series_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each series."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(name_of(row), []).append(row)
    return found


def tokens_text(tokens: float) -> str:
    """`8 Ki` for 8192."""
    return f"{tokens / 1024:.3g} Ki" if tokens >= 1024 else f"{tokens:.0f}"


def draw(report: Report, path: Path) -> None:
    """Writes a picture of curves and timelines; the ending gives its format. Raises Unsupported without
    matplotlib, OSError."""
    figure = require_matplotlib()(figsize=(13.5, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(left, report)
    _draw_timelines(right, timelined(report["rows"]))
    for axes in (left, right):
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=140)


def _draw_curves(axes: Any, report: Report) -> None:
    for name, rows in series_of(report["rows"]).items():
        _draw_series(axes, name, rows)
    for crossing in report["crossovers"]:
        if crossing["prefix"]:
            _draw_crossing(axes, crossing["source"], crossing["prefix"])
    prefixes = sorted({row["prefix"] for row in report["rows"]})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(prefixes, [tokens_text(prefix) for prefix in prefixes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("prefix, tokens")
    axes.set_ylabel("time to first token, s")
    axes.set_title(title_of(report), loc="left", fontsize=10)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.legend(frameon=False, handlelength=3.2, fontsize=9)


def timelined(rows: Sequence[Row]) -> list[Row]:
    """The rows whose timelines are shown: of the first prefix to which the bars apply, else the longest."""
    prefixes = {row["prefix"] for row in rows}
    shown = min((prefix for prefix in prefixes if prefix >= BAR_PREFIX), default=max(prefixes))
    return [row for row in rows if row["prefix"] == shown and row["how"] != "advised"]


def _draw_timelines(axes: Any, rows: Sequence[Row]) -> None:
    for y, row in enumerate(rows):
        at = 0.0
        spans: dict[str, list[tuple[float, float]]] = {name: [] for name in STALLS}
        for layer in row["layers"]:
            for name, seconds in zip(STALLS, layer, strict=True):
                spans[name].append((1e3 * at, 1e3 * seconds))
                at += seconds
        for name, found in spans.items():
            axes.broken_barh(found, (y - 0.32, 0.64), color=STALL_COLOURS[name], label=STALLS[name] if y == 0 else None)
    axes.set_yticks(range(len(rows)), [name_of(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("ms since the request")
    axes.set_title(f"prefix of {tokens_text(rows[0]['prefix'])}: what the engine does", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def _draw_series(axes: Any, name: str, rows: Sequence[Row]) -> None:
    colour, how = COLOURS[rows[0]["source"]], rows[0]["how"]
    xs, ys = [row["prefix"] for row in rows], [row["first_token_s"] for row in rows]
    label = "computed" if rows[0]["source"] == "nowhere" else name
    if how == "advised":
        axes.plot(xs, ys, "o", color=colour, markersize=9, fillstyle="none", label=label)
        return
    axes.plot(xs, ys, marker=".", color=colour, linestyle=DASHES[how], linewidth=1.8, label=label)
    if how == "by layer":
        axes.plot(xs, [row["bound_s"] for row in rows], ":", color=colour, linewidth=1.2, label=f"{name}, bound")


def _draw_crossing(axes: Any, source: str, prefix: float) -> None:
    axes.axvline(prefix, color=COLOURS[source], linewidth=1.0, alpha=0.5)
    text = f"{source}: load from {tokens_text(prefix)} on"
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "rotation": 90, "fontsize": 8}
    axes.annotate(text, (prefix, 0.02), (3, 0), color=COLOURS[source], **place)


def title_of(report: Report) -> str:
    """The machine and the shape, in two lines."""
    machine, shape = report["setup"]["machine"], report["setup"]["shape"]
    assert isinstance(machine, dict)
    assert isinstance(shape, dict)
    return (
        f"link {machine['link_bytes_per_s'] / 1e9:g} GB/s, disk {machine['disk_bytes_per_s'] / 1e9:g} GB/s, prefill"
        f" {machine['prefill_tokens_per_s']:,.0f} tokens/s, half of it at {machine['half_context']:,.0f}\n"
        f"{shape['layers']} layers, {format_bytes(round(shape['token_bytes']))} a token; bytes and bandwidths scaled down"
        f" {report['setup']['scale']} times"
    )


def text_plot(report: Report) -> list[str]:
    """The curves as lines of text, both axes logarithmic. A later series lies over an earlier one."""
    series = {name: rows for name, rows in series_of(report["rows"]).items() if name in MARKS}
    times = [row["first_token_s"] for rows in series.values() for row in rows]
    low, high = math.log(min(times)), math.log(max(times))
    prefixes = sorted({row["prefix"] for rows in series.values() for row in rows})
    cells = [[" "] * (COLUMNS_PER_PREFIX * len(prefixes)) for _ in range(PLOT_LINES)]
    for name, rows in series.items():
        for row in rows:
            share = (math.log(row["first_token_s"]) - low) / (high - low or 1.0)
            line = cells[PLOT_LINES - 1 - round(share * (PLOT_LINES - 1))]
            column = COLUMNS_PER_PREFIX * prefixes.index(row["prefix"]) + list(MARKS).index(name)
            line[column] = MARKS[name]
    labels = {0: f"{max(times):.3g} s", PLOT_LINES - 1: f"{min(times):.3g} s"}
    lines = [f"{labels.get(i, ''):>8} |{''.join(line)}".rstrip() for i, line in enumerate(cells)]
    ticks = "".join(tokens_text(prefix).ljust(COLUMNS_PER_PREFIX) for prefix in prefixes)
    legend = ", ".join(
        f"{mark} {'computed' if name == 'nowhere' else name}" for name, mark in MARKS.items() if name in series
    )
    return [*lines, f"{'':>8} +{'-' * COLUMNS_PER_PREFIX * len(prefixes)}", f"{'tokens':>8}  {ticks}".rstrip(), legend]


def timeline_text(row: Row, *, width: int, longest_s: float) -> str:
    """The engine's work in each part of the time to first token: `width` columns for longest_s.

    Each column shows what took most of its time.
    """
    columns = max(1, round(width * row["first_token_s"] / longest_s))
    each = row["first_token_s"] / columns
    spent = [dict.fromkeys(STALLS, 0.0) for _ in range(columns)]
    at = 0.0
    for layer in row["layers"]:
        for name, seconds in zip(STALLS, layer, strict=True):
            end = at + seconds
            for column in range(int(at / each), min(columns, int(end / each) + 1)):
                spent[column][name] += max(0.0, min(end, (column + 1) * each) - max(at, column * each))
            at = end
    return "".join(SIGNS[max(STALLS, key=part.__getitem__)] for part in spent)
