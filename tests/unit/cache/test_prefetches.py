"""Prefetches: used, wasted or dropped, their share of a link, and cancelling."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cache.test_flights import _far, _hung
from tests.unit.cache.world import BLOCK_BYTES, CONFIG, SOON_S, World, opened
from tierd import failpoint
from tierd.cache.gets import Intent
from tierd.cache.prefetches import OF_SESSION, Ledger, Order, Turns
from tierd.core.formats.model import FREED, TRANSFER, Reason, StructArray, TierKind
from tierd.core.plan import Plan
from tierd.metrics import Metrics
from tierd.testing import chain

NAMES, OTHERS = chain(1, 6), chain(2, 3)
ONE_BY_ONE = CONFIG + "[mover]\nbatch_blocks = 1\ntransfer_limit = 2\nprefetch_on_lookup = false\n"
"""Two batches of one block on a link, one of them of a prefetch."""


def told(metrics: Metrics, origin: str = "call") -> dict[str, int]:
    """Bytes by outcome."""
    found = {}
    for name, count in metrics.counters().items():
        if name.startswith("tierd_prefetched_bytes_total") and f'origin="{origin}"' in name and count:
            found[name.partition('outcome="')[2].partition('"')[0]] = count
    return found


def ledger_of(metrics: Metrics, now: list[float]) -> Ledger:
    """A ledger with a clock of its own."""
    return Ledger(metrics, now=lambda: now[0], next_id=itertools.count(1).__next__)


def plan_of(generations: list[int], size: int = 100) -> Plan:
    """A plan that brings these pages into tier 0."""
    transfers = np.zeros(len(generations), TRANSFER)
    transfers["id"] = generations
    transfers["target"]["generation"], transfers["target"]["length"] = generations, size
    return Plan(transfers=transfers)


def freed(generations: list[int], *, was_ready: bool = True) -> StructArray:
    """FREED pages."""
    records = np.zeros(len(generations), FREED)
    records["extent"]["generation"], records["was_ready"] = generations, was_ready
    return records


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "use", "free", "drop", "pass"]), st.integers(0, 9), st.integers(1, 9)),
        max_size=40,
    )
)
def test_each_page_ends_once(steps: list[tuple[str, int, int]]) -> None:
    """Bytes that were staged are used, wasted, dropped or still staged: none twice, none lost."""
    metrics, now, made = Metrics(), [0.0], 0
    ledger = ledger_of(metrics, now)
    for verb, first, count in steps:
        pages = list(range(first * 4 + 1, first * 4 + count + 1))
        if verb == "begin":
            ledger.begin(1, plan_of(list(range(made + 1, made + count + 1))), Order(ttl_s=float(first + 1)))
            made += count
        elif verb == "use":
            ledger.use(pages)
        elif verb == "pass":
            now[0] += first
            ledger.expire()
        else:
            ledger.free(freed(pages, was_ready=verb == "free"))
    counted = sum(told(metrics).values())
    assert counted + ledger.staged.total() == made * 100
    assert len(ledger) * 100 == ledger.staged.total()
    now[0] = 1e9
    ledger.expire()
    assert (len(ledger), ledger.staged.total(), sum(told(metrics).values())) == (0, 0, made * 100)
    assert ledger.of(1) == []


def test_a_use_after_the_time_is_a_waste() -> None:
    """A page that a get uses too late counts as wasted, although nobody looked at the clock before."""
    metrics, now = Metrics(), [0.0]
    ledger = ledger_of(metrics, now)
    ledger.begin(1, plan_of([1, 2]), Order(ttl_s=5.0))
    now[0] = 4.9
    ledger.use([1])
    now[0] = 5.0
    ledger.use([2])
    assert told(metrics) == {"used": 100, "wasted": 100}


def test_pages_on_the_way_of_others_are_not_booked() -> None:
    """A page that only feeds another transfer of the plan is neither staged nor wasted."""
    metrics, now = Metrics(), [0.0]
    ledger, plan = ledger_of(metrics, now), plan_of([1, 2])
    plan.transfers["after"][1] = 1
    ledger.begin(1, plan, Order())
    assert (len(ledger), ledger.staged.total()) == (1, 100)
    ledger.use([1, 2])
    assert told(metrics) == {"used": 100}


def test_a_session_has_so_many_prefetches_to_cancel() -> None:
    """Beyond the limit of a session its oldest prefetches cannot be cancelled any more."""
    ledger = ledger_of(Metrics(), [0.0])
    numbers = [ledger.begin(1, plan_of([page]), Order()) for page in range(1, OF_SESSION + 2)]
    assert ledger.of(1) == numbers[1:]


def test_a_prefetch_may_go_on_as_its_time_ends() -> None:
    """Pages that are freed to make room, as its time ends, do not end a prefetch that goes on."""
    metrics, now = Metrics(), [0.0]
    ledger = ledger_of(metrics, now)
    number = ledger.begin(1, replace(plan_of([1]), is_short=True), Order(ttl_s=5.0))
    now[0] = 5.0
    ledger.free(freed([1]))
    assert ledger.begin(1, plan_of([2]), Order(), number=number) == number
    ledger.expire()
    assert told(metrics) == {"wasted": 200}
    assert ledger.of(1) == []


async def test_the_time_to_live_of_a_replay_is_that_of_its_trace() -> None:
    """In a replay blocks are wasted when the trace's time has passed, whatever the machine's."""
    async with opened(ONE_BY_ONE.replace("[server]", '[server]\nclock = "replay"')) as world:
        await _far(world, NAMES)
        order = Order(ttl_s=5.0)
        assert world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST, order).blocks == len(NAMES)
        await world.cache.flights.idle(timeout_s=SOON_S)
        await world.acquire(NAMES[:2])
        world.cache.clock.advance(5.0)
        await world.acquire(NAMES)
        assert told(world.daemon.metrics) == {"used": 2 * BLOCK_BYTES, "wasted": 4 * BLOCK_BYTES}


async def test_a_get_uses_what_a_prefetch_brought() -> None:
    """The bytes of blocks that a get was served count as used, once."""
    async with opened(ONE_BY_ONE) as world:
        await _far(world, NAMES)
        begun = world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
        assert begun.blocks == len(NAMES)
        await world.cache.flights.idle(timeout_s=SOON_S)
        for _ in range(2):
            lease = await world.acquire(NAMES[:4])
            world.cache.release(world.session, [lease.lease])
        assert told(world.daemon.metrics) == {"used": 4 * BLOCK_BYTES}
        assert world.cache.flights.prefetches.staged[0] == 2 * BLOCK_BYTES
        world.cache.note_used(world.session, [world.query(NAMES)], times=1)
        assert told(world.daemon.metrics) == {"used": 6 * BLOCK_BYTES}


async def test_what_is_evicted_unused_was_wasted() -> None:
    """Staged pages that are freed before a get used them count as wasted."""
    async with opened(ONE_BY_ONE) as world:
        await _far(world, NAMES)
        world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
        await world.cache.flights.idle(timeout_s=SOON_S)
        assert world.cache.flights.prefetches.yield_room()
        _evict_near(world)
        assert told(world.daemon.metrics) == {"wasted": 6 * BLOCK_BYTES}


@pytest.mark.parametrize("how", ["by its number", "by the session's end"])
async def test_cancelling_drops_what_has_not_begun(how: str) -> None:
    """Transfers that have begun end, the others are dropped; no failure is counted."""
    async with opened(ONE_BY_ONE) as world:
        await _far(world, NAMES)
        async with _hung(world):
            begun = world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
            await _begun(world)
            world.cache.cancel_prefetches(99, [begun.id])  # of another session: ignored
            if how == "by its number":
                world.cache.cancel_prefetches(world.session, [begun.id])
            else:
                world.cache.stop_session(world.session)
        assert await world.cache.flights.idle(timeout_s=SOON_S)
        assert len(world.cache.core.blocks(tier=0)) == 1
        assert told(world.daemon.metrics) == {"dropped": 5 * BLOCK_BYTES}
        assert world.cache.flights.failed == 0
        world.cache.core.check()


@pytest.mark.parametrize("how", ["by its number", "by the session's end"])
async def test_a_prefetch_whose_epoch_ended_is_cancelled(how: str) -> None:
    """Cancelling frees the pages of an ended epoch, which the prefetch alone kept: they were wasted."""
    async with opened(ONE_BY_ONE) as world:
        await _far(world, NAMES)
        begun = world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
        await world.cache.flights.idle(timeout_s=SOON_S)
        await world.end_epoch()
        if how == "by its number":
            world.cache.cancel_prefetches(world.session, [begun.id])
        else:
            world.cache.stop_session(world.session)
        assert told(world.daemon.metrics) == {"wasted": 6 * BLOCK_BYTES}
        assert world.cache.flights.prefetches.of(world.session) == []
        world.cache.core.check()


async def test_what_a_get_waits_for_is_not_cancelled() -> None:
    """A get that shares a prefetch's transfers is served whole, although the prefetch is cancelled."""
    async with opened(ONE_BY_ONE) as world:
        await _far(world, NAMES)
        async with _hung(world):
            begun = world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
            await _begun(world)
            get = asyncio.create_task(world.acquire(NAMES))
            await _settle()
            world.cache.cancel_prefetches(world.session, [begun.id])
        assert (await get).served.tokens == 16 * len(NAMES)
        assert told(world.daemon.metrics) == {"used": 6 * BLOCK_BYTES}


