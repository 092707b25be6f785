"""The verbs that show the daemon: status, tiers, sessions, namespaces.

They request and show. Only `tiers --resume` changes something. Columns missing from a table are in
`--json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd._proto.cache_pb2 import TierKind
from tierd.cli.admin import OWN_NAME
from tierd.cli.ask import Ask, looking
from tierd.cli.figures import human_bytes, human_count, human_seconds
from tierd.cli.help import example
from tierd.cli.hits import hits_line, hits_of, plain_hits, prefetch_line, prefetched_of
from tierd.cli.models import spec_of
from tierd.cli.render import Cell, Column, bar, facts, full_text, plain_of, show_table, state_text

SESSION_DIGITS = 8
"""The first digits of a session's number. The log and `--json` have all; search there for these."""
RESUME_S = 20.0
"""Wait for a retry of a tier; a hanging disk never answers."""
TIER_COLUMNS = (
    Column("tier", style="bold"),
    Column("used", right=True),
    Column("of", right=True),
    Column("full", right=True),
    Column("", spare=4, is_bar=True),
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
    Column("metric"),
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
SESSION_COLUMNS = (
    Column("session", spare=2),
    Column("name", style="bold"),
    Column("state"),
    Column("pid", right=True),
    Column("tenant", spare=3),
    Column("leases", right=True, spare=4),
    Column("pinned", right=True),
    Column("reserved", right=True),
    Column("age", right=True, spare=1),
    Column("uid", right=True, spare=5),
    Column("reservations", right=True, spare=7),
    Column("sdk", spare=6),
)
NAMESPACE_COLUMNS = (
    Column("id", right=True),
    Column("model", style="bold"),
    Column("tenant"),
    Column("epoch", right=True),
    Column("blocks", right=True),
    Column("tokens/block", right=True, spare=2),
    Column("bytes/block", right=True, spare=1),
    Column("stored", right=True, spare=2),
    Column("codec", spare=5),
    Column("adapter", spare=3),
    Column("group", spare=4),
)


@click.command(epilog=example("tierctl status --watch 5"))
@click.option("--counters", is_flag=True, help="Also show every counter that is not zero.")
@looking
def status(ask: Ask, *, counters: bool) -> None:
    """Shows the daemon's state: load, hit ratio, tiers, notices."""
    with ask.connect() as daemon:
        answer = daemon.ask(pb.StatusRequest())
        held = pb.TiersReply() if ask.as_json else daemon.ask(pb.TiersRequest())
    if ask.as_json:
        both = {"hits": plain_hits(hits_of(answer.counters)), "prefetched": prefetched_of(answer.counters)}
        ask.show_json(plain_of(answer) | both)
        return
    draw_status(ask.console, answer, held.tiers, counters=counters)


def draw_status(console: Console, reply: pb.StatusReply, tiers: Sequence[pb.TierInfo], *, counters: bool) -> None:
    """Prints the state in a few lines, then the tiers, then the notices."""
    console.print(status_line(reply), soft_wrap=True)
    console.print(load_line(reply), soft_wrap=True)
    console.print(hits_line(hits_of(reply.counters)), soft_wrap=True)
    if (prefetched := prefetch_line(reply.counters)) is not None:
        console.print(prefetched, soft_wrap=True)
    console.print()
    show_table(console, TIER_COLUMNS, tier_rows(tiers), empty="no tiers")
    draw_unready(console, tiers)
    draw_trouble(console, tiers)
    if counters:
        moved = [(name, human_count(value)) for name, value in sorted(reply.counters.items()) if value]
        console.print()
        show_table(console, COUNTER_COLUMNS, moved, empty="every counter is zero")
    if reply.notices:
        console.print()
    for notice in reply.notices:
        console.print(Text.assemble(("note: ", "yellow"), notice), soft_wrap=not console.is_terminal)


def status_line(reply: pb.StatusReply) -> Text:
    """Version, state, age, process."""
    who = Text.assemble((f"tierd {reply.version} ", "bold"), state_text(reply.state), "   ")
    return who + facts(
        (("up", human_seconds(reply.uptime_s)), ("pid", str(reply.pid)), ("instance", reply.instance[:8]))
    )


def load_line(reply: pb.StatusReply, *, busy: str = "") -> Text:
    """Counts of open and held objects, and the CPU time; or busy, the share of a core, if given."""
    counts = ("leases", "reservations", "blocks")
    pairs = [(name, human_count(getattr(reply, name))) for name in counts]
    sessions = ("sessions", human_count(max(0, reply.sessions - 1)))  # one of them belongs to this program
    return facts([sessions, *pairs, ("cpu", busy or human_seconds(reply.cpu_s))])


@click.command(epilog=example("tierctl tiers -o wide"))
@click.option("--classes", is_flag=True, help="Also show each tier's size classes.")
@click.option("--resume", default="", metavar="NAME", help="First retry this tier, which is out of service.")
@looking
def tiers(ask: Ask, *, classes: bool, resume: str) -> None:
    """Shows each tier's capacity, use, traffic, location and trouble."""
    with ask.connect() as daemon:
        if resume:
            daemon.ask(pb.ResumeRequest(tier=resume, deadline_s=RESUME_S), timeout_s=RESUME_S + 10)
        answer = daemon.ask(pb.TiersRequest())
    ask.show(answer, lambda console, reply: draw_tiers(console, reply, classes=classes))


def draw_tiers(console: Console, reply: pb.TiersReply, *, classes: bool) -> None:
    """Prints the tiers, their locations, and on request the size classes."""
    show_table(console, TIER_COLUMNS, tier_rows(reply.tiers), empty="no tiers")
    console.print()
    for tier in reply.tiers:
        how = tier.mode or "plain"
        if tier.kind == TierKind.TIER_KIND_NVME and tier.level != 1:
            how += f", level {tier.level}"
        if tier.codec:
            how += f", codec {tier.codec}"
        console.print(facts(((tier.name, f"{tier.place or 'memory'} ({how})"),)), soft_wrap=True)
    draw_unready(console, reply.tiers)
    draw_trouble(console, reply.tiers)
    if classes:
        console.print()
        show_table(console, CLASS_COLUMNS, class_rows(reply.tiers), empty="no tier has size classes yet")


def draw_unready(console: Console, infos: Iterable[pb.TierInfo]) -> None:
    """Prints how much memory of each mapped tier is allocated, until all is."""
    for info in infos:
        if info.unready_bytes:
            ready = human_bytes(info.capacity_bytes - min(info.unready_bytes, info.capacity_bytes))
            when = f"on demand ({info.unready_reason})" if info.unready_reason else "in the background"
            said = f"{ready} of {human_bytes(info.capacity_bytes)} are ready; the rest follows {when}"
            console.print(Text.assemble((f"{info.name}: ", "yellow"), said), soft_wrap=True)


def draw_trouble(console: Console, infos: Iterable[pb.TierInfo]) -> None:
    """Prints why a tier accepts no new blocks or is out of service."""
    for info in infos:
        if info.trouble:
            what = "accepts no new blocks" if info.serving else "out of service"
            console.print(Text.assemble((f"{info.name} {what}: ", "red"), info.trouble), soft_wrap=True)


def tier_rows(infos: Iterable[pb.TierInfo]) -> list[list[Cell]]:
    """One row for each tier."""
    return [tier_row(info) for info in infos]


def tier_row(info: pb.TierInfo) -> list[Cell]:
    """A tier's cells, in the order of TIER_COLUMNS."""
    pages = (info.pages_ready, info.pages_pinned, info.pages_reserved, info.pages_retiring)
    bad = Text(human_count(info.pages_quarantined), style="red" if info.pages_quarantined else "")
    return [
        info.name or TierKind.Name(info.kind).removeprefix("TIER_KIND_").lower(),
        human_bytes(info.used_bytes),
        human_bytes(info.capacity_bytes),
        full_text(info.used_bytes, info.capacity_bytes, is_serving=info.serving),
        bar(info.used_bytes, info.capacity_bytes),
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


@click.command(epilog=example("tierctl sessions --watch 2"))
@looking
def sessions(ask: Ask) -> None:
    """Lists the connected clients, with the leases and bytes of each."""
    with ask.connect() as daemon:
        answer = daemon.ask(pb.SessionsRequest())
    ask.show(answer, draw_sessions)


def draw_sessions(console: Console, reply: pb.SessionsReply) -> None:
    """Prints one row for each session."""
    rows = [session_row(one) for one in others(reply.sessions)]
    show_table(console, SESSION_COLUMNS, rows, empty="no client is connected")


def others(sessions: Iterable[pb.SessionInfo]) -> list[pb.SessionInfo]:
    """The sessions without that of this program."""
    return [one for one in sessions if (one.name, one.pid) != (OWN_NAME, os.getpid())]


def session_row(session: pb.SessionInfo) -> list[Cell]:
    """A session's cells, in the order of SESSION_COLUMNS."""
    return [
        str(session.id)[:SESSION_DIGITS],
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


@click.command(epilog=example("tierctl namespaces -o json"))
@looking
def namespaces(ask: Ask) -> None:
    """Lists the namespaces: model, tenant, epoch, blocks.

    stored: the ratio at which stores encode blocks. ± is the greatest error of a value. codec: of
    blocks that engines encode themselves.
    """
    with ask.connect() as daemon:
        answer = daemon.ask(pb.NamespacesRequest())
    ask.show(answer, draw_namespaces)


def draw_namespaces(console: Console, reply: pb.NamespacesReply) -> None:
    """Prints one row for each namespace; those of a past epoch are dim."""
    show_table(
        console,
        NAMESPACE_COLUMNS,
        [namespace_row(one) for one in reply.namespaces],
        empty="no client has opened a namespace yet",
    )


def _encoding_text(namespace: pb.NamespaceInfo) -> str:
    """How much shorter stores keep its blocks, and their greatest error: `3.7x ±0.21`."""
    if not namespace.encoding.blocks:
        return "-"
    ratio = namespace.encoding.plain_bytes / namespace.encoding.stored_bytes
    return f"{ratio:.1f}x" + (f" ±{namespace.encoding.error:.2g}" if namespace.encoding.error else "")


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
        _encoding_text(namespace),
        str(spec.get("codec") or "-").partition("@")[0],
        str(spec.get("adapter") or "-"),
        str(spec.get("group") or "-"),
    ]
    return [Text(cell, style="" if namespace.current else "dim") for cell in cells]
