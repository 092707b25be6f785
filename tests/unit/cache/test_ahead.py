"""Hashes made ahead of a commit: taken where they fit, made anew where not, and never the reason that a wrong byte is served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.cache.world import BLOCK_BYTES, CONFIG, SOON_S, TOKENS, World, opened
from tierd.cache.ahead import FOLLOWED_LIMIT, SESSION_LIMIT
from tierd.core.model import COMMIT_BLOCK, BlockStatus
from tierd.errors import NotFound
from tierd.testing import chain

NAMES = chain(1, 4)


class Counted:
    """How many pages the mover hashes for commits. meanwhile: what happens first each time."""

    def __init__(self, world: World, *, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.pages = 0
        mover, inner = world.cache.parts.mover, world.cache.parts.mover.hash_pages

        async def hash_pages(extents: np.ndarray, metas: np.ndarray) -> object:
            meanwhile()
            self.pages += len(extents)
            return await inner(extents, metas)

        mover.hash_pages = hash_pages  # type: ignore[method-assign,assignment]


def named(count: int) -> np.ndarray:
    """COMMIT_BLOCK of the first blocks."""
    blocks = np.zeros(count, COMMIT_BLOCK)
    blocks["index"], blocks["hash"], blocks["tokens"], blocks["length"] = (
        range(count),
        NAMES[:count],
        TOKENS,
        BLOCK_BYTES,
    )
    blocks["parent"][1:], blocks["position"] = NAMES[: count - 1], range(count)
    return blocks


def digests(world: World, committed: object) -> bytes:
    """Of the blocks that were committed, as the core knows them."""
    return bytes(world.cache.core.metas(committed.blocks)["digest"].tobytes())  # type: ignore[attr-defined]


async def test_a_commit_takes_what_was_hashed_ahead() -> None:
    """Pages that were said to be written are hashed once, before the commit; it hashes the others, and all digests are those of the bytes."""
    async with opened() as world:
        whole = digests(world, await world.put(NAMES))
        world.cache.flights.start(
            world.cache.core.evict(world.cache.core.blocks(), tier=None, now=world.cache.clock.now())
        )
        counted = Counted(world)
        reserved = await world.reserve(NAMES)
        for end in (1, 3, 3):
            world.cache.ahead.note(world.session, reserved.reservation, end=end)
        committed = await world.commit(reserved.reservation)
        assert committed.statuses.tolist() == [BlockStatus.READY] * 4
        assert counted.pages == 1
        assert digests(world, committed) == whole
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
        assert not world.cache.ahead._jobs


async def test_a_page_changed_after_it_was_said_to_be_written() -> None:
    """It is a miss, and so is what follows it: its checksum is not that of what it holds."""
    async with opened() as world:
        reserved = await world.reserve(NAMES)
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        job = world.cache.ahead._jobs[world.session, reserved.reservation]
        assert job.thread is not None
        await job.thread
        world.page(reserved.extents[0][2])[5] ^= 1
        await world.commit(reserved.reservation)
        assert (await world.acquire(NAMES)).served.tokens == 2 * TOKENS


async def test_more_blocks_than_there_are() -> None:
    """Who says that he has written more blocks than he has, and says so again, has written all of them."""
    async with opened() as world:
        reserved = await world.reserve(NAMES)
        for _ in range(2):
            world.cache.ahead.note(world.session, reserved.reservation, end=(1 << 64) - 1)
        counted = Counted(world)
        assert (await world.commit(reserved.reservation)).statuses.tolist() == [BlockStatus.READY] * 4
        assert counted.pages == 0


async def test_a_block_that_is_shorter_in_the_end() -> None:
    """Sums of another length are of no use: the block is hashed as it was committed."""
    async with opened() as world:
        reserved = await world.reserve(NAMES)
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        blocks = named(4)
        blocks["length"][3], blocks["tokens"][3] = 4096, 8
        committed = await world.commit(reserved.reservation, blocks)
        assert committed.statuses.tolist() == [BlockStatus.READY] * 4
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


async def test_a_reservation_that_ends_is_forgotten() -> None:
    """An abort, and the end of the session, leave nothing behind; of what has ended nothing is hashed."""
    async with opened() as world:
        cache = world.cache
        first, second = await world.reserve(NAMES), await world.reserve(chain(2, 4))
        for reserved in (first, second):
            cache.ahead.note(world.session, reserved.reservation, end=2)
        cache.abort(world.session, first.reservation)
        assert len(cache.ahead._jobs) == 1
        with pytest.raises(NotFound):
            cache.ahead.note(world.session, first.reservation, end=4)
        cache.stop_session(world.session)
        assert not cache.ahead._jobs
        cache.end_session(world.session)


async def test_no_more_reservations_are_followed_than_the_limit() -> None:
    """One session has a part of them, all together no more than the limit; whoever speaks of more has them hashed by their commits."""
    async with opened(CONFIG.replace('capacity = "4 MiB"', 'capacity = "12 MiB"')) as world:
        tenant = world.cache.tenant_of(world.session)
        counted, held = Counted(world), []
        for session in range(901, 901 + FOLLOWED_LIMIT // SESSION_LIMIT + 1):
            world.cache.open_session(session, tenant=tenant)
            world.session = session
            mine = [await world.reserve(chain(100 * session + number, 1)) for number in range(SESSION_LIMIT + 2)]
            for each in mine:
                world.cache.ahead.note(session, each.reservation, end=1)
            held.append((session, mine))
            followed = Counter(owner for owner, _ in world.cache.ahead._jobs)
            assert followed[session] == min(SESSION_LIMIT, FOLLOWED_LIMIT - SESSION_LIMIT * (len(held) - 1))
        assert len(world.cache.ahead._jobs) == FOLLOWED_LIMIT
        for world.session, mine in held:
            for each in mine:
                assert (await world.commit(each.reservation)).statuses.tolist() == [BlockStatus.READY]
        assert counted.pages == sum(len(mine) for _, mine in held) - FOLLOWED_LIMIT


async def test_what_is_said_during_the_last_commit_is_forgotten_with_it() -> None:
    """A reservation that ends with its commit leaves no job behind, also where its writer speaks while the commit is hashing."""
    async with opened() as world:
        reserved, ahead = await world.reserve(NAMES), world.cache.ahead

        def speak() -> None:
            ahead.note(world.session, reserved.reservation, end=4)
            assert len(ahead._jobs) == 1

        Counted(world, meanwhile=speak)
        assert (await world.commit(reserved.reservation, named(2))).statuses.tolist() == [BlockStatus.READY] * 2
        assert not ahead._jobs


async def test_hashing_that_fails_is_done_by_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ends before its time, or never begins, costs time and no block."""
    async with opened() as world:
        reserved = await world.reserve(NAMES)
        with monkeypatch.context() as broken:

            def refuse(*_: object) -> object:
                raise MemoryError

            broken.setattr("tierd.cache.ahead.slice_sums", refuse)
            world.cache.ahead.note(world.session, reserved.reservation, end=4)
            async with asyncio.timeout(SOON_S):
                committed = await world.commit(reserved.reservation)
        assert committed.statuses.tolist() == [BlockStatus.READY] * 4
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
