"""Releases that nobody waits for: soon, and never in the way of who needs the room."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.unit.cache.world import SOON_S, TOKENS, World, directories, opened
from tierd.cache import holdings
from tierd.cache.operator import Operator
from tierd.cache.releases import LateReleases
from tierd.core.model import BlockStatus
from tierd.errors import Overloaded, SessionLost
from tierd.testing import chain
from tierd.tiers.holds import Holder, read_boot_id

SMALL = """
[server]
runtime_dir = "{root}/run"
state_dir = "{root}/state"
[[host]]
capacity = "64 KiB"
segment = "32 KiB"
arena_dir = "{arena}"
"""
NAMES, OTHERS = chain(1, 4), chain(2, 4)


async def held(world: World, *, besides: int = 0) -> int:
    """A lease whose release was asked for, and not made yet. besides: how many other leases there are."""
    await world.put(NAMES)
    lease = (await world.acquire(NAMES)).lease
    world.cache.release(world.session, [lease], is_awaited=False)
    assert world.cache.core.stats().leases == 1 + besides
    return lease


async def test_a_release_is_made_a_moment_later() -> None:
    """What nobody waits for is made by itself; twice is once; one of a session that has gone is none."""
    async with opened() as world:
        lease = await held(world)
        world.cache.release(world.session, [lease], is_awaited=False)
        world.cache.release(77, [5], is_awaited=False)
        async with asyncio.timeout(SOON_S):
            while world.pins:  # noqa: ASYNC110  # its timer rings no bell
                await asyncio.sleep(0.001)
        world.cache.core.check()


async def test_an_awaited_release_is_made_at_once() -> None:
    """Who waits for it finds the pages unpinned when he is told."""
    async with opened() as world:
        await world.put(NAMES)
        world.cache.release(world.session, [(await world.acquire(NAMES)).lease])
        assert not world.pins


async def test_a_put_finds_the_room() -> None:
    """Pages whose release is asked for are there for the put that follows it."""
    async with opened(SMALL) as world:
        for number in (1, 2):  # all that the session may pin: half of the tier
            await world.put(chain(number, 4))
        lease = (await world.acquire(NAMES)).lease
        other = (await world.acquire(OTHERS)).lease
        world.cache.release(world.session, [lease, other], is_awaited=False)
        reserved = await world.reserve(chain(3, 4))
        assert reserved.statuses[0].tolist() == [BlockStatus.RESERVED] * 4
        world.cache.abort(world.session, reserved.reservation)


async def test_a_get_finds_the_room() -> None:
    """An acquire within a share that an asked-for release gives back gets all of it."""
    async with opened(SMALL) as world:
        await world.put(NAMES)
        await world.put(OTHERS)
        lease = (await world.acquire(NAMES)).lease
        world.cache.release(world.session, [lease], is_awaited=False)
        second = await world.acquire(OTHERS)
        assert second.served.tokens == 4 * TOKENS
        assert world.cache.core.stats().leases == 1
        world.cache.release(world.session, [second.lease])


@pytest.mark.parametrize("is_named", [False, True])
async def test_an_eviction_finds_what_was_given_back(is_named: bool) -> None:
    """Pages whose release is asked for leave the tier when an operator evicts them; those that are leased still stay."""
    async with opened() as world:
        await world.put(OTHERS)
        kept = (await world.acquire(OTHERS)).lease
        await held(world, besides=1)
        named = [name.tobytes().hex() for name in (*NAMES, *OTHERS)] if is_named else []
        gone = await Operator(world.cache).evict(named, "host.0")
        assert (gone.blocks, gone.pinned) == (len(NAMES), len(OTHERS))
        world.cache.release(world.session, [kept])


async def test_a_session_that_holds_as_much_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has given back is not counted against it, and what it has not is."""
    monkeypatch.setattr(holdings, "HOLDS_LIMIT", 2)
    async with opened() as world:
        await world.put(NAMES)
        leases = [(await world.acquire(NAMES)).lease for _ in range(2)]
        for _ in range(3):
            world.cache.release(world.session, [leases.pop(0)], is_awaited=False)
            leases.append((await world.acquire(NAMES)).lease)
            with pytest.raises(Overloaded):
                await world.acquire(NAMES)
            assert world.cache.core.stats().leases == 2
        world.cache.release(world.session, leases)
        assert not world.pins


@pytest.mark.parametrize("how", ["leave_session", "end_session"])
async def test_a_session_whose_end_is_heard_late_holds_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A goodbye that is read while a get makes room for its lease leaves no lease, and nothing in the session table."""
    monkeypatch.setattr(holdings, "HOLDS_LIMIT", 1)
    async with opened() as world:
        await world.put(NAMES)
        await world.acquire(NAMES[:1])
        end = getattr(world.cache, how)
        world.cache.releases.hear = lambda asker: None if asker is None else end(asker)
        with pytest.raises(SessionLost):
            await world.acquire(NAMES)
        assert not world.pins


async def test_a_get_that_is_tried_again_counts_once() -> None:
    """Blocks that a get asks for a second time, because a release has made room for more of them, are used once by it."""
    async with opened(SMALL) as world:
        both = chain(2, 4)
        await world.put(NAMES)
        blocks = (await world.put(both)).blocks
        lease = (await world.acquire(NAMES[:2])).lease
        world.cache.release(world.session, [lease], is_awaited=False)
        assert (await world.acquire(both)).served.tokens == 4 * TOKENS
        assert world.cache.core.describe(blocks)["hits"].tolist() == [1] * 4


async def test_one_release_that_fails_keeps_none_of_the_others() -> None:
    """What goes wrong with one session's releases is no fault of who has them made, and the others are made."""
    made = list[int]()

    def give_back(session: int, _leases: object) -> None:
        if session == 1:
            raise AssertionError("a fault of ours")
        made.append(session)

    late = LateReleases(give_back)
    for session in (1, 2, 3):
        late.add(session, [7])
    assert late.make()
    assert made == [2, 3]
    assert not late.make()


async def test_a_release_in_the_last_moment_of_a_daemon() -> None:
    """What was asked for before the end is made, else the next life would keep the pages for a process that has let go of them."""
    with directories() as places:
        async with opened(SMALL, places=places) as world:
            world.session = 12
            domain = world.cache.registry.domain_of("t")
            holder = Holder(
                12, os.getpid(), start_time=1, boot=read_boot_id(), uid=os.getuid(), domain=domain, tenant="t"
            )
            world.cache.open_session(12, tenant="t", holder=holder)
            await held(world)
        async with opened(SMALL, places=places) as world:
            assert [len(former.leased) for former in world.daemon.former] == [0]


@pytest.mark.parametrize("ends", ["leave_session", "end_session"])
async def test_a_session_that_ends_first(ends: str) -> None:
    """Its releases are made with its end, and are no fault afterwards."""
    async with opened() as world:
        await held(world)
        getattr(world.cache, ends)(world.session)
        world.cache.releases.make()
        assert not world.cache.core.stats().leases
        world.cache.core.check()
