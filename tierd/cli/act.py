"""The verbs that change something: evict, pin, unpin, drain, flush, epoch.

Each verb sends one request and prints the result in one line; the daemon decides. To evict every
block, an operator must write --all.
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
from tierd.cli.completion import tiers
from tierd.cli.figures import human_bytes, human_count
from tierd.cli.help import Listing, example
from tierd.cli.options import shared

WHOLE_TIMEOUT_S = 600.0
"""For requests over all blocks. Ten million take a minute; after a timeout the work is half done."""


def said(sentence: str) -> Callable[[Console, object], None]:
    """Returns a function that prints one sentence."""
    return lambda console, _: console.print(Text(sentence), soft_wrap=True)


def counted(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{human_count(count)} {noun}{'' if count == 1 else 's'}"


@click.command(epilog=example("tierctl evict --tier host.0"))
@click.argument("hashes", nargs=-1, metavar="[HASH]...")
@click.option(
    "--tier", default="", metavar="NAME", shell_complete=tiers, help="Evict only from this tier, such as host.0."
)
@click.option("--all", "everything", is_flag=True, help="Evict every block of every tier.")
@verb
def evict(ask: Ask, *, hashes: tuple[str, ...], tier: str, everything: bool) -> None:
    """Evicts blocks from one tier or from all; pinned blocks stay."""
    if not (hashes or tier or everything):
        raise click.UsageError("evict: no block is named; give hashes, --tier NAME or --all")
    if everything and (hashes or tier):
        raise click.UsageError("evict: --all excludes hashes and --tier; leave one out")
    request = pb.EvictRequest(hashes=[checked_hash(text) for text in hashes], tier=tier)
    with ask.connect() as daemon:
        answer = daemon.ask(request, timeout_s=WHOLE_TIMEOUT_S)
    stayed = f"; {human_count(answer.pinned)} pinned stayed" if answer.pinned else ""
    ask.show(answer, said(f"evicted {counted(answer.blocks, 'block')}, {human_bytes(answer.bytes)}{stayed}"))


@click.command(epilog=example("tierctl pin 3f9a0c"))
@click.argument("hashes", nargs=-1, required=True, metavar="HASH...")
@verb
def pin(ask: Ask, *, hashes: tuple[str, ...]) -> None:
    """Protects blocks from eviction until unpin or a restart."""
    request = pb.PinRequest(hashes=[checked_hash(text) for text in hashes])
    with ask.connect() as daemon:
        answer = daemon.ask(request, method="Pin")
    ask.show(answer, said(f"pinned {counted(answer.blocks, 'block')}"))


@click.command(epilog=example("tierctl unpin 3f9a0c"))
@click.argument("hashes", nargs=-1, required=True, metavar="HASH...")
@verb
def unpin(ask: Ask, *, hashes: tuple[str, ...]) -> None:
    """Makes pinned blocks evictable again."""
    request = pb.PinRequest(hashes=[checked_hash(text) for text in hashes])
    with ask.connect() as daemon:
        answer = daemon.ask(request, method="Unpin")
    ask.show(answer, said(f"unpinned {counted(answer.blocks, 'block')}"))


@click.command(epilog=example("tierctl drain --deadline 10s"))
@click.option("--release", is_flag=True, help="Also free the host memory if no lease is left; the next start is cold.")
@click.option(
    "--deadline", type=DURATION, default="30 s", show_default=True, help="How long the daemon waits for leases to end."
)
@click.option("--undo", is_flag=True, help="Take new work again, and keep the memory.")
@verb
def drain(ask: Ask, *, release: bool, deadline: float, undo: bool) -> None:
    """Drains the daemon: it takes no new work until --undo or a restart; leases may finish.

    The daemon refuses new reservations, and new sessions of all but operators. The program waits
    for open leases, up to the deadline.
    """
    if undo:
        if release:
            raise click.UsageError("--release: --undo keeps the memory; leave one of them out")
        with ask.connect() as daemon:
            answer = daemon.ask(pb.DrainRequest(undo=True))
        ask.show(answer, said("the drain is undone; the daemon takes new work again"))
        return
    with ask.connect() as daemon:
        answer = daemon.ask(pb.DrainRequest(release=release, deadline_s=deadline), timeout_s=deadline + 10)
    left = answer.leases_left
    held = f"{counted(left, 'lease')} left" if left else "no lease left"
    ask.show(answer, said(f"drained; {held}. The daemon refuses new work until `tierctl drain --undo` or a restart."))


@click.command(epilog=example("tierctl flush --deadline 120s"))
@click.option("--deadline", type=DURATION, default="60 s", show_default=True, help="How long the daemon may write.")
@verb
def flush(ask: Ask, *, deadline: float) -> None:
    """Writes all blocks not yet on NVMe to disk and syncs them; evicts none.

    Afterwards a restart or a power cut loses none of them. Other programs call it a flush to empty
    the cache; use `tierctl evict --all` for that. Exit code 1: some block could not be written.
    """
    with ask.connect() as daemon:
        answer = daemon.ask(pb.FlushRequest(deadline_s=deadline), timeout_s=deadline + 10)
    left = (
        f"; {counted(answer.left, 'block')} could not be written in {deadline:g} s: "
        "`tierctl tiers` shows the store's trouble"
        if answer.left
        else ""
    )
    ask.show(answer, said(f"wrote {counted(answer.blocks, 'block')}, {human_bytes(answer.bytes)}, to NVMe{left}"))
    if answer.left:
        raise click.exceptions.Exit(1)


@click.group(cls=Listing)
@shared
def epoch(**_: Any) -> None:
    """Makes blocks of old weights unreachable."""


@epoch.command(epilog=example("tierctl epoch bump --model llama-3-8b"))
@click.option("--model", default="", help="Bump every namespace of this model.")
@click.option(
    "--namespace", type=click.IntRange(0, (1 << 32) - 1), default=None, help="Bump only the namespace with this id."
)
@verb
def bump(ask: Ask, *, model: str, namespace: int | None) -> None:
    """Begins a new epoch: all older blocks are misses; open leases may finish."""
    if bool(model) == (namespace is not None):
        raise click.UsageError(
            "epoch bump: give either --model NAME or --namespace ID; `tierctl namespaces` lists both"
        )
    with ask.connect() as daemon:
        request = pb.BumpEpochRequest(model=model, namespace=namespace or 0)
        answer = daemon.ask(request, timeout_s=WHOLE_TIMEOUT_S)
    unreachable = f"{counted(answer.blocks, 'block')} became unreachable"
    ask.show(answer, said(f"bumped {counted(answer.namespaces, 'namespace')}; {unreachable}"))
