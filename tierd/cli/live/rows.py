"""The rows of the panes of `tierctl top`: pure functions of the daemon's answers and a sort key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierd._proto import admin_pb2 as pb
from tierd.cli.figures import human_bytes, human_count, human_rate, human_share
from tierd.cli.hits import hits_of
from tierd.cli.live.sampling import Change, Rare
from tierd.cli.live.view import View
from tierd.cli.look import SESSION_COLUMNS, others, session_row
from tierd.cli.models import Models
from tierd.cli.render import Cell, Column, bar, full_text
from tierd.cli.tree import TREE_COLUMNS, tree_rows

TOP_COLUMNS = (
    Column("tier", style="bold"),
    Column("used", right=True, spare=4),
    Column("of", right=True),
    Column("full", right=True),
    Column("", spare=5, is_bar=True),
    Column("hits now", right=True),
    Column("hits", right=True),
    Column("read", right=True),
    Column("write", right=True),
    Column("blocks", right=True, spare=6),
    Column("pinned", right=True, spare=7),
    Column("evict/s", right=True, spare=3),
)
RATE_COLUMNS = (
    Column("link or counter", style="bold"),
    Column("per s", right=True),
    Column("bytes", right=True),
)
OWN_METHODS = {f'method="{method.name}"' for method in pb.DESCRIPTOR.services_by_name["Admin"].methods}
"""Calls of operators, such as those of `top` itself: hidden."""
Rows = list[list[Cell]]


def tables_of(change: Change, rare: Rare, view: View) -> list[tuple[Sequence[Column], Rows]]:
    """The columns and sorted rows of each pane."""
    tree = list(tree_rows(rare.tree, Models(rare.namespaces.namespaces), has_guides=True))
    return [
        (TOP_COLUMNS, tier_rows(change, sort=view.sort_of("tiers"))),
        (SESSION_COLUMNS, session_rows(change.after.sessions.sessions, sort=view.sort_of("sessions"))),
        (TREE_COLUMNS, tree),
        (RATE_COLUMNS, rate_rows(change, sort=view.sort_of("rates"))),
    ]


def tier_rows(change: Change, *, sort: str = "order") -> Rows:
    """One row for each tier, with rates."""
    old = {tier.name: tier for tier in change.before.tiers.tiers}
    hits = hits_of(change.after.status.counters).tiers
    moved = {
        tier.name: tier.bytes_read + tier.bytes_written - old[tier.name].bytes_read - old[tier.name].bytes_written
        for tier in change.after.tiers.tiers
        if tier.name in old
    }
    keys: dict[str, Callable[[pb.TierInfo], float]] = {
        "fill": lambda tier: -tier.used_bytes / max(1, tier.capacity_bytes),
        "hits": lambda tier: -hits.get(tier.name, 0),
        "traffic": lambda tier: -moved.get(tier.name, 0),
    }
    tiers = sorted(change.after.tiers.tiers, key=keys[sort]) if sort in keys else change.after.tiers.tiers
    return [tier_row(change, old.get(tier.name, tier), tier) for tier in tiers]


def tier_row(change: Change, old: pb.TierInfo, new: pb.TierInfo) -> list[Cell]:
    """A tier's cells, in the order of TOP_COLUMNS."""
    evictions = change.per_second(old.evictions, new.evictions)
    now, every = change.hits, hits_of(change.after.status.counters)
    return [
        new.name,
        human_bytes(new.used_bytes),
        human_bytes(new.capacity_bytes),
        full_text(new.used_bytes, new.capacity_bytes, is_serving=new.serving),
        bar(new.used_bytes, new.capacity_bytes),
        human_share(now.tiers.get(new.name, 0), now.asked),
        human_share(every.tiers.get(new.name, 0), every.asked),
        human_rate(change.per_second(old.bytes_read, new.bytes_read)),
        human_rate(change.per_second(old.bytes_written, new.bytes_written)),
        human_count(new.pages_ready),
        human_count(new.pages_pinned),
        human_count(evictions) if evictions >= 0.5 else "-",
    ]


def session_rows(sessions: Iterable[pb.SessionInfo], *, sort: str) -> Rows:
    """One row for each session but this program's."""
    keys: dict[str, Callable[[pb.SessionInfo], tuple[object, ...]]] = {
        "bytes held": lambda one: (-one.pinned_bytes - one.reserved_bytes,),
        "leases": lambda one: (-one.leases,),
        "age": lambda one: (-one.age_s,),
        "name": lambda one: (one.name,),
    }
    return [session_row(one) for one in sorted(others(sessions), key=lambda one: (*keys[sort](one), one.id))]


def rate_rows(change: Change, *, sort: str) -> Rows:
    """A row for each link between tiers that moves bytes, and for each counter that grows."""
    rates, links = change.rates(), dict[str, tuple[float, float]]()
    counters = {name: rate for name, rate in rates.items() if is_shown(name)}
    for name, rate in rates.items():
        family, _, labels = name.partition("{")
        if family in ("tierd_bytes_total", "tierd_transfers_total") and 'link="' in labels:
            link = labels.split('link="')[1].split('"')[0]
            made, moved = links.get(link, (0.0, 0.0))
            links[link] = (made, moved + rate) if family == "tierd_bytes_total" else (made + rate, moved)
    rows = [(link, made, human_rate(moved)) for link, (made, moved) in links.items()]
    rows += [(name, rate, "-") for name, rate in counters.items()]
    rows.sort(key=lambda row: (row[0],) if sort == "name" else (row[2] == "-", -row[1], row[0]))
    return [[name, human_count(rate) if rate >= 10 else f"{rate:.1f}", moved] for name, rate, moved in rows]


def is_shown(counter: str) -> bool:
    """Whether a counter's rate is shown: no operators' calls, and nothing that links and tiers show."""
    hidden = ("bytes", "tierd_transfers_total", "tokens_hit_total", "tokens_missed_total")
    return not any(text in counter for text in (*hidden, *OWN_METHODS))


def shown_rows(rows: Rows, text: str) -> Rows:
    """The rows with this text in a cell, whatever its case."""
    return [row for row in rows if text.lower() in " ".join(map(str, row)).lower()] if text else rows
