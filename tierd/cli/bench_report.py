"""The report of `tierctl bench ttft` as text: rows, bars, crossovers, a timeline, the curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tierd.cli.figures import human_rate, human_seconds, human_share
from tierd.cli.render import Cell, Column, show_table
from tierd.ttft.drawing import SIGNS, STALLS, name_of, text_plot, timeline_text, timelined, tokens_text
from tierd.ttft.report import Bar, Report, Row
from tierd.ttft.timeline import Source

COLUMNS = (
    Column("prefix", right=True),
    Column("from", style="bold"),
    Column("loaded", right=True, spare=3),
    Column("first token", right=True),
    Column("runs from", right=True, spare=5),
    Column("to", right=True, spare=5),
    Column("bound", right=True, spare=1),
    Column("of bound", right=True, spare=1),
    Column("call", right=True, spare=2),
    Column("disk", right=True),
    Column("link", right=True),
    Column("computed", right=True, spare=2),
)
"""bound: by arithmetic. call, disk, link: waited for these."""
VERDICTS = {"kept": "green", "broken": "red", "arithmetic forbids it": "yellow"}


def show_report(console: Console, report: Report) -> None:
    """Prints the rows, the bars, the timelines of one prefix, and the curves."""
    rows = sorted(report["rows"], key=lambda row: row["prefix"])
    show_table(console, COLUMNS, [cells_of(row) for row in rows], empty="no rows")
    lines = [
        "",
        scale_line(report),
        *(bar_line(bar) for bar in report["bars"]),
        *crossing_lines(report),
        "",
        *timeline_lines(rows, width=max(20, min(console.width, 120) - 18)),
        "",
        *text_plot(report),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


def cells_of(row: Row) -> Sequence[Cell]:
    """One row, in the order of COLUMNS."""
    seconds = (human_seconds(row[name]) for name in ("first_token_s", "low_s", "high_s", "bound_s"))
    waits = (human_seconds(row[name]) for name in ("call_s", "disk_s", "link_s", "compute_s"))
    loaded = tokens_text(row["loaded"]) if row["loaded"] else "-"
    ratio = f"{row['first_token_s'] / row['bound_s']:.2f}"
    return [tokens_text(row["prefix"]), name_of(row), loaded, *seconds, ratio, *waits]


def scale_line(report: Report) -> str:
    """The rates of this machine that stand for those of the other."""
    setup = report["setup"]
    real: Any = setup["machine"]
    here: Any = setup["scaled_machine"]
    rates = (
        f"{name} {human_rate(here[key])} for {human_rate(real[key])}"
        for name, key in (("link", "link_bytes_per_s"), ("disk", "disk_bytes_per_s"))
    )
    return f"scaled down {setup['scale']} times: {', '.join(rates)}; the times are those of the machine"


def bar_line(bar: Bar) -> Text:
    """The share that a load adds, against its bar and what arithmetic allows."""
    parts = (
        f", in the daemon's {bar['parts']} reads {human_share(bar['limit_in_parts'], 1)}"
        if bar["source"] == Source.NVME
        else ""
    )
    said = (
        f"{bar['source']}, {tokens_text(bar['prefix'])}: by layer adds {human_share(bar['added'], 1)} to the device's time"
        f" (bar {100 * bar['bar']:.0f} %, arithmetic {human_share(bar['limit'], 1)}{parts}): "
    )
    return Text(said).append(bar["verdict"], VERDICTS[bar["verdict"]])


def crossing_lines(report: Report) -> list[str]:
    """From which prefix on each source is faster than computing."""
    return [f"{each['source']}: {crossing_text(each['prefix'])}" for each in report["crossovers"]]


def crossing_text(prefix: float | None) -> str:
    """From which length on loading by layer is faster."""
    if prefix is None:
        return "computing is faster at the longest prefix"
    return (
        f"loading by layer is faster from {tokens_text(prefix)} on" if prefix else "loading by layer is always faster"
    )


def timeline_lines(rows: Sequence[Row], *, width: int) -> list[str]:
    """The engine's work during each series' median run of one prefix."""
    mine = timelined(rows)
    most_s = max(row["first_token_s"] for row in mine)
    legend = ", ".join(f"{SIGNS[name]} {text}" for name, text in STALLS.items())
    lines = [f"{name_of(row):<15} {timeline_text(row, width=width, longest_s=most_s)}" for row in mine]
    prefix = tokens_text(mine[0]["prefix"])
    return [f"prefix of {prefix}, {human_seconds(most_s)} from left to right: {legend}", *lines]