async def test_what_another_prefetch_wants_is_not_cancelled() -> None:
    """Transfers that two prefetches want are dropped when both are cancelled, not before."""
    async with opened(ONE_BY_ONE) as world:
        await _far(world, NAMES)
        async with _hung(world):
            first = world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
            second = world.cache.prefetch(world.session, [world.query(NAMES[:3])], TierKind.HOST)
            assert (second.id > first.id, second.blocks) == (True, 0)
            await _begun(world)
            world.cache.cancel_prefetches(world.session, [first.id, first.id])
        assert await world.cache.flights.idle(timeout_s=SOON_S)
        assert len(world.cache.core.blocks(tier=0)) == 3
        assert told(world.daemon.metrics) == {"dropped": 3 * BLOCK_BYTES}
        world.cache.cancel_prefetches(world.session, [second.id])
        assert world.cache.flights.prefetches.of(world.session) == []


async def test_a_number_is_not_used_twice() -> None:
    """Prefetches are numbered as leases, which go on after a restart."""
    async with opened(ONE_BY_ONE) as world:
        await _far(world, NAMES)
        begun = world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
        assert world.cache.core.next_id() > begun.id > 0


async def test_what_failed_was_not_wasted() -> None:
    """Pages whose transfers failed are dropped at once, although a lease still keeps them."""
    async with opened(ONE_BY_ONE) as world:
        await _far(world, NAMES)
        failpoint.arm("mover.load.before_verify", "error:EIO")
        try:
            world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
            await world.cache.flights.idle(timeout_s=SOON_S)
        finally:
            failpoint.disarm("mover.load.before_verify")
        assert told(world.daemon.metrics) == {"dropped": 6 * BLOCK_BYTES}
        assert world.cache.flights.prefetches.of(world.session) == []


