"""Scrub passes: they cover every page, keep to the rate, and delay no other work."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.depth import count
from tests.unit.cache.world import CONFIG, SOON_S, World, opened
from tierd import call_context, failpoint
from tierd.cache.scrub import BATCH_BYTES, UNREAD_LIMIT, Pacer, Pass, Scrub
from tierd.core.formats.model import UNVERIFIED, Durability, Fault
from tierd.errors import Overloaded
from tierd.mover import Link
from tierd.testing import chain

MIB = 1 << 20
BLOCK = 8192
NAMES = chain(1, 200)
"""More than a batch; the last batch is short."""


async def passed(world: World, *tiers: int) -> Pass:
    """A whole pass."""
    made = Pass(world.cache, tiers or (0, 1))
    async for _ in made.steps():
        pass
    return made


def host_pages(world: World, names: np.ndarray) -> np.ndarray:
    return world.cache.core.extents(_ids(world, names), tier=0)


def _ids(world: World, names: np.ndarray) -> np.ndarray:
    return np.array([world.cache.core.find_block(world.namespace.id, name.tobytes()) for name in names])


def flip(world: World, name: np.ndarray) -> None:
    page = world.page(host_pages(world, name.reshape(1, -1))[0])
    page[100] ^= 4


@pytest.fixture
def faults() -> Iterator[None]:
    """Fault points of this process, disarmed after the test."""
    yield
    failpoint.disarm()


# -- pace


@pytest.mark.parametrize("seed", range(count(test=20, nightly=200, weekly=1000)))
def test_never_ahead_of_the_rate(seed: int) -> None:
    """The bytes read never exceed the rate times the elapsed time, for any batches and delays."""
    luck = random.Random(seed)
    rate, now, done = luck.uniform(1e5, 1e9), 0.0, 0
    pacer = Pacer(now)
    for _ in range(500):
        while pause := pacer.pause_s(rate, now):
            now += pause
        assert done <= rate * now, f"seed {seed}: {done} bytes after {now} s at {rate}"
        size = luck.randint(1, BATCH_BYTES)
        pacer.pay(size)
        done += size
        now += luck.choice([0.0, luck.uniform(0, 2 * BATCH_BYTES / rate)])  # a tier that is sometimes slow
    assert done > 0.4 * rate * now, f"seed {seed}: {done} bytes after {now} s at {rate}"


def test_a_steady_pass_keeps_the_rate() -> None:
    """Without delays a pass reads exactly at the rate."""
    now, done, pacer = 0.0, 0, Pacer(0.0)
    while now < 1000:
        while pause := pacer.pause_s(10 * MIB, now):
            now += pause
        pacer.pay(700_000)
        done += 700_000
    assert done / now == pytest.approx(10 * MIB, rel=0.001)


def test_nothing_is_saved_up() -> None:
    """After a long rest a pass goes on at the rate, without a burst."""
    now, done, pacer = 100.0, 0, Pacer(0.0)
    while now <= 101:
        while pause := pacer.pause_s(10 * MIB, now):
            now += pause
        pacer.pay(MIB)
        done += MIB
    assert done <= 12 * MIB


def test_a_rate_that_grows_is_heeded_within_the_longest_pause() -> None:
    """A pause lasts at most 60 s, so the pacer soon follows a rate that grows."""
    now, pacer = 0.0, Pacer(0.0)
    assert pacer.pause_s(1.0, now) == 60.0
    assert pacer.pause_s(0.0, now + 60) == 60.0
    assert pacer.pause_s(100 * MIB, now + 120) < 0.02


async def test_the_rate_follows_what_is_held() -> None:
    """The rate is the held bytes over the period, at most the bandwidth, and zero for an empty daemon."""
    async with opened() as world:
        scrub = Scrub(world.cache, period_s=100, bandwidth=20_000)
        assert scrub._rate() == 0
        await world.put(NAMES[:10])
        assert scrub._rate() == pytest.approx(10 * BLOCK / 80)
        await world.put(NAMES)
        assert scrub._rate() == 20_000


# -- coverage


async def test_every_page_of_every_tier_is_verified() -> None:
    """A pass verifies every page in memory and on the store, also the last short batch."""
    async with opened() as world:
        await world.put(NAMES, durability=Durability.DURABLE)
        made = await passed(world)
        assert [(done.pages, done.bad) for done in made.tiers] == [(200, 0), (200, 0)]
        assert [done.bytes for done in made.tiers] == [200 * BLOCK, 200 * (BLOCK + 4096)]
        assert made.finished


@pytest.mark.parametrize("number", [0, 127, 128, 199])
async def test_a_bad_page_is_found_wherever_it_lies(number: int) -> None:
    """A bad page at any place of a batch is found once, quarantined with its fault, and then a miss."""
    async with opened() as world:
        await world.put(NAMES)
        flip(world, NAMES[number])
        assert [done.bad for done in (await passed(world)).tiers] == [1, 0]
        assert [done.bad for done in (await passed(world)).tiers] == [0, 0]
        lease = await world.acquire(NAMES)
        assert lease.served.tokens == 16 * number
        assert world.cache.metrics.counters()['tierd_corrupt_total{tier="host.0"}'] == 1
        assert world.cache.core.quarantined(0)["fault"].tolist() == [Fault.DIGEST]
        world.cache.core.check()


@pytest.mark.usefixtures("faults")
async def test_what_changes_hands_meanwhile_is_no_find() -> None:
    """A slot that is rewritten while its batch is read is neither condemned nor counted."""
    old, new = NAMES[:50], chain(2, 50)
    async with opened() as world:
        await world.put(old, durability=Durability.DURABLE)
        passing = Pass(world.cache, [1])
        failpoint.arm("nvme.slots.before_read", "delay:0.5")
        walk = passing.steps()
        batch = asyncio.ensure_future(anext(walk))
        await asyncio.sleep(0)
        world.cache.flights.start(world.cache.core.evict(_ids(world, old), tier=None, now=0.0))
        await world.put(new, durability=Durability.DURABLE)
        await batch
        await walk.aclose()
        assert (passing.tiers[0].pages, passing.tiers[0].bad) == (50, 0)
        assert len(world.cache.core.quarantined(1)) == 0
        assert len(world.cache.core.blocks(tier=1)) == 50


async def test_only_a_page_that_nobody_can_write_is_marked_verified() -> None:
    """A scrub marks a page verified only after its writer's session ends."""
    async with opened() as world:
        await world.put(NAMES[:4])
        await passed(world)
        assert (host_pages(world, NAMES[:4])["flags"] & UNVERIFIED).all()
        world.cache.end_session(World.session)
        await passed(world)
        assert not (host_pages(world, NAMES[:4])["flags"] & UNVERIFIED).any()


