"""`tierctl top`: the daemon, live.

It samples the Admin service, computes rates from two samples, and draws. It keeps no history. It
always restores the terminal. Without one it prints frame after frame and reads no keys.
"""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import Connection
from tierd.cli.ask import DURATION, Ask, verb
from tierd.cli.figures import human_bytes, human_count, human_rate, human_share
from tierd.cli.help import example
from tierd.cli.hits import Hits, hits_line, hits_of, plain_hits
from tierd.cli.look import SESSION_COLUMNS, load_line, others, session_row, status_line
from tierd.cli.render import Cell, Column, bar, full_text, new_table, plain_lines, plain_of, show_json, without_bars

TOP_COLUMNS = (
    Column("tier", style="bold"),
    Column("used", right=True),
    Column("of", right=True),
    Column("full", right=True),
    Column("", spare=3, is_bar=True),
    Column("blocks", right=True, spare=2),
    Column("pinned", right=True),
    Column("read", right=True),
    Column("write", right=True),
    Column("evict/s", right=True, spare=1),
)
RATE_COLUMNS = (
    Column("metric", style="bold"),
    Column("per s", right=True),
)
RATES_SHOWN = 6
OWN_METHODS = {f'method="{method.name}"' for method in pb.DESCRIPTOR.services_by_name["Admin"].methods}
"""Calls of operators, such as those of `top` itself: hidden."""
SESSIONS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon's answers at one moment. at_s: monotonic seconds."""

    at_s: float
    status: pb.StatusReply
    tiers: pb.TiersReply
    sessions: pb.SessionsReply


@dataclass(frozen=True, slots=True)
class Change:
    """Two samples, the older first; rates are differences over the time between them."""

    before: Sample
    after: Sample

    @property
    def seconds(self) -> float:
        """Time between the samples; never zero."""
        return max(self.after.at_s - self.before.at_s, 1e-6)

    def per_second(self, before: float, after: float) -> float:
        """A counter's rate. A counter that fell (the daemon restarted) counts from zero."""
        return (after - before if after >= before else after) / self.seconds

    @property
    def hits(self) -> Hits:
        """The hits between the samples."""
        return hits_of(self.after.status.counters).since(hits_of(self.before.status.counters))

    def counters(self) -> list[tuple[str, float]]:
        """The counters that grew, with their rates, fastest first."""
        old, new = self.before.status.counters, self.after.status.counters
        rates = [(name, self.per_second(old.get(name, 0), n)) for name, n in new.items() if is_shown(name)]
        return sorted((rate for rate in rates if rate[1] > 0), key=lambda rate: (-rate[1], rate[0]))


@click.command(epilog=example("tierctl top --interval 2s"))
@click.option("--interval", type=DURATION, default="1 s", show_default=True, help="Time between two frames.")
@click.option("--count", type=click.IntRange(1), default=None, help="End after this many frames.")
@verb
def top(ask: Ask, *, interval: float, count: int | None) -> None:
    """Shows the daemon live: hit ratio, tiers, rates, sessions.

    q or Ctrl-C ends it. In a pipe it prints one frame after another.
    """
    with ask.connect() as daemon, contextlib.suppress(KeyboardInterrupt):
        if ask.as_json or not ask.console.is_terminal:
            stream(ask, daemon, interval=interval, count=count or 1)
        else:
            watch(ask.console, daemon, interval=interval, count=count)


def stream(ask: Ask, daemon: Connection, *, interval: float, count: int) -> None:
    """Prints so many frames as text, or as one JSON object a line."""
    before = sample(daemon)
    for _ in range(count):
        time.sleep(interval)
        after = sample(daemon)
        change = Change(before, after)
        if ask.as_json:
            show_json(plain_change(change), indent=None)
        else:
            print(
                "\n".join([*map(str, head_of(change)), *plain_lines(TOP_COLUMNS, tier_rows(change)), ""]),
                flush=True,
            )
        before = after


def watch(console: Console, daemon: Connection, *, interval: float, count: int | None) -> None:
    """Draws on the whole terminal until a key ends it, or until so many frames are drawn."""
    before = after = sample(daemon)
    frames = 0
    with keyboard(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(console, Change(before, after)), refresh=True)
            frames += 1
            if frames == count or key_within(interval) in ("q", "Q", "\x1b", "\x04"):
                return
            before, after = after, sample(daemon)


