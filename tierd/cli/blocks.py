"""The verbs that look at blocks: blocks, inspect.

They request and show; they change nothing. Columns missing from a table are in `--json`.
"""

from __future__ import annotations

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.ask import Ask, looking
from tierd.cli.completion import tiers
from tierd.cli.figures import human_bytes, human_count, human_seconds
from tierd.cli.help import example
from tierd.cli.models import Models
from tierd.cli.render import Cell, Column, facts, show_table, state_text
from tierd.errors import InvalidArgument

HASH_DIGITS = 12
"""Digits of a block hash in a table: enough to identify a block, and for `inspect`."""
HASH_MAX_DIGITS = 64
DECLINED = {
    "partial": "it is the short last block of a sequence; the next turn stores it, filled up, under another hash",
    "unlikely": "it is not likely enough to be used again",
    "displaced": "it was written since its last use, and the store has evicted it since",
    "budget": "the wear budget went to blocks that are more likely to be used again; see `tierctl wear`",
}
"""Why admission last declined to write a block."""
SORTS = ("recent", "hits", "position", "bytes")
BLOCK_COLUMNS = (
    Column("block", style="cyan"),
    Column("model"),
    Column("position", right=True),
    Column("tokens", right=True, spare=2),
    Column("bytes", right=True),
    Column("pins", right=True, spare=1),
    Column("hits", right=True),
    Column("idle", right=True),
    Column("tiers"),
    Column("namespace", right=True, spare=5),
    Column("priority", right=True, spare=3),
    Column("parent", style="dim", spare=4),
)
PAGE_COLUMNS = (
    Column("tier", style="bold"),
    Column("state"),
    Column("segment", right=True),
    Column("slot", right=True),
    Column("offset", right=True),
    Column("generation", right=True),
    Column("pins", right=True),
)


@click.command(epilog=example("tierctl blocks --tier host.0 --sort hits"))
@click.option(
    "--tier", default="", metavar="NAME", shell_complete=tiers, help="Only blocks in this tier, such as host.0."
)
@click.option(
    "--namespace", type=click.IntRange(0, (1 << 32) - 1), default=None, help="Only blocks of this namespace id."
)
@click.option("--pinned", is_flag=True, help="Only blocks that a lease or `tierctl pin` holds.")
@click.option(
    "--prefix", "hash_prefix", default="", metavar="HEX", help="Only blocks whose hash begins with these digits."
)
@click.option(
    "--sort",
    type=click.Choice([*SORTS, *(f"-{sort}" for sort in SORTS)]),
    default="recent",
    show_default=True,
    help="Order; - reverses it.",
)
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Show at most this many blocks."
)
@click.option("--offset", type=click.IntRange(0, (1 << 32) - 1), default=0, help="Skip this many blocks first.")
@looking
def blocks(ask: Ask, *, namespace: int | None, hash_prefix: str, offset: int, **filters: str | int | bool) -> None:
    """Lists blocks, filtered and sorted, one page at a time."""
    request = pb.BlocksRequest(
        namespace=namespace or 0,
        has_namespace=namespace is not None,
        hash_prefix=checked_hash(hash_prefix, empty=True),
        offset=offset,
        **filters,  # type: ignore[arg-type]  # click has checked their types
    )
    with ask.connect() as daemon:
        spaces = pb.NamespacesReply() if ask.as_json else daemon.ask(pb.NamespacesRequest())
        answer = daemon.ask(request)
    models = Models(spaces.namespaces)
    ask.show(answer, lambda console, reply: draw_blocks(console, reply, models, offset=offset))


def draw_blocks(console: Console, reply: pb.BlocksReply, models: Models, *, offset: int) -> None:
    """Prints the page, and its position among all matches."""
    rows = [block_row(block, models) for block in reply.blocks]
    empty = f"no block at this offset; {human_count(reply.total)} match in all" if reply.total else "no block matches"
    show_table(console, BLOCK_COLUMNS, rows, empty=empty)
    last = offset + len(rows)
    if rows and console.is_terminal:
        more = f"; continue with --offset {last}" if last < reply.total else ""
        console.print(Text(f"{offset + 1:,} to {last:,} of {reply.total:,}{more}", style="dim"))


