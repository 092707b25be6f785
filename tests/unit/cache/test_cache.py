"""The cache with cancelled calls, bad pages and ended sessions."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing

import numpy as np
import pytest

from tests.unit.cache.committed import Counted
from tests.unit.cache.world import CONFIG, SOON_S, TOKENS, World, opened
from tierd import failpoint
from tierd.cache import holdings
from tierd.cache.commit import CommitQuery
from tierd.core.formats.model import HANDLE, TRANSFER, BlockStatus, Durability, Fault, TierKind
from tierd.errors import Overloaded, SessionLost, TierFailed
from tierd.server.grpc import messages
from tierd.testing import chain, is_content


async def test_page_changed_after_its_commit_shortens_the_answer() -> None:
    """A page that its writer changes after the commit is a miss, as are the blocks behind it, and no
    other."""
    async with opened() as world:
        committed = await world.put(chain(1, 4))
        world.page(committed.extents[2])[0] ^= 0xFF
        async with asyncio.timeout(10):
            lease = await world.acquire(chain(1, 4))
        assert lease.served.tokens == 32
        for extent, name in zip(lease.served.groups[0].extents[0], chain(1, 4), strict=False):
            assert is_content(world.page(extent), name)
        world.cache.release(world.session, [lease.lease])
        world.cache.core.check()
        assert world.pins == 0


async def test_a_farther_copy_of_a_changed_page_is_used_once() -> None:
    """A get that meets a changed page uses the store's copy, and counts one use per block."""
    async with opened() as world:
        names = chain(1, 4)
        committed = await world.put(names, durability=Durability.DURABLE)
        world.page(committed.extents[2])[0] ^= 0xFF
        assert (await world.acquire(names)).served.tokens == 64
        assert world.cache.core.describe(committed.blocks)["hits"].tolist() == [1] * 4


async def test_commit_gives_no_lease_on_a_page_that_changed() -> None:
    """A commit of existing blocks never gives a lease on a page that was changed after its commit."""
    async with opened() as world:
        first, second = await world.reserve(chain(1, 4)), await world.reserve(chain(1, 4))
        committed = await world.commit(first.reservation)
        world.page(committed.extents[2])[0] ^= 0xFF
        again = await world.commit(second.reservation, lease=True)
        assert again.lease == 0
        assert again.statuses.tolist() == [BlockStatus.EXISTS] * 2 + [BlockStatus.FAILED, BlockStatus.EXISTS]
        assert again.extents["page"][2] == -1
        assert (await world.put(chain(1, 4))).statuses.tolist() == [BlockStatus.READY]
        world.cache.core.check()
        assert world.pins == 0


async def test_commit_gives_no_lease_on_a_store() -> None:
    """A commit of a block that only NVMe holds gives no lease, because no client can map its page."""
    async with opened() as world:
        second = await world.reserve(chain(1, 4))
        committed = await world.put(chain(1, 4), durability=Durability.DURABLE)
        world.cache.flights.start(world.cache.core.evict(committed.blocks, tier=0, now=0.0))
        again = await world.commit(second.reservation, lease=True)
        assert again.statuses.tolist() == [BlockStatus.EXISTS] * 4
        assert again.extents["tier"].tolist() == [1] * 4
        assert again.lease == 0
        assert world.pins == 0


@pytest.mark.parametrize("steps", range(6))
async def test_cancelled_acquire_holds_nothing(steps: int) -> None:
    """An Acquire that is cancelled at any await keeps no lease."""
    async with opened() as world:
        await world.put(chain(1, 4))
        task = asyncio.create_task(world.acquire(chain(1, 4)))
        await _turns(steps)
        task.cancel()
        await _ended(task, world)
        assert world.pins == 0


@pytest.mark.parametrize("steps", range(1, 6))
async def test_cancelled_commit_leaves_no_lease(steps: int) -> None:
    """A cancelled Commit may publish or not, and keeps no hold either way."""
    async with opened() as world:
        reserved = await world.reserve(chain(1, 4))
        task = asyncio.create_task(world.commit(reserved.reservation, lease=True))
        await _turns(steps)
        task.cancel()
        await _ended(task, world)
        async with asyncio.timeout(10):
            while world.pins:  # noqa: ASYNC110  # the end of hashing sends no signal
                await asyncio.sleep(0)
        world.cache.core.check()
        assert world.pins == 0


async def test_commit_of_a_stopped_session_holds_nothing() -> None:
    """A session whose socket closes during a Commit gets its blocks published and no lease."""
    async with opened() as world:
        reserved = await world.reserve(chain(1, 4))
        task = asyncio.create_task(world.commit(reserved.reservation, lease=True))
        await _turns(1)
        world.cache.stop_session(world.session)
        with pytest.raises(SessionLost):
            await task
        assert world.pins == 0


