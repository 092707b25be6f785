"""Unread releases in notices: the daemon reads them when a session needs the room."""

from __future__ import annotations

import pytest

from tests.unit.cache.world import TOKENS, World, opened
from tierd.cache import holdings
from tierd.cache.operator import Operator
from tierd.core.formats.model import BlockStatus
from tierd.errors import Overloaded, SessionLost
from tierd.testing import chain

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


def give_back(world: World, *leases: int) -> None:
    """Releases that clients wrote into notices. The daemon reads them when it calls `process_notices`."""
    unread = [leases]

    def process(_asker: int | None) -> None:
        while unread:
            world.cache.release(world.session, unread.pop())

    world.cache.process_notices = process


async def held(world: World, *, besides: int = 0) -> int:
    """A lease whose client has written its release. besides: the number of other leases."""
    await world.put(NAMES)
    lease = (await world.acquire(NAMES)).lease
    give_back(world, lease)
    assert world.cache.core.stats().leases == 1 + besides
    return lease


async def test_a_put_finds_the_room() -> None:
    """A put gets the pages of releases that the daemon reads for it."""
    async with opened(SMALL) as world:
        for number in (1, 2):  # the session pins its whole share: half of the tier
            await world.put(chain(number, 4))
        lease = (await world.acquire(NAMES)).lease
        other = (await world.acquire(OTHERS)).lease
        give_back(world, lease, other)
        reserved = await world.reserve(chain(3, 4))
        assert reserved.statuses[0].tolist() == [BlockStatus.RESERVED] * 4
        world.cache.abort(world.session, reserved.reservation)


async def test_a_get_finds_the_room() -> None:
    """An acquire gets the whole share that an unread release frees."""
    async with opened(SMALL) as world:
        await world.put(NAMES)
        await world.put(OTHERS)
        lease = (await world.acquire(NAMES)).lease
        give_back(world, lease)
        second = await world.acquire(OTHERS)
        assert second.served.tokens == 4 * TOKENS
        assert world.cache.core.stats().leases == 1
        world.cache.release(world.session, [second.lease])


@pytest.mark.parametrize("is_named", [False, True])
async def test_an_eviction_finds_what_was_given_back(is_named: bool) -> None:
    """An operator's eviction drops pages with an unread release; leased pages stay."""
    async with opened() as world:
        await world.put(OTHERS)
        kept = (await world.acquire(OTHERS)).lease
        await held(world, besides=1)
        named = [name.tobytes().hex() for name in (*NAMES, *OTHERS)] if is_named else []
        gone = await Operator(world.cache).evict(named, "host.0")
        assert (gone.blocks, gone.pinned) == (len(NAMES), len(OTHERS))
        world.cache.release(world.session, [kept])


async def test_a_session_that_holds_as_much_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases with unread releases do not count against a session's limit; other leases do."""
    monkeypatch.setattr(holdings, "HOLDS_LIMIT", 2)
    async with opened() as world:
        await world.put(NAMES)
        leases = [(await world.acquire(NAMES)).lease for _ in range(2)]
        for _ in range(3):
            give_back(world, leases.pop(0))
            leases.append((await world.acquire(NAMES)).lease)
            with pytest.raises(Overloaded):
                await world.acquire(NAMES)
            assert world.cache.core.stats().leases == 2
        world.cache.release(world.session, leases)
        assert not world.pins


@pytest.mark.parametrize("how", ["leave_session", "end_session"])
async def test_a_session_whose_end_is_heard_late_holds_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A goodbye that the daemon reads during a get leaves no lease and no row in the session table."""
    monkeypatch.setattr(holdings, "HOLDS_LIMIT", 1)
    async with opened() as world:
        await world.put(NAMES)
        await world.acquire(NAMES[:1])
        end = getattr(world.cache, how)
        world.cache.process_notices = lambda asker: None if asker is None else end(asker)
        with pytest.raises(SessionLost):
            await world.acquire(NAMES)
        assert not world.pins


async def test_a_get_that_is_tried_again_counts_once() -> None:
    """A get that retries after a release counts as one use of its blocks."""
    async with opened(SMALL) as world:
        both = chain(2, 4)
        await world.put(NAMES)
        blocks = (await world.put(both)).blocks
        lease = (await world.acquire(NAMES[:2])).lease
        give_back(world, lease)
        assert (await world.acquire(both)).served.tokens == 4 * TOKENS
        assert world.cache.core.describe(blocks)["hits"].tolist() == [1] * 4
