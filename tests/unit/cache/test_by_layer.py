"""Leases that are given before their pages are filled: what holds until then, and afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.unit.cache.world import BLOCK_BYTES, CONFIG, SOON_S, World, opened
from tierd import failpoint
from tierd.cache.acquire_reply import AcquireReply
from tierd.cache.operator import Operator
from tierd.core.formats.model import UNVERIFIED, SegmentAssignment, TierKind
from tierd.mover import Link
from tierd.testing import chain, content_of, is_content
from tierd.tiers.arena.arena import Arena

NAMES = chain(1, 4)


def loads(world: World) -> Link:
    """The link on which blocks come from the store, one batch at a time."""
    return world.cache.parts.mover._links.setdefault((1, 0), Link(1))


async def by_layer(world: World, *, timeout_s: float = SOON_S) -> AcquireReply:
    kind = TierKind.HOST
    return await world.cache.acquire_by_layer(world.session, [world.query(NAMES)], kind=kind, timeout_s=timeout_s)


async def stored(world: World, *, bad: Sequence[int] = ()) -> None:
    """The blocks are in the store alone; some of them are damaged there."""
    committed = await world.put(NAMES)
    assert (await world.cache.persistence.persist(committed.blocks, timeout_s=SOON_S)).all()
    for row in bad:
        _damage(Path(world.daemon.tiers[1].place), NAMES[row])
    await Operator(world.cache).evict([], "host.0")


def pinned(world: World) -> int:
    return world.cache.core.tier_stats()[0].pages_pinned


async def settled(world: World) -> None:
    """Waits until late settlements have ended."""
    await world.cache.flights.idle(timeout_s=SOON_S)
    if world.cache._settling:
        await asyncio.wait(world.cache._settling, timeout=SOON_S)


async def test_a_lease_is_recorded_before_its_pages_are_filled() -> None:
    """While nothing is read, the lease is given, all is pending, and the session table names its pages."""
    async with opened() as world:
        await stored(world)
        before = world.daemon.holds.count
        async with loads(world).slot(0):
            reply = await by_layer(world)
            assert reply.lease and reply.served.pending is not None and reply.served.pending.all()
            assert world.daemon.holds.count > before
        await settled(world)
        for extent, name in zip(reply.served.extents, NAMES, strict=True):
            assert is_content(world.page(extent), name)
        assert pinned(world) == len(NAMES)
        world.cache.release(world.session, [reply.lease])
        assert (pinned(world), world.pins) == (0, 0)


async def test_pages_that_do_not_come_are_taken_from_the_lease() -> None:
    """If the third block is damaged in the store, the lease keeps the first two, and no other is pinned."""
    async with opened() as world:
        await stored(world, bad=[2])
        reply = await by_layer(world)
        assert reply.served.pending is not None and reply.served.pending.sum() == len(NAMES)
        await settled(world)
        assert pinned(world) == 2
        world.cache.release(world.session, [reply.lease])
        assert (pinned(world), world.pins) == (0, 0)


async def test_a_lease_of_which_nothing_comes_ends() -> None:
    """If the first block is damaged in the store, the lease ends by itself."""
    async with opened() as world:
        await stored(world, bad=[0])
        assert (await by_layer(world)).lease
        await settled(world)
        assert (pinned(world), world.pins) == (0, 0)


async def test_a_lease_released_before_its_pages_came_is_not_missed() -> None:
    """A release, or the end of the session, before the load's end leaves nothing and logs no error."""
    async with opened() as world:
        await stored(world)
        async with loads(world).slot(0):
            world.cache.release(world.session, [(await by_layer(world)).lease])
            assert (await by_layer(world)).lease
            world.cache.end_session(world.session)
        await settled(world)
        assert (pinned(world), world.pins) == (0, 0)


async def test_near_pages_are_verified_first() -> None:
    """A page that is there already and has wrong bytes is not promised."""
    async with opened() as world:
        await stored(world)
        whole = await world.acquire(NAMES[:1])
        world.cache.release(world.session, [whole.lease])
        extent = whole.served.extents[0]
        world.page(extent)[0] ^= 1
        world.cache.core._index.tiers[0].flags[int(extent["page"])] = UNVERIFIED  # as if a client could reach it
        reply = await by_layer(world)
        await settled(world)
        for row, name in zip(reply.served.extents, NAMES, strict=False):
            assert is_content(world.page(row), name)
        assert reply.served.tokens == 0 or reply.served.pending is None


async def test_every_hit_is_verified_if_so_set() -> None:
    """Under verify = "always" the answer waits for the whole pages."""
    async with opened(CONFIG.replace("[[host]]", '[[host]]\nverify = "always"')) as world:
        await stored(world)
        reply = await by_layer(world)
        assert reply.served.tokens and reply.served.pending is None
        world.cache.release(world.session, [reply.lease])


async def test_a_fault_before_the_answer_leaves_nothing() -> None:
    """A call that fails after its lease was made releases it."""
    async with opened() as world:
        await stored(world)
        failpoint.arm("cache.acquire.before_promise", "error:EIO")
        try:
            with pytest.raises(OSError, match="before_promise"):
                await by_layer(world)
        finally:
            failpoint.disarm()
        await settled(world)
        assert (pinned(world), world.pins) == (0, 0)


async def test_no_page_is_promised_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a page's segment has no memory, the call waits, and misses at its deadline."""
    async with opened() as world:
        await stored(world)
        ready, inner = asyncio.Event(), Arena.prepare

        async def prepare(its: Arena, segments: Sequence[SegmentAssignment]) -> None:
            await ready.wait()
            await inner(its, segments)

        monkeypatch.setattr(Arena, "prepare", prepare)
        reply = await by_layer(world, timeout_s=0.1)
        assert not reply.lease
        ready.set()
        await settled(world)


def _damage(store: Path, name: np.ndarray) -> None:
    """Changes a byte of a block in the store's files."""
    (path,) = [path for path in store.rglob("*.slots") if content_of(name, BLOCK_BYTES).tobytes() in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.find(content_of(name, BLOCK_BYTES).tobytes()) + 100] ^= 1
    path.write_bytes(data)