async def test_acquire_of_a_stopped_session_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose socket closes during an Acquire gets no lease."""
    monkeypatch.setattr("tierd.mover.AT_ONCE_BYTES", 0)  # so that there is a moment in which pages are looked at
    async with opened() as world:
        await world.put(chain(1, 4))
        task = asyncio.create_task(world.acquire(chain(1, 4)))
        await _turns(1)
        world.cache.stop_session(world.session)
        with pytest.raises(SessionLost):
            await task
        assert world.pins == 0


async def test_session_that_ends_during_a_call_is_told() -> None:
    """A process that ends during an Acquire or a Commit leaves the books clean."""
    async with opened() as world:
        await world.put(chain(1, 4))
        reserved = await world.reserve(chain(2, 4))
        calls = [
            asyncio.create_task(world.acquire(chain(1, 4))),
            asyncio.create_task(world.commit(reserved.reservation, lease=True)),
        ]
        await _turns(1)
        world.cache.end_session(world.session)
        await asyncio.gather(*calls, return_exceptions=True)
        world.cache.core.check()
        assert world.pins == 0


@pytest.mark.parametrize("how", ["end_session", "leave_session"])
async def test_a_session_that_holds_much_ends_in_steps(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn of the loop releases STEP_PAGES pages of an ended session, until it holds none."""
    monkeypatch.setattr(holdings, "STEP_PAGES", 4)
    monkeypatch.setattr("tierd.cache.sessions.STEP_PAGES", 4)
    async with opened() as world:
        await world.put(chain(1, 4))
        for _ in range(3):
            await world.acquire(chain(1, 4))
        for number in (2, 3):
            await world.reserve(chain(number, 4))
        before = world.pins
        getattr(world.cache, how)(world.session)
        left = [world.pins]
        while left[-1] and len(left) < 20:
            await _turns(1)
            left.append(world.pins)
        assert before > left[0] > 0 and left[-1] == 0
        assert len(left) >= 4 and left == sorted(left, reverse=True)
        world.cache.core.check()


async def test_commits_in_parts_erase_their_rows() -> None:
    """After a keep_open commit the session table holds no reservation for its pages."""
    async with opened() as world:
        reserved = await world.reserve(chain(1, 4))
        await world.commit(reserved.reservation, keep_open=True)
        assert world.pins == 0


async def test_committed_blocks_are_ready() -> None:
    """A put answers READY for new blocks and EXISTS for present ones."""
    async with opened() as world:
        assert (await world.put(chain(1, 4))).statuses.tolist() == [BlockStatus.READY] * 4
        first, second = await world.reserve(chain(2, 2)), await world.reserve(chain(2, 2))
        await world.commit(first.reservation)
        assert (await world.commit(second.reservation)).statuses.tolist() == [BlockStatus.EXISTS] * 2


async def test_reply_is_about_what_was_committed() -> None:
    """A commit's reply describes its own block, even after another block reuses its id."""
    async with opened() as world:
        committed = await world.put(chain(1, 1))
        world.cache.flights.start(world.cache.core.evict(committed.blocks, tier=None, now=0.0))
        short = world.put_query(chain(2, 1))
        short.blocks["tokens"] = 3
        reserved = await world.cache.reserve(world.session, [short], kind=TierKind.HOST)
        other = await world.commit(reserved.reservation)
        assert other.blocks.tolist() == committed.blocks.tolist()
        given = np.frombuffer(messages.commit_reply(committed).handles, HANDLE)
        assert (given["tokens"].tolist(), given["epoch"].tolist()) == ([16], [world.namespace.epoch])


async def test_watch_ends_with_its_session() -> None:
    """A stopped session receives no further events."""
    async with opened() as world, aclosing(world.cache.watch(world.session, after=0, sees_all=False)) as events:
        waiting = asyncio.ensure_future(anext(events))
        await _turns(1)
        await world.put(chain(1, 1))
        assert len((await waiting)[0].hashes) == 32
        reserved = await world.reserve(chain(2, 1))
        world.cache.stop_session(world.session)
        world.cache.open_session(12, tenant="t")
        theirs = await world.cache.reserve(12, [world.put_query(chain(3, 1))], kind=TierKind.HOST)
        await world.cache.commit(12, CommitQuery(theirs.reservation), deadline=math.inf)
        with pytest.raises(SessionLost):
            await anext(events)
        assert reserved.reservation


async def test_a_watch_that_hears_nothing_ends_with_its_session() -> None:
    """A client that waits for events gets SessionLost at once when its session stops."""
    async with opened() as world, aclosing(world.cache.watch(world.session, after=0, sees_all=False)) as events:
        waiting = asyncio.ensure_future(anext(events))
        await _turns(1)
        world.cache.stop_session(world.session)
        with pytest.raises(SessionLost):
            async with asyncio.timeout(SOON_S):
                await waiting


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _ended(task: asyncio.Task, world: World) -> None:  # type: ignore[type-arg]
    """Waits for the call, and releases its lease if it has one."""
    done = await asyncio.gather(task, return_exceptions=True)
    if getattr(done[0], "lease", 0):
        world.cache.release(world.session, [done[0].lease])  # type: ignore[union-attr]


