"""The walks over the pages, on a real core with memory and a store."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from tests.unit.cache.world import BLOCK_BYTES, SOON_S, TOKENS, World, opened
from tierd.core.core import Core
from tierd.core.formats.model import Durability
from tierd.core.plan import PagesHeld
from tierd.page import survey
from tierd.page.survey import Survey
from tierd.testing import chain

NAMES = chain(1, 200)
"""Blocks of two segments of memory."""


async def walked(world: World) -> dict[str, Any]:
    found = Survey(world.cache)
    await found.walk()
    assert found.number == 1
    return dict(json.loads(found.found))


async def test_every_page_is_in_its_square() -> None:
    """The squares of a tier hold each of its pages once, at the page's bytes in the tier."""
    async with opened() as world:
        await world.put(NAMES, durability=Durability.DURABLE)
        found = await walked(world)
        for position, name in enumerate(("host.0", "nvme.0")):
            held = world.cache.core.pages_held(position, after=-1, limit_bytes=1 << 40)
            spec, squares = world.cache.tiers[position].spec, found["tiers"][name]
            slots = {segment.segment: segment.slot for segment in world.cache.core.segments(position)}
            begins = [slots[int(e["segment"])] * spec.segment_bytes + int(e["offset"]) for e in held.extents]
            expected = np.bincount([at * 960 // spec.capacity_bytes for at in begins], minlength=960)
            assert squares["pages"] == expected.tolist()
            assert sum(squares["bytes"]) == world.cache.core.tier_stats()[position].used_bytes


async def test_a_smaller_tier_has_a_whole_map() -> None:
    """When places in front are gone, the pages of the others are at the front of the map."""
    async with opened() as world:
        await world.put(NAMES)
        tuning, now = world.cache.core.tuning, world.cache.clock.now
        first = tuning.used_places(0)[0]
        tier = world.cache.tiers[0]
        vacant = tier.spec.capacity_bytes // tier.spec.segment_bytes - len(tuning.used_places(0))
        tuning.close_places(0, vacant + 1, [first])
        world.cache.flights.start(world.cache.core.evict(tuning.blocks_at(0, first), tier=0, now=now()))
        assert not tuning.closing(0)
        left = (len(tuning.used_places(0))) * tier.spec.segment_bytes
        tier.spec = dataclasses.replace(tier.spec, capacity_bytes=left)
        tuning.set_spec(0, tier.spec, now())
        pages = (await walked(world))["tiers"]["host.0"]["pages"]
        held = world.cache.core.pages_held(0, after=-1, limit_bytes=1 << 40)
        assert left and sum(pages) == len(held.blocks) and pages[0] and max(pages) <= 2


async def test_squares_tell_hits_and_age() -> None:
    """A square's hits and age are those of its pages; used ones are younger than others."""
    async with opened() as world:
        await world.put(NAMES)
        blocks = world.cache.core.pages_held(0, after=-1, limit_bytes=1 << 40).blocks
        reply = await world.acquire(NAMES[:1])
        world.cache.release(world.session, [reply.lease])
        found = (await walked(world))["tiers"]["host.0"]
        hits = np.array(found["hits"]) * np.array(found["pages"])
        assert hits.sum() == pytest.approx(world.cache.core.column("hits", blocks).sum(), abs=1)
        assert max(found["age_s"]) <= SOON_S


async def test_a_block_counts_once_at_its_depth() -> None:
    """Reuse by depth counts a block of several tiers once, at the tokens before it in its prompt."""
    async with opened() as world:
        await world.put(NAMES, durability=Durability.DURABLE)
        reply = await world.acquire(NAMES)
        world.cache.release(world.session, [reply.lease])
        depths = (await walked(world))["depths"]
        per = 512 // TOKENS
        counts = {0: per, 512: per, 1024: 2 * per, 2048: len(NAMES) - 4 * per}
        assert {low: blocks for low, _, blocks, _ in depths if blocks} == counts
        assert {low: hits for low, _, _, hits in depths if hits} == counts
        assert depths[-1][:2] == [1 << 20, 0]


async def test_a_walk_sleeps_99_times_as_long_as_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step the walk leaves the loop to others, in proportion to the step."""
    asked, pauses, now = list[int](), list[float](), [0.0]

    def pages(core: Core, tier: int, *, after: int, limit_bytes: int) -> PagesHeld:
        asked.append(after)
        now[0] += 0.002
        return held(core, tier, after=after, limit_bytes=16 * BLOCK_BYTES)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async with opened() as world:
        await world.put(NAMES[:48])
        held = Core.pages_held
        monkeypatch.setattr(Core, "pages_held", pages)
        monkeypatch.setattr(survey.time, "perf_counter", lambda: now[0])
        monkeypatch.setattr(survey.asyncio, "sleep", sleep)
        found = Survey(world.cache)
        await found.walk()
        monkeypatch.undo()
    assert len(asked) == 3 + 2  # three pieces of memory, and the ends of both tiers
    assert pauses == pytest.approx([0.198] * 3)


async def test_nobody_looks_so_nobody_walks() -> None:
    """A walk runs only after somebody asked, and once for all who asked meanwhile."""
    async with opened() as world:
        found = Survey(world.cache)
        running = asyncio.create_task(found.run())
        for _ in range(3):
            await asyncio.sleep(0)
        assert found.number == 0
        found.want()
        found.want()
        async with asyncio.timeout(SOON_S):
            while not found.number:  # noqa: ASYNC110  # has no event
                await asyncio.sleep(0)
        assert not found._wanted.is_set()
        running.cancel()