@pytest.mark.parametrize("how", ["used", "cancelled", "asked for", "read aside"])
async def test_a_prefetch_without_room_goes_on(how: str) -> None:
    """Blocks that the share did not hold follow later, unless they were cancelled or a get came."""
    async with opened(ONE_BY_ONE + f"prefetch_share = {3 * BLOCK_BYTES / (4 << 20)}\n") as world:
        await _far(world, NAMES)
        await _far(world, OTHERS)
        ahead = world.cache.prefetch(world.session, [world.query(OTHERS)], TierKind.HOST)
        behind = world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
        assert (ahead.blocks, behind.blocks, behind.id > 0) == (3, 0, True)
        await world.cache.flights.idle(timeout_s=SOON_S)
        if how == "cancelled":
            world.cache.cancel_prefetches(world.session, [behind.id])
        if how == "asked for":
            world.cache.release(world.session, [(await world.acquire(NAMES)).lease])
            _evict_near(world)
        if how == "read aside":
            world.cache.note_used(world.session, [world.query(NAMES)], times=1)
        await world.acquire(OTHERS)
        await world.cache.flights.idle(timeout_s=SOON_S)
        assert len(world.cache.core.blocks(tier=0)) - len(OTHERS) == (3 if how == "used" else 0)


async def test_prefetches_without_room_go_on_in_their_order() -> None:
    """Room that comes without a get goes to the prefetch that waits, before a later one."""
    async with opened(ONE_BY_ONE + f"prefetch_share = {3 * BLOCK_BYTES / (4 << 20)}\n") as world:
        for names in (NAMES, OTHERS, chain(3, 3)):
            await _far(world, names)
        world.cache.prefetch(world.session, [world.query(OTHERS)], TierKind.HOST)
        world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
        await world.cache.flights.idle(timeout_s=SOON_S)
        world.cache.flights.prefetches.yield_room()
        _evict_near(world)
        assert world.cache.prefetch(world.session, [world.query(chain(3, 3))], TierKind.HOST).blocks == 0
        await world.cache.flights.idle(timeout_s=SOON_S)
        near = world.cache.core.blocks(tier=0)
        assert sorted(near.tolist()) == sorted(world.cache.core.find_blocks(world.namespace.id, NAMES[:3]).tolist())