async def test_a_session_holds_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session at its lease limit is Overloaded until it releases a lease."""
    monkeypatch.setattr(holdings, "HOLDS_LIMIT", 2)
    async with opened() as world:
        await world.put(chain(1, 2))
        leases = [(await world.acquire(chain(1, 2))).lease for _ in range(2)]
        with pytest.raises(Overloaded, match="limits are 2"):
            await world.acquire(chain(1, 2))
        world.cache.release(world.session, leases[:1])
        leases.append((await world.acquire(chain(1, 2))).lease)
        world.cache.release(world.session, leases)
        assert world.pins == 0


async def test_of_several_reservations_all_are_recorded_or_none_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a session may hold only some of its reservations ahead, it holds none of them."""
    monkeypatch.setattr(holdings, "HOLDS_LIMIT", 2)
    async with opened() as world:
        group = world.put_query(np.zeros((2, 32), np.uint8))
        with pytest.raises(Overloaded, match="limits are 2"):
            await world.cache.reserve_ahead(world.session, group, puts=3, kind=TierKind.HOST)
        assert world.cache.core.stats().reservations == 0
        ahead = await world.cache.reserve_ahead(world.session, group, puts=2, kind=TierKind.HOST)
        assert len(ahead.reservations) == 2
        world.cache.core.check()


async def test_what_cannot_be_recorded_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the session table cannot grow, calls fail and do not count against the limit."""
    monkeypatch.setattr(holdings, "HOLDS_LIMIT", 2)
    async with opened() as world:
        await world.put(chain(1, 2))
        world.daemon.holds._free_count = 0
        failpoint.arm("holds.grow.before_map", "error:ENOSPC")
        try:
            for _ in range(3):
                with pytest.raises(TierFailed, match="cannot grow"):
                    await world.acquire(chain(1, 2))
        finally:
            failpoint.disarm()
        leases = [(await world.acquire(chain(1, 2))).lease for _ in range(2)]
        world.cache.release(world.session, leases)
        assert world.cache.core.stats().leases == 0


async def test_a_full_disk_queue_is_told_at_once() -> None:
    """A get behind a full disk queue is Overloaded with a hint; a get from memory is served."""
    async with opened() as world:
        far, near = chain(1, 4), chain(2, 4)
        stored = await world.put(far, durability=Durability.DURABLE)
        world.cache.flights.start(world.cache.core.evict(stored.blocks, tier=0, now=0.0))
        await world.put(near)
        busy = np.zeros(1 << 14, dtype=TRANSFER)
        busy["id"], busy["source"]["tier"], busy["source"]["length"] = 1 << 62, 1, 1 << 20
        world.cache.flights.read_queues.begin(busy, session=99)
        with pytest.raises(Overloaded) as told:
            await world.acquire(far)
        assert told.value.retry_after_s > 0
        lease = await world.acquire(near)
        assert lease.served.tokens == 64
        world.cache.flights.read_queues.end(busy)
        again = await world.acquire(far)
        assert again.served.tokens == 64
        world.cache.release(world.session, [lease.lease, again.lease])
        assert world.pins == 0


async def test_a_bad_page_whose_epoch_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed page whose epoch ends during its verification is a miss, quarantined and counted once."""
    monkeypatch.setattr("tierd.mover.AT_ONCE_BYTES", 0)  # so that there is a moment in which pages are looked at
    async with opened() as world:
        committed = await world.put(chain(1, 4))
        world.page(committed.extents[2])[0] ^= 0xFF
        task = asyncio.create_task(world.acquire(chain(1, 4)))
        await _turns(1)  # the lease is settled, and its pages are being hashed
        assert world.cache.core.stats().leases == 1
        await world.end_epoch()
        async with asyncio.timeout(SOON_S):
            lease = await task
        assert (lease.lease, lease.served.tokens) == (0, 0)
        assert world.cache.core.quarantined(0)["fault"].tolist() == [Fault.READ]
        assert world.cache.metrics.counters()['tierd_corrupt_total{tier="host.0"}'] == 1
        world.cache.core.check()
        assert world.pins == 0


async def test_nothing_is_verified_for_who_sums_what_he_copies() -> None:
    """For a client that sums its copies, the daemon verifies only the pages that the client doubts."""
    names = chain(1, 4)
    async with opened(CONFIG.replace('segment = "1 MiB"', 'segment = "1 MiB"\nverify = "always"', 1)) as world:
        committed, counted = await world.put(names), Counted(world)
        world.page(committed.extents[2])[7] ^= 1
        for doubted, pages, blocks in (
            ([], 0, 4),
            ([committed.extents["generation"][1]], 1, 4),
            (committed.extents["generation"][1:3], 5, 2),
        ):
            lease = await world.cache.acquire(
                world.session,
                [world.query(names)],
                kind=TierKind.HOST,
                timeout_s=SOON_S,
                doubted=np.asarray(doubted, np.uint64),
            )
            assert (counted.pages, lease.served.tokens) == (pages, blocks * TOKENS)