def sample(daemon: Connection) -> Sample:
    """Requests all data of a frame."""
    status = daemon.ask(pb.StatusRequest())
    tiers = daemon.ask(pb.TiersRequest())
    return Sample(time.monotonic(), status, tiers, daemon.ask(pb.SessionsRequest()))


def frame(console: Console, change: Change) -> Group:
    """One picture: state, load, rates, tiers, and as many sessions as fit."""
    _status, width, height = change.after.status, console.width, console.height
    tiers = new_table(*without_bars(console, TOP_COLUMNS, tier_rows(change)), width=width)
    room = max(1, min(SESSIONS_SHOWN, height - len(change.after.tiers.tiers) - RATES_SHOWN - 15))
    open_ones = sorted(
        others(change.after.sessions.sessions), key=lambda one: (-one.pinned_bytes - one.reserved_bytes, one.id)
    )
    sessions = new_table(SESSION_COLUMNS, [session_row(one) for one in open_ones[:room]], width=width)
    hidden = f"   {len(open_ones) - room} more" if len(open_ones) > room else ""
    foot = Text(f"q quits{hidden}", style="dim")
    return Group(
        *head_of(change), Text(), tiers, Text(), rate_table(change, width=width), Text(), sessions, Text(), foot
    )


def head_of(change: Change) -> list[Text]:
    """The lines above the tables: state, load, hit ratios since the start and the last frame."""
    status = change.after.status
    busy = change.per_second(change.before.status.cpu_s, status.cpu_s)
    hits = change.hits
    now = [hits_line(hits, name="hit ratio now")] if hits.asked else []
    every = hits_line(hits_of(status.counters), name="hit ratio")
    return [status_line(status), load_line(status, busy=human_share(busy, 1)), every, *now]


def is_shown(counter: str) -> bool:
    """Whether a rate is shown: no operators' calls, and no bytes, which the tiers show."""
    return "bytes" not in counter and not any(method in counter for method in OWN_METHODS)


def rate_table(change: Change, *, width: int) -> Table | Text:
    """The counters with the highest rates."""
    rates = [(name, human_count(rate)) for name, rate in change.counters()[:RATES_SHOWN]]
    return new_table(RATE_COLUMNS, rates, width=width) if rates else Text("no activity", style="dim")


def tier_rows(change: Change) -> list[list[Cell]]:
    """One row for each tier, with rates."""
    old = {tier.name: tier for tier in change.before.tiers.tiers}
    return [tier_row(change, old.get(tier.name, tier), tier) for tier in change.after.tiers.tiers]


def tier_row(change: Change, old: pb.TierInfo, new: pb.TierInfo) -> list[Cell]:
    """A tier's cells, in the order of TOP_COLUMNS."""
    evictions = change.per_second(old.evictions, new.evictions)
    return [
        new.name,
        human_bytes(new.used_bytes),
        human_bytes(new.capacity_bytes),
        full_text(new.used_bytes, new.capacity_bytes, is_serving=new.serving),
        bar(new.used_bytes, new.capacity_bytes),
        human_count(new.pages_ready),
        human_count(new.pages_pinned),
        human_rate(change.per_second(old.bytes_read, new.bytes_read)),
        human_rate(change.per_second(old.bytes_written, new.bytes_written)),
        human_count(evictions) if evictions >= 0.5 else "-",
    ]


def plain_change(change: Change) -> dict[str, object]:
    """The newer sample and the rates as plain values."""
    after = change.after
    return {
        "status": plain_of(after.status),
        "tiers": plain_of(after.tiers)["tiers"],
        "sessions": plain_of(after.sessions)["sessions"],
        "hits": plain_hits(hits_of(after.status.counters)),
        "hits_now": plain_hits(change.hits),
        "seconds": round(change.seconds, 6),
        "per_second": {name: round(rate, 3) for name, rate in change.counters()},
    }


@contextlib.contextmanager
def keyboard() -> Iterator[None]:
    """Sets stdin to single keys without echo, then restores it; only if stdin is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    saved = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


def key_within(seconds: float) -> str:
    """The key pressed within the time, or nothing."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1) if ready else ""
