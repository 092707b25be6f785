"""The commands that change something: evict, pin, unpin, drain, flush, epoch.

Each sends a request and shows the result in one line; it decides nothing. Emptying a whole daemon
needs an explicit option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.ask import DURATION, Ask, verb
from tierd.cli.blocks import checked_hash
from tierd.cli.figures import human_bytes, human_count
from tierd.cli.help import Listing, example
from tierd.cli.options import shared

WHOLE_TIMEOUT_S = 600.0
"""For requests over all blocks: ten million take a minute, and a timeout leaves the work half done."""


def said(sentence: str) -> Callable[[Console, object], None]:
    """Returns a function that prints one sentence."""
    return lambda console, _: console.print(Text(sentence), soft_wrap=True)


def counted(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{human_count(count)} {noun}{'' if count == 1 else 's'}"


@click.command(epilog=example("tierctl evict --tier host.0"))
@click.argument("hashes", nargs=-1, metavar="[HASH]...")
@click.option("--tier", default="", metavar="NAME", help="Only in this tier, such as host.0.")
@click.option("--all", "everything", is_flag=True, help="Every block of every tier.")
@verb
def evict(ask: Ask, *, hashes: tuple[str, ...], tier: str, everything: bool) -> None:
    """Drops blocks, from one tier or from all; pinned ones stay."""
    if not (hashes or tier or everything):
        raise click.UsageError("evict: nothing named; give hashes, --tier NAME, or --all")
    if everything and (hashes or tier):
        raise click.UsageError("evict: --all with hashes or --tier; leave one out")
    request = pb.EvictRequest(hashes=[checked_hash(text) for text in hashes], tier=tier)
    with ask.connect() as daemon:
        answer = daemon.ask(request, timeout_s=WHOLE_TIMEOUT_S)
    stayed = f"; {human_count(answer.pinned)} pinned stayed" if answer.pinned else ""
    ask.show(answer, said(f"evicted {counted(answer.blocks, 'block')}, {human_bytes(answer.bytes)}{stayed}"))


@click.command(epilog=example("tierctl pin 3f9a0c"))
@click.argument("hashes", nargs=-1, required=True, metavar="HASH...")
@verb
def pin(ask: Ask, *, hashes: tuple[str, ...]) -> None:
    """Keeps blocks from being evicted, until unpin or a restart."""
    request = pb.PinRequest(hashes=[checked_hash(text) for text in hashes])
    with ask.connect() as daemon:
        answer = daemon.ask(request, method="Pin")
    ask.show(answer, said(f"pinned {counted(answer.blocks, 'block')}"))


@click.command(epilog=example("tierctl unpin 3f9a0c"))
@click.argument("hashes", nargs=-1, required=True, metavar="HASH...")
@verb
def unpin(ask: Ask, *, hashes: tuple[str, ...]) -> None:
    """Takes back what pin did."""
    request = pb.PinRequest(hashes=[checked_hash(text) for text in hashes])
    with ask.connect() as daemon:
        answer = daemon.ask(request, method="Unpin")
    ask.show(answer, said(f"unpinned {counted(answer.blocks, 'block')}"))


@click.command(epilog=example("tierctl drain --deadline 10s"))
@click.option("--release", is_flag=True, help="Free the host memory too: the next start is cold.")
@click.option(
    "--deadline", type=DURATION, default="30 s", show_default=True, help="How long the daemon waits for leases to end."
)
@verb
def drain(ask: Ask, *, release: bool, deadline: float) -> None:
    """Stops the daemon's service for good, until a restart; leases may finish.

    It cannot be undone: the daemon refuses every new session and request until somebody restarts it.
    """
    with ask.connect() as daemon:
        answer = daemon.ask(pb.DrainRequest(release=release, deadline_s=deadline), timeout_s=deadline + 10)
    left = answer.leases_left
    held = f"{counted(left, 'lease')} left" if left else "nothing is held any more"
    ask.show(answer, said(f"drained; {held}. The daemon takes no work until somebody restarts it."))


@click.command(epilog=example("tierctl flush --deadline 120s"))
@click.option("--deadline", type=DURATION, default="60 s", show_default=True, help="How long the daemon may write.")
@verb
def flush(ask: Ask, *, deadline: float) -> None:
    """Writes blocks that only memory holds to NVMe; drops nothing.

    Afterwards a restart or a power cut loses none of them. Other programs mean "empty the cache" by
    flush; here that is `tierctl evict --all`. Exit code 1: some block could not be written.
    """
    with ask.connect() as daemon:
        answer = daemon.ask(pb.FlushRequest(deadline_s=deadline), timeout_s=deadline + 10)
    left = (
        f"; {counted(answer.left, 'block')} could not be: `tierctl tiers` shows the store's trouble"
        if answer.left
        else ""
    )
    ask.show(answer, said(f"wrote {counted(answer.blocks, 'block')}, {human_bytes(answer.bytes)}, to NVMe{left}"))
    if answer.left:
        raise click.exceptions.Exit(1)


@click.group(cls=Listing)
@shared
def epoch(**_: Any) -> None:
    """Makes what was stored under old weights unreachable."""


@epoch.command(epilog=example("tierctl epoch bump --model llama-3-8b"))
@click.option("--model", default="", help="Every namespace of this model.")
@click.option("--namespace", type=click.IntRange(0, (1 << 32) - 1), default=None, help="Just this namespace id.")
@verb
def bump(ask: Ask, *, model: str, namespace: int | None) -> None:
    """Begins a new epoch; leases in flight finish."""
    if bool(model) == (namespace is not None):
        raise click.UsageError(
            "epoch bump: give either --model NAME or --namespace ID; `tierctl namespaces` lists both"
        )
    with ask.connect() as daemon:
        request = pb.BumpEpochRequest(model=model, namespace=namespace or 0)
        answer = daemon.ask(request, timeout_s=WHOLE_TIMEOUT_S)
    unreachable = f"{counted(answer.blocks, 'block')} became unreachable"
    ask.show(answer, said(f"bumped {counted(answer.namespaces, 'namespace')}; {unreachable}"))
