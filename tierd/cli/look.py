"""The commands that only look: status, tiers, blocks, inspect, sessions, namespaces.

They request and show; they change nothing. Columns missing from a table are in `--json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd._proto.cache_pb2 import TierKind
from tierd.cli.ask import Ask, verb
from tierd.cli.figures import human_bytes, human_count, human_seconds
from tierd.cli.render import Cell, Column, bar, facts, share_text, show_table, state_text
from tierd.errors import InvalidArgument

HASH_DIGITS = 12
"""Digits of a block hash in a table: enough to tell blocks apart and for `inspect`."""
HASH_MAX_DIGITS = 64
LABEL_VALUE = re.compile(r'="([^"]*)"')
RESUME_S = 20.0
"""Longest wait for a retry: a hanging disk never answers."""
DECLINED = {
    "partial": "it is the short end of a sequence, which the next turn fills up under another name",
    "unlikely": "another use of it is not likely enough",
    "displaced": "it was since its last use, and has given way to others there",
    "budget": "the wear budget went to blocks that are likelier to be used again; see `tierctl wear`",
}
"""Reasons why admission declined a block at its last eviction from memory."""
SORTS = ("recent", "hits", "position", "bytes")

TIER_COLUMNS = (
    Column("tier", style="bold"),
    Column("used", right=True),
    Column("of", right=True),
    Column("full", right=True),
    Column("", spare=4),
    Column("blocks", right=True),
    Column("pinned", right=True),
    Column("reserved", right=True, spare=6),
    Column("retiring", right=True, spare=7),
    Column("bad", right=True, spare=2),
    Column("evicted", right=True, spare=1),
    Column("read", right=True, spare=2),
    Column("written", right=True, spare=3),
    Column("mode", spare=5),
)
COUNTER_COLUMNS = (
    Column("counter"),
    Column("count", right=True),
)
CLASS_COLUMNS = (
    Column("tier", style="bold"),
    Column("page", right=True),
    Column("domain", right=True),
    Column("segments", right=True),
    Column("pages", right=True),
    Column("free", right=True),
)
BLOCK_COLUMNS = (
    Column("block", style="cyan"),
    Column("ns", right=True),
    Column("no.", right=True),
    Column("tokens", right=True, spare=1),
    Column("bytes", right=True),
    Column("pins", right=True),
    Column("hits", right=True),
    Column("idle", right=True),
    Column("tiers"),
    Column("prio", right=True, spare=3),
    Column("parent", style="dim", spare=2),
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
SESSION_COLUMNS = (
    Column("session", right=True, spare=7),
    Column("name", style="bold"),
    Column("state"),
    Column("pid", right=True),
    Column("tenant", spare=3),
    Column("leases", right=True, spare=2),
    Column("pinned", right=True),
    Column("reserved", right=True),
    Column("age", right=True, spare=1),
    Column("uid", right=True, spare=5),
    Column("writing", right=True, spare=4),
    Column("sdk", spare=6),
)
NAMESPACE_COLUMNS = (
    Column("ns", right=True),
    Column("model", style="bold"),
    Column("tenant"),
    Column("epoch", right=True),
    Column("blocks", right=True),
    Column("tokens/block", right=True, spare=2),
    Column("bytes/block", right=True, spare=1),
    Column("adapter", spare=3),
    Column("group", spare=4),
)


@click.command()
@click.option("--counters", is_flag=True, help="Also every counter that is not zero.")
@verb
def status(ask: Ask, *, counters: bool) -> None:
    """How the daemon is: state, load, tiers, notices."""
    with ask.connect() as daemon:
        answer = daemon.ask(pb.StatusRequest())
        held = pb.TiersReply() if ask.as_json else daemon.ask(pb.TiersRequest())
    ask.show(answer, lambda console, reply: draw_status(console, reply, held.tiers, counters=counters))


def draw_status(console: Console, reply: pb.StatusReply, tiers: Sequence[pb.TierInfo], *, counters: bool) -> None:
    """The state in a few lines, then the tiers, then the machine's deficiencies."""
    console.print(status_line(reply), soft_wrap=True)
    console.print(load_line(reply), soft_wrap=True)
    console.print()
    show_table(console, TIER_COLUMNS, tier_rows(tiers), empty="no tiers")
    draw_unready(console, tiers)
    draw_trouble(console, tiers)
    if counters:
        moved = [(short_counter(name), human_count(value)) for name, value in sorted(reply.counters.items()) if value]
        console.print()
        show_table(console, COUNTER_COLUMNS, moved, empty="every counter is zero")
    if reply.notices:
        console.print()
    for notice in reply.notices:
        console.print(Text.assemble(("note: ", "yellow"), notice), soft_wrap=not console.is_terminal)


