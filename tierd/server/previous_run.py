"""Restores sessions of the previous run, and protects memory without a known holder.

Before the core adopts a segment, either the session table names the holders of its pages, or NOBODY
may write it. The table is the one that covered all mapped tiers in the previous run. Rows name
segments, whose ids are never reused, because tiers may have changed places. The table is in
tiers/arena/holds.py, the life of sessions in sessions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierd.core.formats.model import StructArray
from tierd.tiers.arena.arena import Arena
from tierd.tiers.arena.holds import FormerHolder, HoldTable
from tierd.tiers.tier import Recovered, Tier

TABLE_NAME = "sessions.tbl"


def open_holds(tiers: Sequence[Tier], recovered: Sequence[Recovered]) -> tuple[HoldTable, list[FormerHolder]]:
    """The session table, beside the catalogues of a mapped tier, and the sessions in it. Raises
    VersionMismatch, TierFailed."""
    arenas = {i: tier for i, tier in enumerate(tiers) if isinstance(tier, Arena)}

    def distrust(fault: str) -> None:
        for i, arena in arenas.items():
            if arena.found:
                recovered[i].segments[:] = arena.seal_found()
                arena.notices.append(
                    f"{arena.spec.name}: {fault}: the holders of pages are unknown, so the {arena.found} recovered"
                    " segments are verified at every hit, and freed whole, never page by page"
                )

    places = [arena.tables / TABLE_NAME for arena in arenas.values()]
    path, *others = [place for place in places if place.exists()] or places[:1]
    if others:
        distrust(f"{path}, {others[0]}: there are two session tables")
    table = HoldTable(path)
    former = table.open(distrust=distrust)
    for other in others:
        other.unlink()
    return table, [_placed(f, _tiers_of(recovered)) for f in former]


def _tiers_of(recovered: Sequence[Recovered]) -> dict[int, int]:
    """Segment to its present tier."""
    return {given.segment: given.tier for found in recovered for given in found.segments}


def _placed(former: FormerHolder, tiers: dict[int, int]) -> FormerHolder:
    """The holder with the present places of its pages."""
    return replace(former, leased=_moved(former.leased, tiers), reserved=_moved(former.reserved, tiers))


def _moved(extents: StructArray, tiers: dict[int, int]) -> StructArray:
    moved = extents.copy()
    moved["tier"] = [tiers.get(segment, tier) for segment, tier in extents[["segment", "tier"]].tolist()]
    return moved
