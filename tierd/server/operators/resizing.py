"""Resizes a host tier by whole segments, beside the daemon's work.

A tier that shrinks empties the segments that go. It writes to the next tier what it alone has,
evicts the blocks, and frees the files one by one. Pages that sessions hold stay until they are
released. If nothing moves for STILL_S, or the daemon ends, the segments that are left stay in the
tier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tierd.cache.cache import Cache
from tierd.core.formats.model import TierSpec
from tierd.core.plan import Ids
from tierd.tiers.tier import MappedTier
from tierd.units import format_bytes

STILL_S = 3.0
"""Time without progress, after which the rest of a tier stays."""
LOOK_S = 0.02
PIECE_BLOCKS = 1024


def places_of(spec: TierSpec) -> int:
    """How many segments a tier may have."""
    return spec.capacity_bytes // spec.segment_bytes


def grow(cache: Cache, tier: MappedTier, places: int) -> None:
    """Gives a tier so many more segments. The caller has checked that there is memory, and sets the
    spec at once."""
    cache.core.tuning.open_places(tier.position, places)
    tier.grow(places)


async def shrink(cache: Cache, tier: MappedTier, places: int, *, gives_up: Callable[[], bool]) -> tuple[int, str]:
    """Takes so many segments from a tier. Returns how many are gone, and why not all; the caller
    sets the spec. gives_up: whether the rest shall stay."""
    tuning, position = cache.core.tuning, tier.position
    tuning.close_places(position, places, await _order(cache, position))
    try:
        freed = await _close(cache, tier, places, gives_up)
    finally:
        holders, kept = tuning.holders(position), tuning.keep_places(position)
    gone = places - kept
    await tier.shrink(gone - freed, tuning.end_closed(position))
    if not kept:
        return gone, ""
    size, wanted = (format_bytes((places_of(tier.spec) - n) * tier.spec.segment_bytes) for n in (gone, places))
    short = ", ".join(str(holder)[:8] for holder in holders)  # as `tierctl sessions` shows them
    by = f"sessions {short} (`tierctl sessions`)" if holders else "operators' pins"
    why = f"shrunk to {size}, not to {wanted}; held by {by}: {kept} of its segments; set it again later"
    return gone, f"{tier.spec.name}: {why}"


async def _close(cache: Cache, tier: MappedTier, places: int, gives_up: Callable[[], bool]) -> int:
    """Empties closing places and frees their memory, until none is left or nothing moves any more.
    Returns how many were freed."""
    tuning, position, loop = cache.core.tuning, tier.position, asyncio.get_running_loop()
    freed, still_since, before = 0, loop.time(), (-1, -1)
    while True:
        cache.process_notices(None)  # releases that wait
        pinned = await _empty(cache, position)
        ended, closed = tuning.end_closed(position), places - len(tuning.closing(position))
        await tier.shrink(closed - freed, ended)
        freed = closed
        if (pinned, freed) != before:
            before, still_since = (pinned, freed), loop.time()
        if freed == places or gives_up() or loop.time() - still_since > STILL_S:
            return freed
        await asyncio.sleep(LOOK_S)


async def _order(cache: Cache, position: int) -> list[int]:
    """The places in use, the best to close first."""
    tuning, ranks = cache.core.tuning, dict[int, tuple[bool, float]]()
    for place in tuning.used_places(position):
        ranks[place] = tuning.rank(position, place)
        await asyncio.sleep(0)
    return sorted(ranks, key=ranks.__getitem__)


async def _empty(cache: Cache, position: int) -> int:
    """Saves and evicts the blocks of closing segments. Returns how many stay: they are pinned."""
    tuning, stayed = cache.core.tuning, 0
    for place in tuning.closing(position):
        blocks = tuning.blocks_at(position, place)
        for begun in range(0, len(blocks), PIECE_BLOCKS):
            stayed += await _evict(cache, position, blocks[begun : begun + PIECE_BLOCKS])
            await asyncio.sleep(0)
    return stayed


async def _evict(cache: Cache, position: int, blocks: Ids) -> int:
    """Saves and evicts some blocks. Returns how many stay."""
    core, now = cache.core, cache.clock.now
    plan = core.tuning.save(position, core.tuning.tracked(position, blocks), now())
    cache.flights.start(plan)
    await cache.flights.landed(plan, timeout_s=STILL_S)
    blocks = core.tuning.tracked(position, blocks)
    cache.flights.start(core.evict(blocks, tier=position, now=now()))
    return len(core.tuning.tracked(position, blocks))
