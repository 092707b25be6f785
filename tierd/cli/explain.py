"""`tierctl explain`: why requests hit or missed, from the daemon's record of decisions.

The daemon explains requests and blocks. If it has never seen a block of a prompt, the prompt is
hashed by the rules of the other namespaces too (prompts.py). So a wrong adapter, salt, tenant or
epoch is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import Connection
from tierd.cli.ask import Ask, listing
from tierd.cli.blocks import HASH_DIGITS
from tierd.cli.figures import human_bytes, human_count, human_seconds
from tierd.cli.help import example
from tierd.cli.prompts import Space, chosen, spaces_of, tokens_of
from tierd.cli.render import Cell, Column, show_table
from tierd.decisions.causes import MEANINGS, Cause
from tierd.errors import NotFound, Unsupported

OTHERS_LIMIT = 256
"""Other namespaces that a prompt is looked for in."""
UNSEEN = (Cause.NEVER_STORED, Cause.BEFORE_RECORD)
HITS = (Cause.HIT_NEAR, Cause.HIT_FAR)
HINT = "With a file of the prompt's token ids, explain also looks into the other namespaces."
HIT_STYLES = {Cause.HIT_NEAR: "green", Cause.HIT_FAR: "cyan"}
APART = ("model", "adapter", "weights_digest", "group", "rank_count", "codec", "tokens_per_block", "block_bytes")
SHAPES = ("layers", "kv_heads", "head_dim", "dtype", "layout")

REQUEST_COLUMNS = (
    Column("ago", right=True),
    Column("request", style="bold"),
    Column("kind", spare=2),
    Column("model", style="cyan", spare=1),
    Column("tokens", right=True),
    Column("missed", right=True),
    Column("cause"),
    Column("from", spare=3),
    Column("waited", right=True, spare=4),
    Column("times", right=True, spare=6),
    Column("session", spare=5),
)
BLOCK_COLUMNS = (
    Column("blocks", right=True),
    Column("tokens", right=True, spare=2),
    Column("first hash", spare=1),
    Column("cause"),
    Column("tier"),
    Column("ago", right=True),
)


@click.command(
    epilog=example(
        "tierctl explain --last 20 --misses",
        "tierctl explain cmpl-7d41",
        "tierctl explain 3f9a0c",
        "tierctl explain prompt.json --model llama",
    )
)
@click.argument("what", metavar="[REQUEST|HASH|FILE]", default="")
@click.option("--last", type=click.IntRange(1, 1000), default=20, show_default=True, help="Requests at most.")
@click.option("--misses", is_flag=True, help="Only requests that missed something.")
@click.option("--namespace", type=int, help="Namespace of the token file, by its id.")
@click.option("--model", default="", help="Model of the token file, if it has one namespace.")
@listing
def explain(ask: Ask, what: str, *, last: int, misses: bool, **which: Any) -> None:
    """Tells why requests hit or missed.

    Without an argument it lists the latest requests. REQUEST: the engine's id of one. HASH: the
    first digits of a block's hash. FILE: the token ids of one prompt, as a JSON list or separated
    by spaces.
    """
    with ask.connect() as daemon:
        if what and Path(what).is_file():
            tokens = tokens_of(Path(what))
            spaces = spaces_of(daemon.ask(pb.NamespacesRequest()).namespaces, daemon.ask(pb.SessionsRequest()).sessions)
            space = chosen(spaces, **which)
            answer = explain_prompt(daemon, space, tokens, others=[one for one in spaces if one.id != space.id])
            ask.show(answer, lambda console, reply: draw_prompt(console, reply, space, len(tokens)))
            return
        answer = daemon.ask(pb.ExplainRequest(request=what, last=last, misses=misses))
        if what and not answer.requests:
            answer = explain_block(daemon, what)
    ask.show(answer, draw_blocks if answer.blocks else lambda console, reply: draw_requests(console, reply, what))


def explain_block(daemon: Connection, what: str) -> pb.ExplainReply:
    """The daemon's answer about a block. Raises NotFound if nothing has this name."""
    digits = what.lower().removeprefix("0x")
    if set(digits) - set("0123456789abcdef"):
        raise NotFound(
            f"{what}: no file, no block, and the record has no request of this id; list requests with "
            "`tierctl explain --last 20`"
        )
    return daemon.ask(pb.ExplainRequest(block=digits))


