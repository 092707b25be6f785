"""What is known of the sessions of a former daemon, and what becomes of memory of which nothing is known.

Purpose: `open_holds`. Non-purpose: the table itself (tiers/arena/holds.py), the life of sessions (sessions.py). Invariants: before the core adopts
a segment, either the session table tells who holds pages of it, or NOBODY may write it; the table is the one that spoke for all mapped
tiers in the last life. Rows find their pages by segment, whose ids are never used twice, because tiers may have changed places.
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
    """The session table, beside the catalogues of a mapped tier, and whom it names. Raises VersionMismatch, TierFailed."""
    arenas = {i: tier for i, tier in enumerate(tiers) if isinstance(tier, Arena)}

    def distrust(fault: str) -> None:
        for i, arena in arenas.items():
            if arena.found:
                recovered[i].segments[:] = arena.seal_found()
                arena.notices.append(
                    f"{arena.spec.name}: {fault}: who holds pages is not known, so the {arena.found} segments found again are"
                    " verified at every hit, and given up whole, never page by page"
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
    """Segment to the tier that it is in now."""
    return {given.segment: given.tier for found in recovered for given in found.segments}


def _placed(former: FormerHolder, tiers: dict[int, int]) -> FormerHolder:
    """Its pages where they are now."""
    return replace(former, leased=_moved(former.leased, tiers), reserved=_moved(former.reserved, tiers))


def _moved(extents: StructArray, tiers: dict[int, int]) -> StructArray:
    moved = extents.copy()
    moved["tier"] = [tiers.get(segment, tier) for segment, tier in extents[["segment", "tier"]].tolist()]
    return moved
