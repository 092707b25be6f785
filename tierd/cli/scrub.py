"""The verb `scrub`: verifies every block now, shows the progress and the bad pages.

The daemon verifies; fsck.py checks files without a daemon. A pass ends when this program ends. The
exit code is 1 if the pass found a fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.ask import RATE, Ask, listing
from tierd.cli.completion import tiers
from tierd.cli.exits import ExitCode
from tierd.cli.figures import human_bytes, human_count, human_rate, human_seconds, human_share
from tierd.cli.help import example
from tierd.cli.render import Cell, Column, facts, show_json, show_table

FAULTS = {
    "read": "a read returned wrong bytes",
    "digest": "the bytes do not match the digest",
    "header": "the slot's header does not match the block",
    "io": "the disk cannot read the bytes",
}
"""Reasons for a page's quarantine, in words."""

PASS_COLUMNS = (
    Column("tier", style="bold"),
    Column("verified", right=True),
    Column("bytes", right=True),
    Column("bad", right=True),
    Column("unread", right=True),
    Column("quarantined", right=True),
)
QUARANTINE_COLUMNS = (
    Column("tier", style="bold"),
    Column("segment", right=True),
    Column("slot", right=True),
    Column("offset", right=True),
    Column("since", right=True),
    Column("why"),
)


@click.command(epilog=example("tierctl scrub --tier nvme.0 --bandwidth 200MiB/s"))
@click.option("--tier", default="", metavar="NAME", shell_complete=tiers, help="Only this tier, such as nvme.0.")
@click.option(
    "--bandwidth",
    type=RATE,
    default=0,
    metavar="RATE",
    help="Verify at most this much, such as 200MiB/s. [default: full speed, half of the time]",
)
@click.option("--status", is_flag=True, help="Start no pass; show the background's pass or the last result.")
@click.option("--quarantine", is_flag=True, help="Start no pass; list the quarantined pages.")
@listing
def scrub(ask: Ask, *, tier: str, bandwidth: int, status: bool, quarantine: bool) -> None:
    """Verifies every block now; a bad one becomes a miss.

    Exit codes: 0 no fault; 1 a fault was found.
    """
    if status or quarantine:
        with ask.connect() as daemon:
            answer = daemon.ask(pb.ScrubStatusRequest(tier=tier))
        ask.show(answer, draw_quarantine if quarantine else draw_status)
        return
    last = run_pass(ask, pb.ScrubRequest(tier=tier, bandwidth=bandwidth))
    if ask.as_json:
        show_json(last)
    else:
        draw_pass(ask.console, last)
    raise click.exceptions.Exit(ExitCode.OK if is_clean(last) else ExitCode.FAILED)


def run_pass(ask: Ask, request: pb.ScrubRequest) -> pb.ScrubPass:
    """Runs a pass to its end, with a bar for each tier on a terminal. Returns its findings."""
    with ask.connect() as daemon:
        passes: Iterator[pb.ScrubPass] = daemon.follow(request)
        if ask.console.is_terminal and not ask.as_json:
            passes = with_bars(ask.console, passes)
        return deque(passes, maxlen=1)[0]


def is_clean(passed: pb.ScrubPass) -> bool:
    """Whether a pass found no fault."""
    return not (any(tier.bad or tier.unread for tier in passed.tiers) or passed.audit_fault)


