"""The mover's promises: order on a link, only verified blocks READY, no thread on a released page."""

from __future__ import annotations

import asyncio
import mmap
import threading

import numpy as np
import pytest

from tests.unit.cache.world import BLOCK_BYTES, SOON_S, World, opened
from tierd import failpoint
from tierd.core.formats.model import TRANSFER, BlockStatus, Reason, StructArray
from tierd.errors import TierFailed
from tierd.mover import HASH_SPLIT_BYTES, Link, Mover, _known
from tierd.testing import chain, is_content

NAMES = chain(1, 4)


def _batch(world: World, blocks: np.ndarray, target: StructArray) -> tuple[StructArray, StructArray]:
    """Transfers of blocks in host memory to other pages, and their METAs."""
    batch = np.zeros(len(blocks), dtype=TRANSFER)
    batch["source"] = world.cache.core.extents(blocks, tier=0)
    batch["target"], batch["reason"] = target, Reason.DEMAND
    metas = world.cache.core.metas(blocks)
    metas["layers"] = 0
    return batch, metas


async def test_a_copy_is_verified_where_it_arrives() -> None:
    """A copied block is READY if its bytes are right, else CORRUPT; only right ones enter the catalogue."""
    async with opened() as world:
        committed = await world.put(NAMES)
        spare = (await world.cache.reserve(world.session, [world.put_query(chain(2, 4))], kind=1)).extents[0]
        world.page(committed.extents[1])[5] ^= 1
        batch, metas = _batch(world, committed.blocks, spare)
        statuses = await world.cache.parts.mover.copy(batch, metas)
        assert statuses.tolist() == [BlockStatus.READY, BlockStatus.CORRUPT, BlockStatus.READY, BlockStatus.READY]
        assert is_content(world.page(spare[0]), NAMES[0])
        published = world.daemon.tiers[0].slices(spare)  # type: ignore[attr-defined]
        assert [table is not None for table in published] == [True, False, True, True]


async def test_a_target_that_fails_is_a_status() -> None:
    """If a store cannot write, every block is FAILED and the copy raises nothing."""
    async with opened() as world:
        committed = await world.put(NAMES)
        target = np.zeros(4, dtype=batch_dtype())
        target["tier"], target["segment"] = 1, 999  # a segment that the store does not have
        batch, metas = _batch(world, committed.blocks, target)
        statuses = await world.cache.parts.mover.copy(batch, metas)
        assert statuses.tolist() == [BlockStatus.FAILED] * 4


async def test_blocks_come_to_their_own_pages_in_whatever_order_they_are_asked_for() -> None:
    """Adjacent blocks in a store are READY, each in its own page, also when asked for in reverse order."""
    async with opened() as world:
        committed = await world.put(NAMES)
        assert (await world.cache.persistence.persist(committed.blocks, timeout_s=SOON_S)).all()
        spare = (await world.cache.reserve(world.session, [world.put_query(chain(2, 4))], kind=1)).extents[0]
        batch, metas = _batch(world, committed.blocks[::-1], spare)
        batch["source"] = world.cache.core.extents(committed.blocks[::-1], tier=1)
        assert (await world.cache.parts.mover.copy(batch, metas)).tolist() == [BlockStatus.READY] * 4
        assert [is_content(world.page(row), name) for row, name in zip(spare, NAMES[::-1], strict=True)] == [True] * 4


async def test_an_error_on_the_way_is_a_status() -> None:
    """A system error in a copy makes every block of the batch FAILED, and none READY."""
    async with opened() as world:
        committed = await world.put(NAMES)
        spare = (await world.cache.reserve(world.session, [world.put_query(chain(2, 4))], kind=1)).extents[0]
        batch, metas = _batch(world, committed.blocks, spare)
        failpoint.arm("mover.copy.before_copy", "error:ENOSPC")
        try:
            statuses = await world.cache.parts.mover.copy(batch, metas)
        finally:
            failpoint.disarm()
        assert statuses.tolist() == [BlockStatus.FAILED] * 4


async def test_a_changed_source_is_not_stored() -> None:
    """A page changed after its commit is CORRUPT on its way out, and the store holds none of it."""
    async with opened() as world:
        committed = await world.put(NAMES)
        world.page(committed.extents[0])[0] ^= 1
        durable = await world.cache.persistence.persist(committed.blocks, timeout_s=SOON_S)
        assert durable.tolist() == [False, True, True, True]
        assert world.cache.core.find_block(world.namespace.id, NAMES[0].tobytes()) is None


