"""`tierctl top`: the daemon, live.

The package `live` has its parts. It keeps no history, and it always restores the terminal. Without
a terminal it prints frame after frame and reads no keys.
"""

from __future__ import annotations

import contextlib
import time

import click
from rich.live import Live
from rich.text import Text

from tierd.cli.ask import DURATION, Ask, verb
from tierd.cli.figures import human_share
from tierd.cli.help import example
from tierd.cli.hits import hits_line, hits_of, plain_hits
from tierd.cli.live.frame import frame
from tierd.cli.live.keys import keyboard, read_keys
from tierd.cli.live.rows import TOP_COLUMNS, is_shown, tier_rows
from tierd.cli.live.sampling import Change, Sampler, sample
from tierd.cli.live.view import View
from tierd.cli.look import load_line, status_line
from tierd.cli.render import plain_lines, plain_of, show_json


@click.command(epilog=example("tierctl top --interval 2s"))
@click.option("--interval", type=DURATION, default="1 s", show_default=True, help="Time between two frames.")
@click.option("--count", type=click.IntRange(1), default=None, help="End after this many frames.")
@verb
def top(ask: Ask, *, interval: float, count: int | None) -> None:
    """Shows the daemon live: hit ratio, tiers, sessions, prefix tree, rates.

    ? shows the keys; q or Ctrl-C ends it. In a pipe it prints one frame after another. If the
    daemon goes away, top tries for a minute to reconnect.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if ask.as_json or not ask.console.is_terminal:
            stream(ask, interval=interval, count=count or 1)
        else:
            watch(ask, interval=interval, count=count)


def stream(ask: Ask, *, interval: float, count: int) -> None:
    """Prints so many frames as text, or as one JSON object a line."""
    with ask.connect() as daemon:
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


def head_of(change: Change) -> list[Text]:
    """The lines above the tiers: state, load, hit ratios since the start and since the last frame."""
    status, hits = change.after.status, change.hits
    busy = change.per_second(change.before.status.cpu_s, status.cpu_s)
    now = [hits_line(hits, name="hit ratio now")] if hits.asked else []
    every = hits_line(hits_of(status.counters), name="hit ratio")
    return [status_line(status), load_line(status, busy=human_share(busy, 1)), every, *now]


def watch(ask: Ask, *, interval: float, count: int | None) -> None:
    """Draws on the whole terminal until a key ends it, or until so many samples are drawn."""
    view = View()
    sampler = Sampler(ask.connect, interval_s=interval, tree_sort=view.sort_of("tree"))
    with keyboard() as fds, sampler, Live(console=ask.console, screen=True, auto_refresh=False) as live:
        shown = (sampler.change, sampler.rare)
        while count is None or sampler.samples <= count:
            if sampler.wait(fds) and not pressed(view, sampler, fds[0]):
                return
            if sampler.error is not None:
                raise sampler.error
            shown = shown if view.is_paused else (sampler.change, sampler.rare)
            live.update(frame(ask.console, *shown, view, trouble=sampler.trouble), refresh=True)


def pressed(view: View, sampler: Sampler, fd: int) -> bool:
    """Takes the keys that wait. False: one of them ends the program."""
    sort = view.sort_of("tree")
    goes_on = all(view.press(key) for key in read_keys(fd))
    if view.sort_of("tree") != sort:
        sampler.sort_tree(view.sort_of("tree"))
    return goes_on


def plain_change(change: Change) -> dict[str, object]:
    """The newer sample and the rates as plain values."""
    after = change.after
    rates = sorted(change.rates().items(), key=lambda rate: (-rate[1], rate[0]))
    return {
        "status": plain_of(after.status),
        "tiers": plain_of(after.tiers)["tiers"],
        "sessions": plain_of(after.sessions)["sessions"],
        "hits": plain_hits(hits_of(after.status.counters)),
        "hits_now": plain_hits(change.hits),
        "seconds": round(change.seconds, 6),
        "per_second": {name: round(rate, 3) for name, rate in rates if is_shown(name)},
    }