def explain_prompt(
    daemon: Connection, space: Space, tokens: Sequence[int], *, others: Sequence[Space]
) -> pb.ExplainReply:
    """The daemon's answer about each block of a prompt. Blocks that it has never seen in this
    namespace are looked for in the others."""
    hashes = space.hashes(tokens)
    reply = daemon.ask(pb.ExplainRequest(hashes=hashes.tobytes(), namespace=space.id))
    unseen = [row for row, cause in enumerate(reply.blocks) if cause.cause in UNSEEN]
    for other in likely_first(space, others) if unseen else ():
        try:
            names = other.hashes(tokens)
        except Unsupported:
            continue
        rows = [row for row in unseen if row * space.size // other.size < len(names)]
        if not rows:
            continue
        wanted = names[[row * space.size // other.size for row in rows]]
        found = daemon.ask(pb.ExplainRequest(hashes=wanted.tobytes(), namespace=other.id)).blocks
        is_there = [cause.cause in HITS or cause.ago_s >= 0 for cause in found]
        if is_there[0]:
            for row, cause, held in zip(rows, found, is_there, strict=True):
                if held:
                    reply.blocks[row].CopyFrom(elsewhere(space, other, cause, reply.blocks[row].hash))
            break
    return reply


def likely_first(space: Space, others: Sequence[Space]) -> list[Space]:
    """The other namespaces, those with the fewest differences first; OTHERS_LIMIT at most."""
    return sorted(others, key=lambda other: (len(differences(space, other)), -other.id))[:OTHERS_LIMIT]


def differences(space: Space, other: Space) -> list[str]:
    """The fields in which two namespaces differ: `adapter: 'a' here, none there`."""
    pairs = [("tenant", space.text["tenant"], other.text["tenant"])]
    pairs += [(name, space.spec.get(name, ""), other.spec.get(name, "")) for name in (*APART, "salt")]
    shapes = space.spec.get("geometry", {}), other.spec.get("geometry", {})
    pairs += [(name, shapes[0].get(name, ""), shapes[1].get(name, "")) for name in SHAPES]
    pairs.append(("epoch", space.text["epoch"], other.text["epoch"]))
    return [f"{name}: {short(here)} here, {short(there)} there" for name, here, there in pairs if here != there]


def short(value: object) -> str:
    """A field's value, cut if it is long. Empty: none."""
    text = "none" if value in ("", None) else repr(value)
    return text if len(text) <= 40 else f"{text[:36]}...{text[0]}"


def elsewhere(space: Space, other: Space, found: pb.Cause, hash: bytes) -> pb.Cause:
    """The cause of a block that another namespace has, or had."""
    apart = differences(space, other)
    names = {one.partition(":")[0] for one in apart}
    if "tenant" in names:
        cause = Cause.OTHER_TENANT
    elif names == {"epoch"}:
        cause = Cause.EPOCH_BUMPED
    else:
        cause = Cause.OTHER_SALT if names == {"salt"} else Cause.OTHER_NAMESPACE
    had = "has" if found.cause in HITS else "had"
    meaning = "" if cause is Cause.OTHER_NAMESPACE else f"{MEANINGS[cause]} "  # the differences say it
    text = f"{meaning}Namespace {other.id} {had} the same tokens; {'; '.join(apart)}."
    facts = {"namespace": str(other.id), "differs": "; ".join(apart), "there": found.cause}
    return pb.Cause(
        cause=cause, text=text, hash=hash, ago_s=found.ago_s, tier=found.tier, facts=facts, namespace=space.id
    )


def draw_requests(console: Console, reply: pb.ExplainReply, what: str) -> None:
    """Prints a row for each request; for one id also the reasons in words."""
    rows = [request_row(row) for row in reply.requests]
    show_table(console, REQUEST_COLUMNS, rows, empty="no such request yet" if reply.bytes else "")
    if what:
        draw_reasons(console, [(f"{row.kind}:", row.cause) for row in reply.requests])
        if any(row.cause.cause in UNSEEN for row in reply.requests):
            console.print()
            console.print(Text(HINT, style="dim"), soft_wrap=not console.is_terminal)
    draw_record(console, reply)


def request_row(row: pb.RequestDecision) -> list[Cell]:
    """A request's cells, in the order of REQUEST_COLUMNS."""
    return [
        human_seconds(row.ago_s),
        row.request or "-",
        row.kind,
        row.model.rstrip("/").rpartition("/")[2] or "-",
        human_count(row.tokens_asked),
        human_count(row.tokens_missed) if row.tokens_missed else "-",
        cause_text(row.cause),
        " ".join(f"{tier} {human_count(count)}" for tier, count in sorted(row.tier_tokens.items())) or "-",
        human_seconds(row.waited_s) if row.waited_s else "-",
        str(row.times),
        str(row.session)[:8],
    ]


def draw_prompt(console: Console, reply: pb.ExplainReply, space: Space, tokens: int) -> None:
    """Prints a row for each run of blocks with one cause, and the reasons in words."""
    size, rows, reasons = space.size, list[list[Cell]](), list[tuple[str, pb.Cause]]()
    for first, last, cause in runs(reply.blocks):
        blocks = str(first) if first == last else f"{first}-{last}"
        covered = f"{first * size:,}-{min(tokens, (last + 1) * size) - 1:,}"
        rows.append([blocks, covered, *block_cells(cause)])
        reasons.append((f"{blocks}:", cause))
    show_table(console, BLOCK_COLUMNS, rows, empty="the prompt has no block")
    draw_reasons(console, reasons)
    draw_record(console, reply)


def runs(causes: Sequence[pb.Cause]) -> Iterator[tuple[int, int, pb.Cause]]:
    """First row, last row and first cause of each run of equal causes."""
    for _, group in groupby(enumerate(causes), key=lambda pair: (pair[1].cause, pair[1].tier)):
        held = list(group)
        yield held[0][0], held[-1][0], held[0][1]


def draw_blocks(console: Console, reply: pb.ExplainReply) -> None:
    """Prints what became of a block, in each rank's namespace that knew it."""
    for cause in reply.blocks:
        line = Text.assemble((cause.hash.hex(), "cyan"), f"  namespace {cause.namespace}")
        console.print(line, soft_wrap=True)
    draw_reasons(console, [("", cause) for cause in reply.blocks])
    draw_record(console, reply)


def draw_reasons(console: Console, reasons: Sequence[tuple[str, pb.Cause]]) -> None:
    """Prints each reason once, in words."""
    for head, cause in {(head, cause.text): (head, cause) for head, cause in reasons}.values():
        console.print()
        about = [f"block {cause.hash.hex()[:HASH_DIGITS]}"] if cause.hash else []
        about += [f"{human_seconds(cause.ago_s)} ago"] if cause.ago_s >= 0 else []
        said = f" ({', '.join(about)})" if about else ""
        text = Text.assemble((f"{head} ".lstrip(), "dim"), cause_text(cause), f"{said}: {cause.text}")
        console.print(text, soft_wrap=not console.is_terminal)


def block_cells(cause: pb.Cause) -> list[Cell]:
    """A block's cells after its position, in the order of BLOCK_COLUMNS."""
    return [cause.hash.hex()[:HASH_DIGITS], cause_text(cause), cause.tier or "-", human_seconds(cause.ago_s)]


def cause_text(cause: pb.Cause) -> Text:
    """The name of a cause; hits have colors."""
    known = [name for name in Cause if name == cause.cause]
    return Text(cause.cause, style=HIT_STYLES.get(known[0], "yellow") if known else "")


def draw_record(console: Console, reply: pb.ExplainReply) -> None:
    """Prints the size of the record, or that there is none."""
    if not reply.bytes:
        off = "no record: server.decisions is 0; set it in the configuration file, and restart"
        console.print(Text(off, style="yellow"), soft_wrap=True)
        return
    parts = f"{human_count(reply.decisions)} decisions", human_seconds(reply.since_s), human_bytes(reply.bytes)
    console.print()
    console.print(Text("the record: {} of the last {}, {} of memory".format(*parts), style="dim"), soft_wrap=True)