# -- in nobody's way


async def test_nothing_leaves_for_a_scrub() -> None:
    """A pass over full tiers moves, evicts and pins nothing."""
    async with opened() as world:
        await world.put(NAMES, durability=Durability.DURABLE)
        before, made = world.cache.core.tier_stats(), world.cache.flights.made
        assert sum(done.pages for done in (await passed(world)).tiers) == 400
        assert (world.cache.core.tier_stats(), world.cache.flights.made) == (before, made)


async def test_a_scrub_is_last_in_line() -> None:
    """On a busy link, later demand, prefetch and demotion go before a scrub."""
    async with opened() as world:
        mover, order = world.cache.parts.mover, []
        link = mover._links.setdefault((1, 0), Link(1))

        async def take(turn: contextlib.AbstractAsyncContextManager[None], name: str) -> None:
            async with turn:
                order.append(name)

        async with link.slot(0):
            waiting = [asyncio.ensure_future(take(mover.last_turn(1), "scrub"))]
            await asyncio.sleep(0)
            waiting += [asyncio.ensure_future(take(link.slot(p), str(p))) for p in (2, 1, 0)]
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*waiting), SOON_S)
        assert order == ["0", "1", "2", "scrub"]


async def test_one_pass_at_a_time_is_asked_for() -> None:
    """A second pass is Overloaded while one runs. A closed pass makes room for the next."""
    async with opened() as world:
        await world.put(NAMES)
        scrub = Scrub(world.cache, period_s=0, bandwidth=MIB)
        first = scrub.ask([0], bandwidth=0)
        await anext(first)
        with pytest.raises(Overloaded, match="another requested pass is running"):
            await anext(scrub.ask([0], bandwidth=0))
        await first.aclose()
        told = [told.tiers[0].pages async for told in scrub.ask([0, 1], bandwidth=0)]
        assert (told[0], told[-1]) == (0, 200)
        assert scrub.last is not None