def short_counter(name: str) -> str:
    """`calls Acquire ok` for tierd_calls_total{method="Acquire",outcome="ok"}."""
    bare, _, labels = name.partition("{")
    values = LABEL_VALUE.findall(labels)
    return " ".join([bare.removeprefix("tierd_").removesuffix("_total"), *values])


def status_line(reply: pb.StatusReply) -> Text:
    """Version, state, age, process."""
    who = Text.assemble((f"tierd {reply.version} ", "bold"), state_text(reply.state), "   ")
    return who + facts(
        (("up", human_seconds(reply.uptime_s)), ("pid", str(reply.pid)), ("instance", reply.instance[:8]))
    )


def load_line(reply: pb.StatusReply, *, busy: str = "") -> Text:
    """Open and held objects, and their cost: total CPU time, or the share of a core if known."""
    counts = ("sessions", "leases", "reservations", "blocks")
    pairs = [(name, human_count(getattr(reply, name))) for name in counts]
    return facts([*pairs, ("cpu", busy or human_seconds(reply.cpu_s))])


@click.command()
@click.option("--classes", is_flag=True, help="Also how each tier's memory is split into size classes.")
@click.option("--resume", default="", metavar="NAME", help="First try this tier, which is out of service, again.")
@verb
def tiers(ask: Ask, *, classes: bool, resume: str) -> None:
    """Each tier's capacity, use, traffic, place and trouble."""
    with ask.connect() as daemon:
        if resume:
            daemon.ask(pb.ResumeRequest(tier=resume, deadline_s=RESUME_S), timeout_s=RESUME_S + 10)
        answer = daemon.ask(pb.TiersRequest())
    ask.show(answer, lambda console, reply: draw_tiers(console, reply, classes=classes))


def draw_tiers(console: Console, reply: pb.TiersReply, *, classes: bool) -> None:
    """The tiers, their locations, and on request the size classes."""
    show_table(console, TIER_COLUMNS, tier_rows(reply.tiers), empty="no tiers")
    console.print()
    for tier in reply.tiers:
        console.print(facts(((tier.name, f"{tier.place or 'memory'} ({tier.mode or 'plain'})"),)), soft_wrap=True)
    draw_unready(console, reply.tiers)
    draw_trouble(console, reply.tiers)
    if classes:
        console.print()
        show_table(console, CLASS_COLUMNS, class_rows(reply.tiers), empty="no tier has split its memory yet")


def draw_unready(console: Console, infos: Iterable[pb.TierInfo]) -> None:
    """The progress of mapped tiers' memory until it is complete."""
    for info in infos:
        if info.unready_bytes:
            ready = human_bytes(info.capacity_bytes - min(info.unready_bytes, info.capacity_bytes))
            when = f"when it is wanted ({info.unready_reason})" if info.unready_reason else "in the background"
            said = f"{ready} of {human_bytes(info.capacity_bytes)} are ready, more is made {when}"
            console.print(Text.assemble((f"{info.name}: ", "yellow"), said), soft_wrap=True)


def draw_trouble(console: Console, infos: Iterable[pb.TierInfo]) -> None:
    """Reasons why a tier accepts no new blocks or is out of service."""
    for info in infos:
        if info.trouble:
            what = "takes nothing new" if info.serving else "out of service"
            console.print(Text.assemble((f"{info.name} {what}: ", "red"), info.trouble), soft_wrap=True)


def tier_rows(infos: Iterable[pb.TierInfo]) -> list[list[Cell]]:
    """One row for each tier."""
    return [tier_row(info) for info in infos]


