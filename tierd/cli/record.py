"""The verb `record`: the daemon records its clients' requests in a trace.

It starts and stops a recording, and shows its progress and the number of lost requests. The daemon
writes the trace to its own directory. trace.py reads it.
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
    """Records the clients' requests in a trace, for `simulate` and `replay`.

    A trace has times, lengths and shared prefixes. It has no tokens, and numbers instead of hashes.
    """


@record.command(epilog=example("tierctl record start monday --seconds 600"))
@click.argument("name", default="")
@click.option(
    "--max-bytes", type=SIZE, default="256 MiB", show_default=True, help="Stop before the file exceeds this size."
)
@click.option("--seconds", type=DURATION, default="3600 s", show_default=True, help="Stop after this time.")
@verb
def start(ask: Ask, *, name: str, max_bytes: int, seconds: float) -> None:
    """Starts a recording.

    NAME: the name of its file, in the daemon's own directory. [default: the time]
    """
    with ask.connect() as daemon:
        answer = daemon.ask(pb.RecordStartRequest(name=name, max_bytes=max_bytes, seconds=seconds))
    ask.show(answer, draw_start)


@record.command(epilog=example("tierctl record stop"))
@verb
def stop(ask: Ask) -> None:
    """Stops the recording; the trace has all requests so far."""
    with ask.connect() as daemon:
        answer = daemon.ask(pb.RecordStopRequest(), timeout_s=STOP_TIMEOUT_S)
    ask.show(answer, draw_status)


@record.command(epilog=example("tierctl record status --watch 5"))
@looking
def status(ask: Ask) -> None:
    """Shows the running recording, or the last one."""
    with ask.connect() as daemon:
        answer = daemon.ask(pb.RecordStatusRequest())
    ask.show(answer, draw_status)


def draw_start(console: Console, reply: pb.RecordReply) -> None:
    """Prints the file and its limits."""
    bounds = f"at most {human_bytes(reply.max_bytes)} and {human_seconds(reply.seconds)}"
    console.print(Text(f"recording into {reply.path}, {bounds}"), soft_wrap=True)


def draw_status(console: Console, reply: pb.RecordReply) -> None:
    """Prints the counts, the reason of the end, and the number of lost requests."""
    if reply.state == "none":
        console.print(Text("no recording since the daemon started", style="dim"))
        return
    state = (reply.state, "green" if reply.state == "recording" else "")
    console.print(Text.assemble(state, f" {reply.path}"), soft_wrap=True)
    pairs = (
        ("requests", human_count(reply.requests)),
        ("blocks", f"{human_count(reply.blocks)}, {human_count(reply.distinct)} of them distinct"),
        ("size", f"{human_bytes(reply.bytes)} of {human_bytes(reply.max_bytes)}"),
        ("time", f"{human_seconds(reply.elapsed_s)} of {human_seconds(reply.seconds)}"),
    )
    console.print(facts(pairs), soft_wrap=True)
    if reply.reason:
        console.print(Text(f"ended: {reply.reason}"), soft_wrap=True)
    if reply.lost:
        console.print(
            Text(f"lost: {human_count(reply.lost)} requests are missing from the trace", style="yellow"), soft_wrap=True
        )