async def test_under_a_replay_clock_nothing_runs_by_itself() -> None:
    """Under a replay clock passes run only on request."""
    async with opened(CONFIG.replace("[server]", '[server]\nclock = "replay"')) as world:
        scrub = Scrub(world.cache, period_s=1e-3, bandwidth=1 << 40)
        scrub.start()
        await world.put(NAMES)
        await asyncio.sleep(0.05)
        assert scrub.current is None
        await scrub.stop()


async def test_the_background_goes_round_and_round() -> None:
    """With a short period pass follows pass, and the next one detects a new bad page."""
    async with opened() as world:
        await world.put(NAMES[:50])
        scrub = Scrub(world.cache, period_s=0.1, bandwidth=1 << 40)
        scrub.start()
        async with asyncio.timeout(SOON_S):
            while scrub.last is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            flip(world, NAMES[17])
            while not len(world.cache.core.quarantined(0)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await scrub.stop()
        assert (await world.acquire(NAMES[:50])).served.tokens == 17 * 16


async def test_another_period_holds_at_once() -> None:
    """A scrub that is off begins with a period, and a period of 0 ends it."""
    async with opened() as world:
        await world.put(NAMES[:50])
        scrub = Scrub(world.cache, period_s=0, bandwidth=1)
        scrub.start()
        scrub.set_pace(period_s=0.1, bandwidth=1 << 40)
        async with asyncio.timeout(SOON_S):
            while scrub.last is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        scrub.set_pace(period_s=0, bandwidth=1 << 40)
        last = scrub.last
        await asyncio.sleep(0.2)
        assert scrub.last is last and scrub.current is None
        await scrub.stop()


async def test_a_scrub_belongs_to_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A background that an operator's call begins does not log or trace in that call's name."""
    seen = list[dict[str, str]]()

    async def run(_scrub: Scrub) -> None:
        seen.append(dict(call_context.fields()))

    monkeypatch.setattr(Scrub, "_run_for_ever", run)
    async with opened() as world:
        scrub = Scrub(world.cache, period_s=0, bandwidth=1)
        with call_context.InCall("c1", "Set"):
            scrub.set_pace(period_s=1, bandwidth=1)
        await asyncio.sleep(0)
        await scrub.stop()
    assert seen == [{}]


# -- disks that do not answer


@pytest.mark.usefixtures("faults")
async def test_a_slot_that_is_read_the_second_time_is_good() -> None:
    """A slot that reads well on retry is neither bad nor unread."""
    async with opened() as world:
        await world.put(NAMES[:20], durability=Durability.DURABLE)
        failpoint.arm("nvme.slots.before_read", "error:EIO@1x2")
        made = await passed(world, 1)
        assert (made.tiers[0].bad, made.tiers[0].unread) == (0, 0)
        assert len(world.cache.core.blocks(tier=1)) == 20


@pytest.mark.usefixtures("faults")
async def test_a_slot_that_cannot_be_read_is_quarantined() -> None:
    """If other slots can be read, an unreadable slot is quarantined with Fault.IO."""
    async with opened() as world:
        await world.put(NAMES[:20], durability=Durability.DURABLE)
        failpoint.arm("nvme.slots.before_read", "error:EIO@1x2")
        made = Pass(world.cache, [1])
        async for _ in made.steps():
            failpoint.arm("nvme.slots.before_read", "error:EIO")
        assert (made.tiers[0].bad, made.tiers[0].unread) == (1, 0)
        assert world.cache.core.quarantined(1)["fault"].tolist() == [Fault.IO]
        assert len(world.cache.core.blocks(tier=1)) == 19
        failpoint.disarm()
        assert (await world.acquire(NAMES[:20])).served.tokens == 320


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("blocks", [1, UNREAD_LIMIT + 1, 40])
async def test_a_disk_that_gives_nothing_loses_no_block(blocks: int) -> None:
    """Blocks that a failed disk cannot read stay, and are hits when the disk works again."""
    async with opened() as world:
        await world.put(NAMES[:blocks], durability=Durability.DURABLE)
        failpoint.arm("nvme.slots.before_read", "error:EIO")
        made = await passed(world, 1)
        assert (made.tiers[0].bad, made.tiers[0].unread) == (0, blocks)
        failpoint.disarm()
        assert (await passed(world, 1)).tiers[0].pages == blocks
