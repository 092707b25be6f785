"""The command `record`: the daemon records its clients' requests in a trace.

It starts and stops a recording and shows its progress. The daemon writes it, in its own directory;
trace.py reads it. Gaps in the recording are reported.
"""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.ask import DURATION, SIZE, Ask, looking, verb
from tierd.cli.figures import human_bytes, human_count, human_seconds
from tierd.cli.help import Listing, example
from tierd.cli.options import shared
from tierd.cli.render import facts

STOP_TIMEOUT_S = 30.0


@click.group(cls=Listing)
@shared
def record(**_: Any) -> None:
    """Writes what clients ask for into a trace, for `simulate` and `replay`.

    A trace holds times, lengths and which requests share which prefix; no tokens, and numbers in place of hashes.
    """


@record.command(epilog=example("tierctl record start monday --seconds 600"))
@click.argument("name", default="")
@click.option("--max-bytes", type=SIZE, default="256 MiB", show_default=True, help="It ends before its file is larger.")
@click.option("--seconds", type=DURATION, default="3600 s", show_default=True, help="It ends after this time.")
@verb
def start(ask: Ask, *, name: str, max_bytes: int, seconds: float) -> None:
    """Begins a recording.

    NAME: of its file, in the daemon's own directory. [default: the time]
    """
    with ask.connect() as daemon:
        answer = daemon.ask(pb.RecordStartRequest(name=name, max_bytes=max_bytes, seconds=seconds))
    ask.show(answer, draw_start)


@record.command(epilog=example("tierctl record stop"))
@verb
def stop(ask: Ask) -> None:
    """Ends the recording; what was asked for until now is in it."""
    with ask.connect() as daemon:
        answer = daemon.ask(pb.RecordStopRequest(), timeout_s=STOP_TIMEOUT_S)
    ask.show(answer, draw_status)


@record.command(epilog=example("tierctl record status --watch 5"))
@looking
def status(ask: Ask) -> None:
    """Shows how the recording goes, or went."""
    with ask.connect() as daemon:
        answer = daemon.ask(pb.RecordStatusRequest())
    ask.show(answer, draw_status)


def draw_start(console: Console, told: pb.RecordReply) -> None:
    """The file, and when it ends."""
    bounds = f"at most {human_bytes(told.max_bytes)} and {human_seconds(told.seconds)}"
    console.print(Text(f"recording into {told.path}, {bounds}"), soft_wrap=True)


def draw_status(console: Console, told: pb.RecordReply) -> None:
    """The file's content, why the recording ended, and what is missing."""
    if told.state == "none":
        console.print(Text("nothing was recorded since the daemon started", style="dim"))
        return
    state = (told.state, "green" if told.state == "recording" else "")
    console.print(Text.assemble(state, f" {told.path}"), soft_wrap=True)
    pairs = (
        ("requests", human_count(told.requests)),
        ("blocks", f"{human_count(told.blocks)}, {human_count(told.distinct)} of them different"),
        ("size", f"{human_bytes(told.bytes)} of {human_bytes(told.max_bytes)}"),
        ("time", f"{human_seconds(told.elapsed_s)} of {human_seconds(told.seconds)}"),
    )
    console.print(facts(pairs), soft_wrap=True)
    if told.reason:
        console.print(Text(f"ended: {told.reason}"), soft_wrap=True)
    if told.lost:
        console.print(Text(f"{human_count(told.lost)} requests are not in it", style="yellow"), soft_wrap=True)
