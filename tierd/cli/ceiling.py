"""The verb `ceiling`: the hit ratio that more or less memory would have given.

The daemon estimates it (tierd/ceiling). `top` and the page show `ceiling_line`.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.ask import Ask, looking
from tierd.cli.figures import human_bytes, human_count, human_seconds, human_share
from tierd.cli.help import example
from tierd.cli.render import Cell, Column, facts, show_table

COLUMNS = (
    Column("window", style="bold", right=True),
    Column("observed", right=True, spare=2),
    Column("tokens", right=True, spare=1),
    Column("memory", right=True),
    Column("of now", right=True),
    Column("hits", right=True),
)


@click.command(epilog=example("tierctl ceiling --watch 60"))
@looking
def ceiling(ask: Ask) -> None:
    """Shows the hit ratio that more memory would have given, over 15 minutes, an hour, a day.

    The daemon simulates other sizes of its tiers on a sample of the blocks. `memory` is host memory
    and stores together. In JSON a factor of 0 means no limit.
    """
    with ask.connect() as daemon:
        answer = daemon.ask(pb.CeilingRequest())
    ask.show(answer, draw_ceiling)


def draw_ceiling(console: Console, reply: pb.CeilingReply) -> None:
    """Prints the line, then a row for each window and size."""
    console.print(ceiling_line(reply), soft_wrap=True)
    rows = [row for window in telling(reply) for row in rows_of(window)]
    if rows:
        console.print()
        show_table(console, COLUMNS, rows, empty="")
        lost = f"; {human_count(reply.lost)} calls were too many at once and are left out" if reply.lost else ""
        console.print(
            Text(f"simulated on {human_share(reply.rate, 1)} of the blocks{lost}", style="dim"), soft_wrap=True
        )


def telling(reply: pb.CeilingReply) -> list[pb.CeilingWindow]:
    """The windows with requests, without those that have observed no more than a shorter one."""
    seen_s, found = 0.0, []
    for window in reply.windows:
        if window.points and window.covered_s > seen_s:
            found.append(window)
        seen_s = window.covered_s
    return found


def name_of(window: pb.CeilingWindow) -> str:
    """`15 min`, `1 h`."""
    return f"{window.seconds / 60:g} min" if window.seconds < 3600 else f"{window.seconds / 3600:g} h"


def rows_of(window: pb.CeilingWindow) -> Iterator[list[Cell]]:
    """The measured share of a window, then the share at each size."""
    asked = human_count(window.tokens)
    head: list[Cell] = [name_of(window), human_seconds(window.covered_s), asked]
    yield [*head, "", "measured", human_share(window.hit_ratio, 1)]
    for point in window.points:
        memory = human_bytes(point.bytes) if point.factor else "no limit"
        yield ["", "", "", memory, f"{point.factor:g} x" if point.factor else "", human_share(point.hit_ratio, 1)]


def ceiling_line(reply: pb.CeilingReply) -> Text:
    """`ceiling over 1 h at 320 GiB 41.0 %   at 640 GiB 52.0 %   at 1.25 TiB 58.1 %   no limit 61.0 %`.

    Of the longest window that has been observed whole, else of the shortest one.
    """
    if reply.trouble:
        return facts([("ceiling", f"- ({reply.trouble})")])
    windows = telling(reply)
    if not windows:
        return facts([("ceiling", "- (no tokens asked for)")])
    window = [windows[0], *(window for window in windows if window.covered_s >= window.seconds)][-1]
    points = [point for point in window.points if not 0 < point.factor < 1]
    shares = [
        (f"at {human_bytes(point.bytes)}" if point.factor else "no limit", human_share(point.hit_ratio, 1))
        for point in points
    ]
    return facts([("ceiling over", name_of(window)), *shares])
