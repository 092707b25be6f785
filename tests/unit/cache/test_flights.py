"""Flights: their order, one flight for many waiters, and an end for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.unit.cache.world import BLOCK_BYTES, CONFIG, SOON_S, World, opened
from tierd.cache.events import Event, EventKind
from tierd.core.formats.model import BlockStatus, PageState, SegmentAssignment, TierKind
from tierd.core.plan import Plan
from tierd.errors import TierFailed
from tierd.mover import Link
from tierd.testing import chain, content_of, is_content

DEVICE = (
    CONFIG
    + """
[[device]]
kind = "cpu"
capacity = "2 MiB"
segment = "1 MiB"
"""
)
NVME_TO_HOST = (2, 1)
NAMES = chain(1, 4)


async def _far(world: World, names: np.ndarray) -> None:
    """Stores blocks and keeps them on NVMe alone."""
    committed = await world.put(names)
    assert (await world.cache.persistence.persist(committed.blocks, timeout_s=SOON_S)).all()
    for extent in committed.extents:
        world.page(extent)[:] = bytes(BLOCK_BYTES)  # so that no reader gets the right bytes by chance
    for position, tier in enumerate(world.cache.tiers):
        if tier.spec.kind is not TierKind.NVME:
            world.cache.flights.start(world.cache.core.evict(committed.blocks, tier=position, now=0.0))


async def test_blocks_come_over_two_links() -> None:
    """A block on NVMe comes to the device over a host page, whole."""
    async with opened(DEVICE) as world:
        await _far(world, NAMES)
        lease = await world.acquire(NAMES, kind=TierKind.DEVICE)
        extents = lease.served.groups[0].extents[0]
        assert extents["tier"].tolist() == [0] * 4
        assert all(is_content(world.page(e), name) for e, name in zip(extents, NAMES, strict=True))


async def test_order_of_a_plan_is_no_matter() -> None:
    """A flight waits for the one that fills its source, even if the plan names it first."""
    async with opened(DEVICE) as world:
        await _far(world, NAMES)
        got = world.cache.core.acquire(
            world.session, groups=[world.query(NAMES)], kind=TierKind.DEVICE, now=world.cache.clock.now()
        )
        plan = got.plan
        turned = Plan(plan.freed, plan.segments, plan.reserved, plan.transfers[::-1], plan.waits)
        async with _hung(world):
            world.cache.flights.start(turned)
            await world.cache.flights.prepared([s.segment for s in plan.segments])
            for _ in range(20):  # turns of the mover's threads, which must not copy yet
                await asyncio.get_running_loop().run_in_executor(world.cache.parts.mover._threads, int)
        assert await world.cache.flights.landed(turned, timeout_s=SOON_S)
        assert world.cache.core.settle(got.lease, now=0.0).tokens == 64
        assert world.cache.flights.failed == 0


async def test_what_waits_holds_nothing_up() -> None:
    """A near block is served while the next block hangs on another link."""
    async with opened(DEVICE) as world:
        await _far(world, NAMES[2:])
        await world.put(NAMES[:2])
        async with _hung(world):
            query = world.query(NAMES)
            lease = await world.cache.acquire(world.session, [query], kind=TierKind.DEVICE, timeout_s=0.5)
        assert lease.served.tokens == 32


async def test_memory_that_is_still_made_holds_up_only_what_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks load into a ready segment while the next segment is still being prepared."""
    names = chain(1, 16)
    async with opened(CONFIG.replace('"1 MiB"', '"64 KiB"', 1)) as world:
        await _far(world, names)
        host, made, asked = world.cache.tiers[0], asyncio.Event(), list[int]()
        prepare = host.prepare

        async def prepare_slowly(segments: Sequence[SegmentAssignment]) -> None:
            asked.append(segments[0].segment)
            if len(asked) > 1:
                await made.wait()
            await prepare(segments)

        monkeypatch.setattr(host, "prepare", prepare_slowly)
        first = await world.cache.acquire(world.session, [world.query(names)], kind=TierKind.HOST, timeout_s=0.5)
        made.set()
        rest = await world.acquire(names)
        assert len(asked) > 1
        assert 0 < first.served.tokens < rest.served.tokens == 16 * 16


async def test_many_wait_for_one_flight() -> None:
    """Two gets of the same blocks share one transfer per block."""
    async with opened() as world:
        await _far(world, NAMES)
        made = world.cache.flights.made
        leases = await asyncio.gather(world.acquire(NAMES), world.acquire(NAMES[:2]))
        assert [lease.served.tokens for lease in leases] == [64, 32]
        assert world.cache.flights.made - made == 4