async def test_a_damaged_table_is_not_written_by() -> None:
    """A block with a damaged or missing slice table is hashed again and stored with the right table."""
    async with opened() as world:
        committed = await world.put(NAMES)
        host = world.cache.tiers[0]
        tables, digests = host.slices(committed.extents), world.cache.core.metas(committed.blocks)["digest"]
        assert all(found is made for found, made in zip(_known(tables, digests), tables, strict=True))
        right = list(tables)
        tables[1], tables[2] = tables[1] ^ np.uint64(1), None
        assert [table is None for table in _known(tables, digests)] == [False, True, True, False]
        host.slices = lambda extents: tables
        assert (await world.cache.persistence.persist(committed.blocks, timeout_s=SOON_S)).all()
        store, metas = world.cache.tiers[-1], world.cache.core.metas(committed.blocks)
        area = memoryview(mmap.mmap(-1, len(NAMES) * BLOCK_BYTES))
        targets = [area[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(len(NAMES))]
        found = await store.read(world.cache.core.extents(committed.blocks, tier=store.position), targets, metas)
        assert [table.tolist() for table in found.slices] == [table.tolist() for table in right]


async def test_check_finds_the_pages_that_are_not_as_committed() -> None:
    """`check` reports each page whose bytes are not its block's."""
    async with opened() as world:
        committed = await world.put(NAMES)
        world.page(committed.extents[2])[100] ^= 1
        metas = world.cache.core.metas(committed.blocks)
        good = await world.cache.parts.mover.check(committed.extents, metas)
        assert good.tolist() == [True, True, False, True]


async def test_demand_goes_first() -> None:
    """On a busy link, demand passes prefetch and prefetch passes demotion; equals keep their order."""
    link, order = Link(1), []

    async def go(priority: int, name: str) -> None:
        async with link.slot(priority):
            order.append(name)

    async with link.slot(0):
        waiting = [
            asyncio.create_task(go(*who))
            for who in ((2, "demotion"), (1, "prefetch"), (0, "demand"), (0, "second demand"))
        ]
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == ["demand", "second demand", "prefetch", "demotion"]
    assert link.active == 0


async def test_what_nobody_waits_for_leaves_half_of_a_link() -> None:
    """Demotion uses at most half of a link, so new demand starts at once; all of it runs in the end."""
    link, order, ends = Link(4), list[str](), asyncio.Event()

    async def go(priority: int, name: str) -> None:
        async with link.slot(priority):
            order.append(name)
            await ends.wait()

    work = [asyncio.create_task(go(2, f"demotion {i}")) for i in range(5)]
    await asyncio.sleep(0)
    assert order == ["demotion 0", "demotion 1"]
    work += [asyncio.create_task(go(0, f"demand {i}")) for i in range(3)]
    await asyncio.sleep(0)
    assert order[2:] == ["demand 0", "demand 1"]
    assert link.active == 4
    ends.set()
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*work)
    assert order[4:] == ["demand 2", "demotion 2", "demotion 3", "demotion 4"]
    assert (link.active, link.waiting) == (0, [])


async def test_demand_takes_none_of_the_half_that_is_for_others() -> None:
    """Steady demand does not keep demotion from a free slot."""
    link = Link(4)
    async with asyncio.timeout(SOON_S), link.slot(0), link.slot(0), link.slot(2):
        assert (link.active, link.unawaited) == (3, 1)
    assert (link.active, link.unawaited) == (0, 0)


async def test_a_link_of_one_carries_all() -> None:
    """Demotion may use a link of one: half of it still counts as one."""
    async with asyncio.timeout(SOON_S), Link(1).slot(2):
        pass


@pytest.mark.parametrize("is_its_turn", [False, True])
async def test_a_turn_that_nobody_takes_is_passed_on(is_its_turn: bool) -> None:
    """A batch cancelled while it waits, or just as its turn comes, keeps no slot on the link."""
    link = Link(1)

    async def go() -> None:
        async with link.slot(0):
            pass

    async with link.slot(0):
        first, second = asyncio.create_task(go()), asyncio.create_task(go())
        await asyncio.sleep(0)
        if not is_its_turn:
            first.cancel()
    first.cancel()
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(first, second, return_exceptions=True)
    assert first.cancelled()
    assert link.active == 0


async def test_who_waits_for_a_refused_link_is_told() -> None:
    """When a tier fails, waiters for its link fail at once; running work goes on; the link recovers."""
    link = Link(1)

    async def go() -> None:
        async with link.slot(0):
            pass

    async with link.slot(0):
        waiting = [asyncio.create_task(go()) for _ in range(3)]
        await asyncio.sleep(0)
        link.refuse(TierFailed("nvme.0: out of service"))
        async with asyncio.timeout(SOON_S):
            ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [TierFailed] * 3
    assert link.active == 0
    await go()


async def test_who_is_refused_and_cancelled_at_once_had_no_place() -> None:
    """A batch cancelled just as its link refuses it returns no slot, so the link's limit still holds."""
    link = Link(1)

    async def go() -> None:
        async with link.slot(0):
            assert link.active == 1

    async with link.slot(0):
        waiting = asyncio.create_task(go())
        await asyncio.sleep(0)
        link.refuse(TierFailed("nvme.0: out of service"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert link.active == 1
    await go()
    assert link.active == 0


async def test_no_thread_is_left_behind() -> None:
    """If one part of the work fails, the call ends only after the last part, which may touch the pages."""
    mover = Mover([], hash_threads=2, link_limit=1)
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work(first: memoryview, second: int) -> None:
        if second == 0:
            raise OSError("this part fails")
        begun.set()
        may_end.wait(SOON_S)
        ended.set()

    views = [memoryview(bytes(HASH_SPLIT_BYTES)), memoryview(bytes(HASH_SPLIT_BYTES))]
    task = asyncio.ensure_future(mover._in_threads(work, views, [0, 1]))
    await asyncio.to_thread(begun.wait, SOON_S)
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    with pytest.raises(OSError, match="this part fails"):
        await task
    assert ended.is_set()
    mover.close()


def batch_dtype() -> np.dtype:
    return TRANSFER["target"]


async def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses threads, no work starts on pages; once it allows them, all work runs."""
    mover = Mover([], hash_threads=2, link_limit=1)
    started, done, start = list[str](), list[int](), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    views = [memoryview(bytes(HASH_SPLIT_BYTES))] * 4

    def work(_view: memoryview, number: int) -> int:
        done.append(number)
        return number

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TierFailed, match="hash_threads"):
            await mover._in_threads(work, views, range(4))
        with pytest.raises(TierFailed, match="hash_threads"):
            mover._in_thread(lambda: None)
    assert started and not done
    assert await mover._in_threads(work, views, range(4)) == list(range(4))
    mover.close()
    assert sorted(done) == list(range(4))
