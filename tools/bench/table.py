"""Rows as a table for a terminal: red below their bar, yellow below their goal, green at it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from tools.bench.promises import Verdict
from tools.bench.rows import Row

COLOURS = {
    Verdict.BELOW_BAR: "red",
    Verdict.BELOW_GOAL: "yellow",
    Verdict.GOAL: "green",
    Verdict.NOTHING_PROMISED: "default",
}
COLUMNS = ("row", "value", "limit", "ratio (quartiles)", "bar, goal", "CPU s/GB")
MEANING = "what it is"
WIDE = 140
"""Columns of a terminal from which on rows are explained."""


def table_of(rows: Sequence[Row], *, title: str, is_wide: bool = True) -> Table:
    """One line for each row. is_wide: with each row's meaning."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "row" else "right", no_wrap=True)
    if is_wide:
        table.add_column(MEANING, overflow="fold", style="dim")
    for row in rows:
        table.add_row(*cells_of(row)[: None if is_wide else -1])
    return table


def cells_of(row: Row) -> tuple[str, ...]:
    """Of one row, the ratio in the colour of its verdict."""
    promised = [f"{each:.2f}" for each in (row.bar, row.goal) if each is not None]
    return (
        row.name,
        f"{short(row.value)} {row.unit}",
        short(row.limit),
        f"[bold {COLOURS[row.verdict]}]{row.ratio:.2f}[/] [dim]({row.low:.2f} to {row.high:.2f})[/]",
        f"{'≤' if row.at_most else '≥'} {', '.join(promised)}" if promised else "",
        "" if row.cpu_s_per_gb is None else f"{row.cpu_s_per_gb:.2f}",
        f"{row.meaning}; {row.runs} runs",
    )


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def counts_of(rows: Sequence[Row]) -> str:
    """How many rows have each verdict, in a line."""
    found = [row.verdict for row in rows]
    told = [f"{found.count(verdict)} {verdict.value}" for verdict in Verdict if verdict in found]
    return ", ".join(told)
