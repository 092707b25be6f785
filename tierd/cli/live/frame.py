"""The picture of `tierctl top`: a head and four panes that share a terminal's lines.

Pure: a frame is a function of answers, view and size, and never larger than that size. The focused
pane gets its lines first.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.figures import human_bytes, human_count, human_share
from tierd.cli.hits import hits_of
from tierd.cli.live.rows import Rows, shown_rows, tables_of
from tierd.cli.live.sampling import Change, Rare
from tierd.cli.live.view import HELP, PANES, View
from tierd.cli.look import load_line, status_line
from tierd.cli.render import (
    GAP_COLUMNS,
    Cell,
    Column,
    aligned_text,
    facts,
    fitting,
    widths_of,
    without_bars,
)

TITLE_LINES = 2
"""Of a pane: its title and the names of its columns."""
FEW_ROWS = 2
"""Of a pane without focus, while there is room for its title."""
CEILING_S = 3600.0


def frame(console: Console, change: Change, rare: Rare, view: View, *, trouble: str = "") -> Text:
    """One picture, at most as large as the terminal."""
    width, height = console.size
    lines = head_lines(change, rare, width=width, trouble=trouble)
    if view.is_helping:
        lines += [Text(line) for line in HELP.splitlines()]
    else:
        lines += pane_lines(console, change, rare, view, room=height - len(lines) - 1)
    del lines[height - 1 :]
    lines += [Text()] * (height - 1 - len(lines)) + [foot_line(view)]
    for line in lines:
        line.truncate(width)
    return Text("\n", no_wrap=True, end="").join(lines)


def head_lines(change: Change, rare: Rare, *, width: int, trouble: str) -> list[Text]:
    """State, load, hit ratio, queues and wear, and a line for each thing that is amiss."""
    status = change.after.status
    busy = human_share(change.per_second(change.before.status.cpu_s, status.cpu_s), 1)
    since_start, now = hits_of(status.counters), change.hits
    hits = facts(
        [
            ("hit ratio now", Text(share_of(now.hit, now.asked), style="bold")),
            ("since start", share_of(since_start.hit, since_start.asked)),
        ]
    )
    queues: list[tuple[str, Cell]] = [(name, human_count(count)) for name, count in sorted(status.queues.items())]
    lines = [status_line(status), load_line(status, busy=busy), hits]
    wear: list[tuple[str, Cell]] = [(store.tier, wear_text(store)) for store in rare.wear.stores]
    rows = (("queues", queues), ("written", wear), ("ceiling", ceiling_facts(rare.ceiling)))
    lines += [fitted(name, pairs, width=width) for name, pairs in rows if pairs]
    if trouble:
        lines.insert(0, Text(f"no answer, trying again: {trouble}", style="red"))
    sick = [tier for tier in change.after.tiers.tiers if tier.trouble]
    return lines + [Text(f"{tier.name}: {tier.trouble}", style="red") for tier in sick[:1]]


def share_of(hit: int, asked: int) -> str:
    """`80.0 % of 1,000 tokens`."""
    return f"{human_share(hit, asked)} of {human_count(asked)} tokens" if asked else "- (no tokens asked for)"


def wear_text(store: pb.StoreWear) -> str:
    """`812 GiB today, 101 GiB left`: written by a store, and left of its budget."""
    left = f", {human_bytes(max(0.0, store.budget_left_bytes))} left" if store.has_budget else ""
    return f"{human_bytes(store.written_today_bytes)} today{left}"


def ceiling_facts(ceiling: pb.CeilingReply) -> list[tuple[str, Cell]]:
    """Expected hit ratios by memory, of the hour or the window nearest to it. Bold: of this memory."""
    windows = [window for window in ceiling.windows if window.points]
    if ceiling.trouble or not windows:
        return []
    window = min(windows, key=lambda one: abs(one.seconds - CEILING_S))
    return [
        (
            human_bytes(one.bytes) if one.bytes else "no limit",
            Text(human_share(one.hit_ratio, 1), "bold" if one.factor == 1 else ""),
        )
        for one in window.points
    ]


def fitted(name: str, pairs: Sequence[tuple[str, Cell]], *, width: int) -> Text:
    """The name and as many facts, from the first on, as the width holds."""
    lead = Text(f"{name}  ")
    lines = [lead + facts(pairs[:count]) for count in range(len(pairs) + 1)]
    return next(line for line in (*reversed(lines), lead) if line.cell_len <= width or line is lead)


def foot_line(view: View) -> Text:
    """The panes and the keys, or the filter while it is typed."""
    if view.is_typing:
        return Text.assemble(("filter: ", "bold"), view.filters[view.pane], ("_", "blink"))
    parts = [(f"{place + 1} {name}", "bold cyan" if place == view.focus else "") for place, name in enumerate(PANES)]
    line = Text("  ").join(Text(text, style=style) for text, style in parts)
    line.append("   s sort  / filter  p pause  ? help  q quit", style="dim")
    if view.is_paused:
        line = Text.assemble(("paused  ", "bold yellow"), line)
    return line


def pane_lines(console: Console, change: Change, rare: Rare, view: View, *, room: int) -> list[Text]:
    """The panes, from the first to the last, in so many lines."""
    tables = tables_of(change, rare, view)
    chosen = [shown_rows(rows, view.filters[pane]) for pane, (_, rows) in zip(PANES, tables, strict=True)]
    heights = shares([TITLE_LINES + max(1, len(rows)) for rows in chosen], focus=view.focus, room=room)
    lines: list[Text] = []
    for pane, (columns, rows), kept, height in zip(PANES, tables, chosen, heights, strict=True):
        if height:
            lines += one_pane(console, view, pane, (columns, rows, kept), height=height)
    return lines


def shares(wanted: Sequence[int], *, focus: int, room: int) -> list[int]:
    """The lines of each pane, together at most `room`.

    The focused one gets two thirds if it wants them, and each other a few. The rest goes to the
    focused one up to its wish, then equally to the others."""
    given, order = [0] * len(wanted), sorted(range(len(wanted)), key=lambda place: place != focus)
    for place in order:
        few = TITLE_LINES + FEW_ROWS if place != focus else max(TITLE_LINES + FEW_ROWS, room * 2 // 3)
        least = min(wanted[place], few, room)
        if least > TITLE_LINES:
            given[place], room = least, room - least
    more = min(wanted[focus] - given[focus], room) if given[focus] else 0
    given[focus], room = given[focus] + more, room - more
    while wishing := [place for place in order if 0 < given[place] < wanted[place]]:
        for place in wishing[:room]:
            given[place] += 1
        room -= len(wishing)
        if room <= 0:
            break
    return given


def one_pane(
    console: Console, view: View, pane: str, table: tuple[Sequence[Column], Rows, Rows], *, height: int
) -> list[Text]:
    """A pane's title, columns and rows. table: columns, all rows, and those that the filter keeps."""
    columns, rows, kept = table
    width, room = console.width, height - TITLE_LINES
    start = view.offsets[pane] = min(view.offsets[pane], max(0, len(kept) - room))
    said = [f"by {view.sort_of(pane)}"]
    if view.filters[pane]:
        said.append(f"with {view.filters[pane]!r}: {len(kept)} of {len(rows)}")
    if start or len(kept) > room:
        last = min(len(kept), start + room)
        said.append(f"{start + 1} to {last} of {len(kept)}")
    is_focused = pane == view.pane
    title = Text.assemble(
        (f"── {PANES.index(pane) + 1} {pane} ", "bold cyan" if is_focused else "bold"), (", ".join(said), "dim"), " "
    )
    title.append("─" * max(0, width - title.cell_len), style="cyan" if is_focused else "bright_black")
    shown = kept[start : start + room]
    if not shown:
        return [title, Text("no row has this text" if rows else "nothing yet", style="dim")]
    return [title, *table_lines(*without_bars(console, columns, shown), width=width)]


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, width: int) -> list[Text]:
    """The names of the columns that fit, and the rows, without rules."""
    widths = widths_of(columns, rows)
    shown = [(i, columns[i]) for i in fitting(columns, widths, width=width)]
    head = [Text(column.name, style="dim") for _, column in shown]
    body = [[as_text(row[i], style=column.style) for i, column in shown] for row in rows]
    gap = Text(" " * GAP_COLUMNS)
    return [
        gap.join(
            aligned_text(cell, widths[i], right=column.right) for cell, (i, column) in zip(cells, shown, strict=True)
        )
        for cells in (head, *body)
    ]


def as_text(cell: Cell, *, style: str) -> Text:
    """The cell as text; one that has a style keeps it."""
    return cell if isinstance(cell, Text) else Text(cell, style=style)