def block_row(block: pb.BlockInfo, models: Models) -> list[Cell]:
    """A block's cells, in the order of BLOCK_COLUMNS."""
    return [
        block.hash.hex()[:HASH_DIGITS],
        models.short_name(block.namespace),
        str(block.position),
        str(block.tokens),
        human_bytes(block.bytes),
        str(block.pins),
        human_count(block.hits),
        human_seconds(block.idle_s),
        " ".join(block.tiers),
        str(block.namespace),
        priority_text(block),
        parent_text(block.parent),
    ]


def priority_text(block: pb.BlockInfo) -> str:
    """`90`, or `90 60 s` with the time that is left of it."""
    return f"{block.priority} {human_seconds(block.retention_s)}" if block.retention_s else str(block.priority)


def parent_text(parent: bytes) -> str:
    """The first digits of the parent's hash, or `root`."""
    return parent.hex()[:HASH_DIGITS] if any(parent) else "root"


@click.command(epilog=example("tierctl inspect 3f9a0c"))
@click.argument("block", metavar="HASH")
@looking
def inspect(ask: Ask, block: str) -> None:
    """Shows one block: its facts, its pages, and the blocks that follow it.

    HASH: the first digits of the block's hash, enough to identify it.
    """
    request = pb.InspectRequest(hash=checked_hash(block))
    with ask.connect() as daemon:
        spaces = pb.NamespacesReply() if ask.as_json else daemon.ask(pb.NamespacesRequest())
        answer = daemon.ask(request)
    ask.show(answer, lambda console, reply: draw_block(console, reply, Models(spaces.namespaces)))


def draw_block(console: Console, reply: pb.InspectReply, models: Models) -> None:
    """Prints the block's facts, then its pages, then its children."""
    block = reply.block
    console.print(facts((("block", Text(block.hash.hex(), style="cyan")),)), soft_wrap=True)
    console.print(
        facts((("parent", block.parent.hex() if any(block.parent) else "root: the first of its sequence"),)),
        soft_wrap=True,
    )
    console.print(facts((("model", models.name(block.namespace)), ("namespace", str(block.namespace)))), soft_wrap=True)
    counts = (("position", str(block.position)), ("tokens", str(block.tokens)))
    console.print(facts((*counts, ("bytes", human_bytes(block.bytes)), ("slices", str(reply.slices)))))
    console.print(
        facts(
            (
                ("hits", human_count(block.hits)),
                ("idle", human_seconds(block.idle_s)),
                ("priority", priority_text(block)),
                ("digest", reply.digest.hex() or "-"),
            )
        )
    )
    if block.declined:
        console.print(facts((("not written to NVMe", DECLINED.get(block.declined, block.declined)),)), soft_wrap=True)
    console.print()
    show_table(console, PAGE_COLUMNS, [page_row(page) for page in reply.pages], empty="no page holds this block now")
    if reply.children:
        names = "  ".join(child.hex()[:HASH_DIGITS] for child in reply.children)
        console.print()
        console.print(facts((("children", names),)))


def page_row(page: pb.PageInfo) -> list[Cell]:
    """A page's cells, in the order of PAGE_COLUMNS."""
    numbers = (page.segment, page.slot, page.offset, page.generation, page.pins)
    return [page.tier, state_text(page.state), *(str(number) for number in numbers)]


def checked_hash(text: str, *, empty: bool = False) -> str:
    """A hexadecimal prefix of a block hash, lower case. Raises InvalidArgument."""
    low = text.strip().lower().removeprefix("0x")
    if (not low and not empty) or len(low) > HASH_MAX_DIGITS or set(low) - set("0123456789abcdef"):
        raise InvalidArgument(
            f"hash: {text!r} is not 1 to {HASH_MAX_DIGITS} hexadecimal digits; `tierctl blocks` lists hashes"
        )
    return low