def tier_row(info: pb.TierInfo) -> list[Cell]:
    """A tier's cells, in the order of TIER_COLUMNS."""
    gauge = bar(info.used_bytes, info.capacity_bytes) if info.serving else Text("off", style="red")
    pages = (info.pages_ready, info.pages_pinned, info.pages_reserved, info.pages_retiring)
    bad = Text(human_count(info.pages_quarantined), style="red" if info.pages_quarantined else "")
    return [
        info.name or TierKind.Name(info.kind).removeprefix("TIER_KIND_").lower(),
        human_bytes(info.used_bytes),
        human_bytes(info.capacity_bytes),
        share_text(info.used_bytes, info.capacity_bytes),
        gauge,
        *(human_count(count) for count in pages),
        bad,
        human_count(info.evictions),
        human_bytes(info.bytes_read),
        human_bytes(info.bytes_written),
        info.mode,
    ]


def class_rows(infos: Iterable[pb.TierInfo]) -> list[list[Cell]]:
    """One row for each size class and domain of each tier."""
    return [
        [
            tier.name,
            human_bytes(row.class_bytes),
            *(human_count(n) for n in (row.domain, row.segments, row.pages, row.pages_free)),
        ]
        for tier in infos
        for row in tier.classes
    ]


@click.command()
@click.option("--tier", default="", metavar="NAME", help="Only blocks in this tier, such as host.0.")
@click.option(
    "--namespace", type=click.IntRange(0, (1 << 32) - 1), default=None, help="Only blocks of this namespace id."
)
@click.option("--pinned", is_flag=True, help="Only blocks that somebody holds.")
@click.option("--prefix", "hash_prefix", default="", metavar="HEX", help="Only hashes that begin like this.")
@click.option(
    "--sort", type=click.Choice([*SORTS, *(f"-{sort}" for sort in SORTS)]), default="recent", show_default=True
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Blocks on a page.")
@click.option("--offset", type=click.IntRange(0, (1 << 32) - 1), default=0, help="Blocks before the page.")
@verb
def blocks(ask: Ask, *, namespace: int | None, hash_prefix: str, offset: int, **filters: str | int | bool) -> None:
    """Lists blocks: filtered, sorted, a page at a time."""
    request = pb.BlocksRequest(
        namespace=namespace or 0,
        has_namespace=namespace is not None,
        hash_prefix=checked_hash(hash_prefix, empty=True),
        offset=offset,
        **filters,  # type: ignore[arg-type]  # click has checked their types
    )
    with ask.connect() as daemon:
        answer = daemon.ask(request)
    ask.show(answer, lambda console, reply: draw_blocks(console, reply, offset=offset))


def draw_blocks(console: Console, reply: pb.BlocksReply, *, offset: int) -> None:
    """The page, and its position among all matches."""
    rows = [block_row(block) for block in reply.blocks]
    empty = f"no block here; {human_count(reply.total)} match in all" if reply.total else "no block matches"
    show_table(console, BLOCK_COLUMNS, rows, empty=empty)
    last = offset + len(rows)
    if rows and console.is_terminal:
        more = f"; go on with --offset {last}" if last < reply.total else ""
        console.print(Text(f"{offset + 1:,} to {last:,} of {reply.total:,}{more}", style="dim"))


def block_row(block: pb.BlockInfo) -> list[Cell]:
    """A block's cells, in the order of BLOCK_COLUMNS."""
    return [
        block.hash.hex()[:HASH_DIGITS],
        str(block.namespace),
        str(block.position),
        str(block.tokens),
        human_bytes(block.bytes),
        str(block.pins),
        human_count(block.hits),
        human_seconds(block.idle_s),
        " ".join(block.tiers),
        priority_text(block),
        parent_text(block.parent),
    ]


def priority_text(block: pb.BlockInfo) -> str:
    """`90`, or `90 60 s` with its remaining time."""
    return f"{block.priority} {human_seconds(block.retention_s)}" if block.retention_s else str(block.priority)


def parent_text(parent: bytes) -> str:
    """The parent's short name, or `root`."""
    return parent.hex()[:HASH_DIGITS] if any(parent) else "root"


@click.command()
@click.argument("block", metavar="HASH")
@verb
def inspect(ask: Ask, block: str) -> None:
    """One block: what it is, where its pages lie, what follows it. HASH: any unambiguous prefix."""
    request = pb.InspectRequest(hash=checked_hash(block))
    with ask.connect() as daemon:
        answer = daemon.ask(request)
    ask.show(answer, draw_block)


def draw_block(console: Console, reply: pb.InspectReply) -> None:
    """The block's facts, then its pages, then its children."""
    block = reply.block
    console.print(facts((("block", Text(block.hash.hex(), style="cyan")),)), soft_wrap=True)
    console.print(
        facts((("parent", block.parent.hex() if any(block.parent) else "root: the first of its sequence"),)),
        soft_wrap=True,
    )
    counts = (("namespace", str(block.namespace)), ("no.", str(block.position)), ("tokens", str(block.tokens)))
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
    show_table(console, PAGE_COLUMNS, [page_row(page) for page in reply.pages], empty="no page holds it now")
    if reply.children:
        names = "  ".join(child.hex()[:HASH_DIGITS] for child in reply.children)
        console.print()
        console.print(facts((("children", names),)))


def page_row(page: pb.PageInfo) -> list[Cell]:
    """A page's cells, in the order of PAGE_COLUMNS."""
    numbers = (page.segment, page.slot, page.offset, page.generation, page.pins)
    return [page.tier, state_text(page.state), *(str(number) for number in numbers)]


@click.command()
@verb
def sessions(ask: Ask) -> None:
    """Who is connected, and what each holds."""
    with ask.connect() as daemon:
        answer = daemon.ask(pb.SessionsRequest())
    ask.show(answer, draw_sessions)


def draw_sessions(console: Console, reply: pb.SessionsReply) -> None:
    """One row for each session."""
    show_table(console, SESSION_COLUMNS, [session_row(one) for one in reply.sessions], empty="nobody is connected")


def session_row(session: pb.SessionInfo) -> list[Cell]:
    """A session's cells, in the order of SESSION_COLUMNS."""
    return [
        str(session.id),
        session.name or "-",
        state_text(session.state),
        str(session.pid),
        session.tenant,
        human_count(session.leases),
        human_bytes(session.pinned_bytes),
        human_bytes(session.reserved_bytes),
        human_seconds(session.age_s),
        str(session.uid),
        human_count(session.reservations),
        session.sdk,
    ]


@click.command()
@verb
def namespaces(ask: Ask) -> None:
    """Models, their tenants and epochs."""
    with ask.connect() as daemon:
        answer = daemon.ask(pb.NamespacesRequest())
    ask.show(answer, draw_namespaces)


def draw_namespaces(console: Console, reply: pb.NamespacesReply) -> None:
    """One row for each namespace; those of a past epoch dim."""
    show_table(
        console,
        NAMESPACE_COLUMNS,
        [namespace_row(one) for one in reply.namespaces],
        empty="no namespace was opened yet",
    )


def namespace_row(namespace: pb.NamespaceInfo) -> list[Cell]:
    """A namespace's cells, in the order of NAMESPACE_COLUMNS."""
    spec = spec_of(namespace.text)
    cells = [
        str(namespace.id),
        namespace.model,
        namespace.tenant,
        str(namespace.epoch),
        human_count(namespace.blocks),
        str(spec.get("tokens_per_block", "-")),
        human_bytes(int(spec["block_bytes"])) if "block_bytes" in spec else "-",
        str(spec.get("adapter") or "-"),
        str(spec.get("group") or "-"),
    ]
    return [Text(cell, style="" if namespace.current else "dim") for cell in cells]


def spec_of(text: str) -> dict[str, int | str]:
    """The spec inside a namespace's canonical JSON; empty if a newer daemon writes it differently."""
    try:
        whole = json.loads(text)
    except ValueError:
        return {}
    spec = whole.get("spec", whole) if isinstance(whole, dict) else {}
    return spec if isinstance(spec, dict) else {}


def checked_hash(text: str, *, empty: bool = False) -> str:
    """A hexadecimal prefix of a block hash, lower case. Raises InvalidArgument."""
    low = text.strip().lower().removeprefix("0x")
    if (not low and not empty) or len(low) > HASH_MAX_DIGITS or set(low) - set("0123456789abcdef"):
        raise InvalidArgument(
            f"hash: {text!r} is not 1 to {HASH_MAX_DIGITS} hexadecimal digits; `tierctl blocks` lists hashes"
        )
    return low
