"""`tierctl tree`: the prefix tree of the cached blocks, one line for each run without a branch.

It requests and shows. `top` draws the same rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.ask import Ask, looking
from tierd.cli.blocks import HASH_DIGITS, checked_hash
from tierd.cli.figures import human_count, human_seconds
from tierd.cli.help import example
from tierd.cli.models import Models
from tierd.cli.render import Cell, Column, has_colour, show_table

SORTS = ("hits", "tokens", "recent")
LIMIT_MOST = 4096
BAR_CELLS = 8
TIER_COLOURS = {"device": "magenta", "host": "green", "nvme": "bright_blue", "archive": "yellow"}
"""By kind: a tier's name without its number."""
TREE_COLUMNS = (
    Column("prefix"),
    Column("", spare=1, is_bar=True),
    Column("blocks", right=True, spare=5),
    Column("tokens", right=True),
    Column("hits", right=True),
    Column("idle", right=True),
    Column("sequences", right=True, spare=3),
    Column("tokens below", right=True, spare=4),
    Column("hits below", right=True, spare=6),
    Column("not shown", right=True, style="dim", spare=7),
    Column("tiers", spare=2),
)


@click.command(epilog=example("tierctl tree --model llama-3-8b --sort tokens --depth 3"))
@click.option("--model", default="", metavar="NAME", help="Only prefixes of this model.")
@click.option(
    "--namespace", type=click.IntRange(0, (1 << 32) - 1), default=None, help="Only prefixes of this namespace id."
)
@click.option("--under", default="", metavar="HASH", help="Only this block and the blocks that follow it.")
@click.option(
    "--depth", type=click.IntRange(1, 1000), default=8, show_default=True, help="Show at most so many branches deep."
)
@click.option(
    "--limit", type=click.IntRange(1, LIMIT_MOST), default=50, show_default=True, help="Show at most this many runs."
)
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="hits",
    show_default=True,
    help="Show the runs first that have most of it, with all runs below them.",
)
@looking
def tree(ask: Ask, *, namespace: int | None, under: str, **options: str | int) -> None:
    """Shows the prefix tree: the prefixes that sequences share, with tokens, hits and tiers.

    A line is a run of blocks without a branch, by the hash of its last block. Its hits are those
    of its most used block. Its sequences are the cached ones that begin with it. Columns with
    "below" are sums over all blocks that follow it.
    """
    request = pb.TreeRequest(
        namespace=namespace or 0,
        has_namespace=namespace is not None,
        root=checked_hash(under, empty=True),
        **options,  # type: ignore[arg-type]  # click has checked their types
    )
    with ask.connect() as daemon:
        spaces = pb.NamespacesReply() if ask.as_json else daemon.ask(pb.NamespacesRequest())
        answer = daemon.ask(request)
    models = Models(spaces.namespaces)
    ask.show(answer, lambda console, reply: draw_tree(console, reply, models, is_part=bool(under)))


def draw_tree(console: Console, reply: pb.TreeReply, models: Models, *, is_part: bool = False) -> None:
    """Prints the tree, the colors of its tiers, and the sums over all. is_part: what is under a block."""
    rows = list(tree_rows(reply, models, has_guides=console.is_terminal, is_part=is_part))
    show_table(console, TREE_COLUMNS, rows, empty="no block is cached")
    if not rows:
        return
    console.print()
    if has_colour(console):
        console.print(legend(reply))
    console.print(Text(summary(reply), style="dim"), soft_wrap=not console.is_terminal)


def summary(reply: pb.TreeReply) -> str:
    """The sums over the whole tree, and how much of it is listed."""
    tokens, shared, runs = (human_count(count) for count in (reply.tokens, reply.tokens_shared, reply.runs))
    said = f"{human_count(reply.blocks)} blocks, {tokens} tokens, {shared} of them shared by several sequences"
    if reply.blocks_cut_off:
        said += f"; {human_count(reply.blocks_cut_off)} blocks follow evicted ones: of use to layers with windows only"
    if not reply.is_cut:
        return said
    return f"{said}; {len(reply.nodes):,} of {runs} runs are shown: --limit, --depth and --under show others"


def legend(reply: pb.TreeReply) -> Text:
    """The color of each tier in the reply."""
    names = sorted({name for node in reply.nodes for name in node.tier_blocks})
    parts = ((f"━━ {name}   ", colour_of(name)) for name in names)
    return Text.assemble(*parts)


def tree_rows(reply: pb.TreeReply, models: Models, *, has_guides: bool, is_part: bool = False) -> Iterator[list[Cell]]:
    """The cells of each listed run below its namespace, in the order of TREE_COLUMNS.

    has_guides: lines connect a run with those that follow it; otherwise it is indented.
    is_part: blocks before the first run are not listed; otherwise they are evicted.
    """
    below: defaultdict[int, list[int]] = defaultdict(list)
    roots: defaultdict[int, list[int]] = defaultdict(list)
    for row, node in enumerate(reply.nodes):
        (roots[node.namespace] if node.parent < 0 else below[node.parent]).append(row)
    for namespace, rows in roots.items():
        yield [Text(models.short_name(namespace), style="bold"), *[""] * (len(TREE_COLUMNS) - 1)]
        for row, guide in ordered(rows, below, has_guides=has_guides):
            node = reply.nodes[row]
            is_cut_off = node.parent < 0 and node.position > 0 and not is_part
            prefix = Text.assemble((guide, "dim"), (node.hash.hex()[:HASH_DIGITS], "cyan"))
            prefix.append(f" (first {node.position} evicted)" if is_cut_off else "", style="dim")
            yield [prefix, *node_cells(node, hidden=node.children - len(below[row]))]


def ordered(rows: Sequence[int], below: Mapping[int, Sequence[int]], *, has_guides: bool) -> Iterator[tuple[int, str]]:
    """Each row and those below it, in the order of a picture, with the guide to its left."""
    waiting = [(row, "", row == rows[-1]) for row in reversed(rows)]
    while waiting:
        row, lead, is_last = waiting.pop()
        yield row, lead + ("└─ " if is_last else "├─ ") if has_guides else f"{lead}  "
        lead += ("   " if is_last else "│  ") if has_guides else "  "
        kids = below.get(row, ())
        waiting += [(kid, lead, kid == kids[-1]) for kid in reversed(kids)]


def node_cells(node: pb.TreeNode, *, hidden: int) -> list[Cell]:
    """A run's cells after the first, in the order of TREE_COLUMNS. hidden: runs that follow it and
    are not listed."""
    return [
        tier_bar(node.tier_blocks),
        *(human_count(count) for count in (node.blocks, node.tokens, node.hits)),
        human_seconds(node.idle_s),
        *(human_count(count) if count else "-" for count in (node.leaves, node.tokens_below, node.hits_below)),
        human_count(hidden) if hidden else "",
        ", ".join(f"{name} {count}" for name, count in sorted(node.tier_blocks.items())),
    ]


def tier_bar(tiers: Mapping[str, int]) -> Text:
    """The shares of the tiers as a bar; every tier that has a block has a cell."""
    whole, bar, done = sum(tiers.values()), Text(), 0
    for place, (name, count) in enumerate(sorted(tiers.items())):
        left = len(tiers) - place - 1
        upto = BAR_CELLS if not left else done + max(1, min(round(BAR_CELLS * count / whole), BAR_CELLS - done - left))
        bar.append("━" * (upto - done), style=colour_of(name))
        done = upto
    return bar


def colour_of(tier: str) -> str:
    """The color of a tier by its name."""
    return TIER_COLOURS.get(tier.partition(".")[0], "white")