@pytest.mark.parametrize(
    ("intent", "is_set", "begins"),
    [
        (Intent.NONE, True, False),
        (Intent.DEFAULT, True, True),
        (Intent.DEFAULT, False, False),
        (Intent.LOAD, False, True),
    ],
)
async def test_a_lookup_tells_its_intent(intent: Intent, *, is_set: bool, begins: bool) -> None:
    """NONE begins no prefetch and LOAD always one; the setting decides for those that do not tell."""
    async with opened(CONFIG + f"[mover]\nprefetch_on_lookup = {str(is_set).lower()}\n") as world:
        await _far(world, NAMES)
        found = world.cache.lookup(world.session, [world.query(NAMES)], intent=intent)
        assert (found.prefetch > 0, world.cache.flights.count > 0) == (begins, begins)


async def test_staged_blocks_take_a_share_of_the_tier() -> None:
    """Without gets, prefetches bring no more than their share; a get that uses some makes room."""
    async with opened(ONE_BY_ONE + "prefetch_share = 0.01\n") as world:
        await _far(world, NAMES)
        most = int(0.01 * (4 << 20)) // BLOCK_BYTES
        begun = world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST)
        assert begun.blocks == most < len(NAMES)
        await world.cache.flights.idle(timeout_s=SOON_S)
        assert world.cache.prefetch(world.session, [world.query(NAMES)], TierKind.HOST).blocks == 0
        await world.acquire(NAMES[:most])
        await world.cache.flights.idle(timeout_s=SOON_S)
        assert len(world.cache.core.blocks(tier=0)) == len(NAMES)