async def test_corrupt_block_on_nvme_shortens() -> None:
    """A block with wrong bytes on NVMe is a miss from then on, and costs no other block."""
    async with opened() as world:
        await _far(world, NAMES)
        found = world.cache.core.extents(world.cache.core.blocks(tier=1), tier=1)
        third = next(e for e in found if _name(world, e) == NAMES[2].tobytes())
        segment = next(s for s in world.cache.core.segments(1) if s.segment == third["segment"])
        _spoil(next(Path(world.cache.tiers[1].place).glob(f"*{segment.slot}.slots")), NAMES[2])  # noqa: ASYNC240
        lease = await world.acquire(NAMES)
        assert lease.served.tokens == 32
        assert not lease.whole
        assert world.cache.core.find_block(world.namespace.id, NAMES[2].tobytes()) is None
        world.cache.core.check()


async def test_no_watcher_hears_of_what_did_not_stay() -> None:
    """Blocks whose epoch ends in flight do not arrive, and no watcher gets a STORED event."""
    async with opened() as world:
        await _far(world, NAMES)
        told: list[Event] = []
        watcher = asyncio.create_task(_tell(world, told))
        query = world.query(NAMES)
        async with _hung(world):
            world.cache.prefetch(world.session, [query], TierKind.HOST)
            await world.end_epoch()
        assert await world.cache.flights.idle(timeout_s=SOON_S)
        world.cache.events.close()
        await watcher
        assert [event.reason for event in told if event.kind is EventKind.REMOVED] == ["epoch_bumped"]
        assert [event for event in told if event.kind is EventKind.STORED] == []
        world.cache.core.check()


async def _tell(world: World, told: list[Event]) -> None:
    async for batch in world.cache.events.follow(world.cache.events._last):
        told.extend(batch)


async def test_segment_that_cannot_be_prepared() -> None:
    """A segment without its files is TierFailed for its caller, and the next one is tried afresh."""
    async with opened() as world:
        used = max((s.segment for t in range(2) for s in world.cache.core.segments(t)), default=0)
        tables: Path = world.daemon.tiers[0].tables  # type: ignore[attr-defined]
        blocked = [tables / f"{number}.cat" for number in range(used + 1, used + 4)]
        for path in blocked:
            path.mkdir()
        with pytest.raises(TierFailed):
            await world.reserve(NAMES)
        assert world.pins == 0
        for path in blocked:
            path.rmdir()
        async with asyncio.timeout(SOON_S):
            statuses = await _reserve_until_it_works(world)
        assert statuses == [BlockStatus.RESERVED] * 4
        assert not world.cache.flights._preparing
        world.cache.core.check()


async def test_failed_write_leaves_the_block_where_it_was() -> None:
    """A block whose write to NVMe fails stays in memory, and no page stays reserved on the store."""
    async with opened() as world:
        committed = await world.put(NAMES)
        world.page(committed.extents[1])[7] ^= 0xFF
        durable = await world.cache.persistence.persist(committed.blocks, timeout_s=SOON_S)
        assert durable.tolist() == [True, False, True, True]
        states = world.cache.core.tier_stats()[1]
        assert (states.pages_ready, states.pages_reserved) == (3, 0)
        assert world.cache.core.pages(int(committed.blocks[0]))["state"].tolist() == [PageState.READY] * 2
        assert (await world.acquire(NAMES)).served.tokens == 16
        world.cache.core.check()


@asynccontextmanager
async def _hung(world: World) -> AsyncIterator[None]:
    """No transfer comes from NVMe within this context."""
    link = world.cache.parts.mover._links.setdefault(NVME_TO_HOST, Link(1))
    async with AsyncExitStack() as taken:
        for _ in range(link.limit):
            await taken.enter_async_context(link.slot(0))
        yield


async def _reserve_until_it_works(world: World) -> list[int]:
    while True:
        try:
            return (await world.reserve(NAMES)).statuses[0].tolist()
        except TierFailed:
            await asyncio.sleep(0)


def _name(world: World, extent: np.void) -> bytes:
    core = world.cache.core
    blocks = core.blocks(tier=int(extent["tier"]))
    rows = core.extents(blocks, tier=int(extent["tier"]))
    row = int(np.flatnonzero(rows["generation"] == extent["generation"])[0])
    return core.describe(blocks[row : row + 1])["hash"][0].tobytes()


def _spoil(path: Path, name: np.ndarray) -> None:
    """Flips one byte of a block."""
    data = bytearray(path.read_bytes())
    data[data.find(content_of(name, BLOCK_BYTES)[:64].tobytes()) + 100] ^= 0xFF
    path.write_bytes(data)