def with_bars(console: Console, passes: Iterable[pb.ScrubPass]) -> Iterator[pb.ScrubPass]:
    """Shows a pass's progress, and removes the bars at the end."""
    columns = (
        TextColumn("{task.description:<10}", style="bold"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[rate]:>12}"),
        TextColumn("{task.fields[bad]}", style="red"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {}
        for passed in passes:
            for tier in passed.tiers:
                if tier.tier not in bars:
                    bars[tier.tier] = progress.add_task(tier.tier, total=None, rate="", bad="", start=False)
                show_bar(progress, bars[tier.tier], tier, elapsed_s=passed.elapsed_s)
            yield passed


def show_bar(progress: Progress, bar: TaskID, tier: pb.ScrubTier, *, elapsed_s: float) -> None:
    """Updates one tier's bar. A tier has no rate before its turn."""
    if tier.pages and not progress.tasks[bar].started:
        progress.start_task(bar)
    progress.update(
        bar,
        total=max(tier.pages_held, tier.pages),
        completed=tier.pages,
        rate=human_rate(tier.bytes / elapsed_s) if tier.pages and elapsed_s else "",
        bad=f"{human_count(tier.bad)} bad" if tier.bad else "",
    )


def draw_pass(console: Console, passed: pb.ScrubPass) -> None:
    """Prints the verified blocks and findings by tier, then the verdict in one sentence."""
    show_table(console, PASS_COLUMNS, [pass_row(tier) for tier in passed.tiers], empty="no tiers")
    console.print()
    console.print(verdict(passed), soft_wrap=True)


def pass_row(tier: pb.ScrubTier) -> list[Cell]:
    """A tier's cells, in the order of PASS_COLUMNS."""
    bad, unread = (Text(human_count(count), style="red" if count else "") for count in (tier.bad, tier.unread))
    return [
        tier.tier,
        human_count(tier.pages),
        human_bytes(tier.bytes),
        bad,
        unread,
        human_count(tier.pages_quarantined),
    ]


def verdict(passed: pb.ScrubPass) -> Text:
    """The verdict on a pass."""
    bad, unread = (sum(getattr(tier, name) for tier in passed.tiers) for name in ("bad", "unread"))
    said = f"{human_count(sum(tier.pages for tier in passed.tiers))} pages in {human_seconds(passed.elapsed_s)}"
    if not bad and not unread:
        return Text(f"{said}: no faults", "green")
    text = Text(f"{said}: {human_count(bad)} bad" + (f", {human_count(unread)} unreadable" if unread else ""), "red")
    if bad:
        text.append("\nbad pages are misses unless another tier has the block; see `tierctl scrub --quarantine`", "dim")
    if unread:
        text.append("\nunreadable pages are kept: the disk is at fault, not the blocks; see the daemon's log", "dim")
    return text


def draw_status(console: Console, reply: pb.ScrubStatusReply) -> None:
    """Prints the settings, then the background's pass, else the last finished one."""
    every = human_seconds(reply.period_s) if reply.period_s else "off"
    console.print(facts((("every", every), ("at most", human_rate(reply.bandwidth)), ("last", ended(reply.last)))))
    passed = reply.current if reply.current.tiers and not reply.current.finished else reply.last
    console.print()
    if not passed.tiers:
        console.print(Text("no pass has run yet", style="dim"))
        return
    draw_pass(console, passed) if passed.finished else draw_under_way(console, passed)


def ended(passed: pb.ScrubPass) -> str:
    """How long ago a pass ended."""
    return f"{human_seconds(passed.ended_ago_s)} ago" if passed.finished else "none yet"


def draw_under_way(console: Console, passed: pb.ScrubPass) -> None:
    """Prints a running pass."""
    show_table(console, PASS_COLUMNS, [pass_row(tier) for tier in passed.tiers], empty="no tiers")
    done, held = (sum(getattr(tier, name) for tier in passed.tiers) for name in ("pages", "pages_held"))
    console.print()
    console.print(
        facts((("running for", human_seconds(passed.elapsed_s)), ("done", human_share(min(done, held), held))))
    )


def draw_quarantine(console: Console, reply: pb.ScrubStatusReply) -> None:
    """Prints the quarantined pages, the oldest first."""
    rows = [
        [
            page.tier,
            str(page.segment),
            str(page.slot),
            str(page.offset),
            f"{human_seconds(page.age_s)} ago",
            FAULTS.get(page.fault, page.fault),
        ]
        for page in reply.quarantine
    ]
    show_table(console, QUARANTINE_COLUMNS, rows, empty="no page is quarantined")
