"""The promotions of a lookup, and the lookups that need none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.unit.cache.world import SOON_S, World, opened
from tierd.cache.nearness import is_near
from tierd.core.formats.model import Durability, Need
from tierd.testing import chain

NAMES = chain(1, 8)


async def world_with_far_blocks(world: World) -> None:
    """Blocks of a sequence in both tiers, whose second half memory then drops."""
    committed = await world.put(NAMES, durability=Durability.DURABLE)
    world.cache.flights.start(world.cache.core.evict(committed.blocks[4:], tier=0, now=0.0))


async def test_a_lookup_brings_near_what_lies_far() -> None:
    """A lookup starts transfers to memory for the blocks that only the store holds."""
    async with opened() as world:
        await world_with_far_blocks(world)
        found = world.cache.lookup(world.session, [world.query(NAMES)])
        assert found.tokens == 16 * len(NAMES)
        assert set(np.concatenate(found.tier_of, axis=None).tolist()) == {0, 1}
        assert world.cache.flights.count == 4
        assert await world.cache.flights.idle(timeout_s=SOON_S)
        assert len(world.cache.core.blocks(tier=0)) == len(NAMES)


async def test_what_is_near_is_known() -> None:
    """`is_near` holds for prefix queries whose hits are all in memory, and for no other query."""
    async with opened() as world:
        await world_with_far_blocks(world)
        tiers, core = world.cache.tiers, world.cache.core
        for names, near in ((NAMES[:4], True), (chain(2, 3), True), (NAMES, False), (NAMES[4:], False)):
            group = world.query(names)
            found = core.lookup([group], now=0.0)
            assert is_near(tiers, [group], found) is near
            for need in (Need.LAST_TOKENS, Need.LAST_STATE):
                assert not is_near(tiers, [replace(group, need=need)], found)