@pytest.mark.parametrize("verb", ["put", "get"])
async def test_demand_takes_the_pages_that_prefetches_keep(verb: str) -> None:
    """Staged pages are not evicted for cold blocks' sake, but a put or a get without other room gets them."""
    small = ONE_BY_ONE.replace('"4 MiB"', '"1 MiB"').replace("batch_blocks = 1\n", "")
    async with opened(small) as world:
        await _far(world, chain(1, 50))
        await _far(world, chain(2, 60))
        await _far(world, chain(3, 40))
        query = [world.query(chain(1, 50))]
        assert world.cache.prefetch(world.session, query, TierKind.HOST).blocks == 50
        await world.cache.flights.idle(timeout_s=SOON_S)
        world.daemon.cache.core.check()
        assert world.cache.core.tier_stats()[0].pages_pinned == 50
        if verb == "put":
            assert len((await world.put(chain(4, 4))).statuses) == 4
        else:
            for session, names in ((12, chain(2, 60)), (13, chain(3, 40))):
                world.cache.open_session(session, tenant="t")
                got = await world.cache.acquire(session, [world.query(names)], kind=TierKind.HOST, timeout_s=SOON_S)
                assert got.served.tokens == 16 * len(names)
        assert told(world.daemon.metrics)["wasted"] > 0
        world.daemon.cache.core.check()


async def test_prefetches_take_a_share_of_a_link() -> None:
    """So many batches of prefetches are active at one time, in order; a cancelled waiter keeps no place."""
    turns, active, most = Turns(lambda: 2), [0], [0]
    done = asyncio.Event()

    async def fly(number: int) -> None:
        batch = batch_of(number)
        turns.expect(batch)
        async with turns.of(batch) as goes:
            assert goes
            active[0] += 1
            most[0] = max(most[0], active[0])
            await done.wait()
            active[0] -= 1
        turns.end(batch)

    tasks = [asyncio.create_task(fly(number)) for number in range(1, 8)]
    await _settle()
    tasks[4].cancel()
    assert active[0] == 2
    done.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (active[0], most[0]) == (0, 2)
    async with AsyncExitStack() as stack:
        for number in (20, 21):
            turns.expect(batch_of(number))
            assert await asyncio.wait_for(stack.enter_async_context(turns.of(batch_of(number))), SOON_S)


async def test_a_turn_is_passed_on_by_a_waiter_that_ends() -> None:
    """A flight that is cancelled in the moment of its turn leaves the turn to the next one."""
    turns, first, second = Turns(lambda: 1), batch_of(1), batch_of(2)
    turns.expect(first)
    turns.expect(second)
    async with AsyncExitStack() as stack:
        async with turns.of(first):
            waiter = asyncio.create_task(stack.enter_async_context(turns.of(second)))
            await _settle()
        waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled()
        turns.expect(batch_of(3))
        assert await asyncio.wait_for(stack.enter_async_context(turns.of(batch_of(3))), SOON_S)


async def test_what_a_get_waits_for_goes_ahead() -> None:
    """A batch that a get wants passes the limit at once and is demand, also if it is cancelled then."""
    turns, batches = Turns(lambda: 1), [batch_of(number) for number in (1, 2, 3)]
    for batch in batches:
        turns.expect(batch)
    async with AsyncExitStack() as stack:
        assert await stack.enter_async_context(turns.of(batches[0]))
        waiter = asyncio.create_task(stack.enter_async_context(turns.of(batches[1])))
        await _settle()
        assert not waiter.done()
        turns.want([2, 3, 99])
        turns.drop([2, 3])
        assert await asyncio.wait_for(waiter, SOON_S)
        assert await asyncio.wait_for(stack.enter_async_context(turns.of(batches[2])), SOON_S)
    assert [batch["reason"][0] == Reason.DEMAND for batch in batches] == [False, True, True]


def batch_of(number: int) -> StructArray:
    """One TRANSFER record of a prefetch."""
    batch = np.zeros(1, TRANSFER)
    batch["id"], batch["reason"] = number, Reason.PREFETCH
    return batch


def _evict_near(world: World) -> None:
    """Evicts what no lease keeps in host memory."""
    world.cache.flights.start(world.cache.core.evict(world.cache.core.blocks(tier=0), tier=0, now=0.0))


async def _begun(world: World) -> None:
    """Waits until one batch of a prefetch has its turn, and all others wait for theirs."""
    turns = world.cache.flights.turns
    async with asyncio.timeout(SOON_S):
        while not (turns._active.total() and sum(map(len, turns._waiting.values())) == len(NAMES) - 1):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
