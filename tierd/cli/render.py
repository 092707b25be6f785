"""Output of answers: tables with colors and bars, aligned plain text in a pipe, or JSON.

All verbs use it, and it does not know their content. Without a terminal there is no color, no cut
and no bar. A table too wide for the terminal drops whole columns, the least needed first. JSON
carries raw numbers and whole hashes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.message import Message
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierd.cli.figures import human_share

GAP_COLUMNS = 2
"""Spaces between two columns of a table."""
WIDE_COLUMNS = 1000
"""Width of a console that shows every column."""

Cell = str | Text
Row = Sequence[Cell]


@dataclass(frozen=True, slots=True)
class Column:
    """One column. right: aligned right, as numbers are. is_bar: gauges, shown only with color.

    spare: above 0, the column may be dropped; the highest value first.
    """

    name: str
    right: bool = False
    style: str = ""
    spare: int = 0
    is_bar: bool = False


def new_console(*, is_wide: bool = False) -> Console:
    """A console that respects NO_COLOR and dumb terminals. is_wide: the terminal may wrap lines."""
    return Console(highlight=False, markup=False, emoji=False, width=WIDE_COLUMNS if is_wide else None)


def has_colour(console: Console) -> bool:
    """Whether the filled part of a bar can be distinguished from the rest."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def show_table(console: Console, columns: Sequence[Column], rows: Iterable[Row], *, empty: str) -> None:
    """Prints the rows, or the sentence `empty` if there are none."""
    held = list(rows)
    if not held:
        console.print(Text(empty, style="dim"))
    elif console.is_terminal:
        draw_table(console, columns, held)
    else:
        print("\n".join(plain_lines(columns, held)))


def draw_table(console: Console, columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Prints the rows on a terminal, and names the columns that do not fit."""
    columns, rows = without_bars(console, columns, rows)
    shown = fitting(columns, widths_of(columns, rows), width=console.width)
    console.print(new_table(columns, rows, width=console.width))
    hidden = [column.name for i, column in enumerate(columns) if i not in shown and column.name]
    if hidden:
        said = f"no room for: {', '.join(hidden)} (`-o wide` shows them)"
        console.print(Text(said, style="dim"))


def without_bars(
    console: Console | None, columns: Sequence[Column], rows: Sequence[Row]
) -> tuple[Sequence[Column], Sequence[Row]]:
    """The columns and the rows, without gauges if there is no color. console: None for a pipe."""
    if console is not None and has_colour(console):
        return columns, rows
    kept = [i for i, column in enumerate(columns) if not column.is_bar]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def new_table(columns: Sequence[Column], rows: Sequence[Row], *, width: int) -> Table:
    """The rows as a rich table for a terminal of this width."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, GAP_COLUMNS - 1))
    shown = fitting(columns, widths_of(columns, rows), width=width)
    for i in shown:
        column = columns[i]
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(column.name, justify=justify, style=column.style, no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def fitting(columns: Sequence[Column], widths: Sequence[int], *, width: int) -> list[int]:
    """Indices of the columns to show: spare ones are dropped, highest first, until the rest fits."""
    shown = list(range(len(columns)))
    while sum(widths[i] + GAP_COLUMNS for i in shown) - GAP_COLUMNS > width:
        last = max(shown, key=lambda i: columns[i].spare)
        if not columns[last].spare:
            break
        shown.remove(last)
    return shown


def widths_of(columns: Sequence[Column], rows: Sequence[Row]) -> list[int]:
    """The natural width of each column."""
    return [max(len(column.name), *(cell_len(str(row[i])) for row in rows), 0) for i, column in enumerate(columns)]


def plain_lines(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """The rows as aligned text, two spaces between columns. Nothing is cut, and bars are dropped."""
    columns, rows = without_bars(None, columns, rows)
    widths = widths_of(columns, rows)
    lines = [[column.name for column in columns], *([str(cell) for cell in row] for row in rows)]
    return [plain_line(columns, line, widths=widths) for line in lines]


def plain_line(columns: Sequence[Column], cells: Sequence[str], *, widths: Sequence[int]) -> str:
    """One row as aligned text."""
    fields = (aligned(cell, n, right=column.right) for column, cell, n in zip(columns, cells, widths, strict=True))
    return "  ".join(fields).rstrip()


def aligned(text: str, width: int, *, right: bool) -> str:
    """Text aligned left or right in a field."""
    return text.rjust(width) if right else text.ljust(width)


def aligned_text(text: Text, width: int, *, right: bool) -> Text:
    """The same with colors."""
    pad = Text(" " * max(0, width - text.cell_len))
    return pad + text if right else text + pad


def bar(part: float, whole: float, *, cells: int = 8) -> Text:
    """A gauge. Its color does not depend on its level: a working cache is full."""
    share = min(1.0, max(0.0, part / whole)) if whole else 0.0
    filled = round(share * cells)
    return Text.assemble(("━" * filled, "green"), ("╌" * (cells - filled), "bright_black"))


def full_text(part: float, whole: float, *, is_serving: bool) -> Text:
    """A tier's fill level, or `off`."""
    return Text(human_share(part, whole)) if is_serving else Text("off", style="red")


def facts(pairs: Iterable[tuple[str, Cell]]) -> Text:
    """`name value` pairs in one line, names dim."""
    line = Text()
    for name, value in pairs:
        line += (
            Text("   " if line else "")
            + Text(f"{name} ", style="dim")
            + (value if isinstance(value, Text) else Text(value))
        )
    return line


def state_text(state: str) -> Text:
    """The state of a daemon, session or page in its color; red means trouble."""
    good, bad = ("serving", "open", "ready"), ("quarantined",)
    return Text(state, style="green" if state in good else "red" if state in bad else "yellow")


def show_json(value: Message | Mapping[str, Any] | Sequence[Any], *, indent: int | None = 2) -> None:
    """Prints a message, or plain values, as JSON."""
    print(json.dumps(plain_of(value) if isinstance(value, Message) else value, indent=indent), flush=True)


def plain_of(message: Message) -> dict[str, Any]:
    """A message as plain values by proto field names: hexadecimal bytes, numbers, short enum names."""
    return {field.name: field_plain(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def field_plain(field: Any, value: Any) -> Any:
    """One field's value as plain values. field: its protobuf descriptor."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {str(key): item for key, item in sorted(value.items())}
    if field.is_repeated:
        return [scalar_plain(field, item) for item in value]
    return scalar_plain(field, value)


def scalar_plain(field: Any, value: Any) -> Any:
    """One value of a field as a plain value."""
    if isinstance(value, Message):
        return plain_of(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        return enum_name(field, value)
    return value


def enum_name(field: Any, value: int) -> str:
    """`host` for TIER_KIND_HOST; the bare number if this build does not know the value."""
    known = field.enum_type.values_by_number.get(value)
    return str(known.name).removeprefix("TIER_KIND_").lower() if known else str(value)
