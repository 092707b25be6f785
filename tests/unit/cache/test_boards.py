"""Boards: what a client says there of its puts has them hashed and committed, costs nobody else anything, and can be taken away by nobody."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.unit.cache.hashed import (
    NAMES,
    Board,
    Counted,
    another_put,
    digests,
    hashing,
    made,
    named,
    sums_made,
    waiting,
)
from tests.unit.cache.world import BLOCK_BYTES, SOON_S, TOKENS
from tierd.cache.boards import Boards, board_of
from tierd.core.model import BlockStatus, TierKind
from tierd.errors import NotFound
from tierd.testing import chain, content_of


async def test_a_commit_takes_what_was_hashed_while_it_was_written() -> None:
    """Pages are hashed by the process as soon as the board says that they are written; when all are the commit has its sums, which are those of the bytes, and goes on."""
    async with hashing() as world:
        whole = digests(world, await world.put(NAMES))
        world.cache.flights.start(
            world.cache.core.evict(world.cache.core.blocks(), tier=None, now=world.cache.clock.now())
        )
        counted, board = Counted(world), Board(world)
        reserved = await world.reserve(NAMES)
        commit = await waiting(world, reserved.reservation, word=board.word)
        for end in (1, 3):
            board.note(reserved.reservation, end)
            await another_put(world, seed=10 + end)
            assert not sums_made(world)  # of one message, at its end
            assert not commit.done()
        board.note(reserved.reservation, 4)
        async with asyncio.timeout(SOON_S):
            committed = await commit
        assert committed.is_followed
        assert committed.statuses.tolist() == [BlockStatus.READY] * 4
        assert counted.pages == 0
        assert digests(world, committed) == whole
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
        assert not world.cache.ahead._jobs


@pytest.mark.parametrize("says", ["all", "some", "of another", "of more", "of many"])
async def test_what_is_written_when_its_commit_comes_is_hashed_at_once(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """A commit whose board says already that all of it is written does not wait for the hash process, if it is little; one whose board says less, or speaks of another put, waits."""
    async with hashing() as world:
        whole = digests(world, await world.put(NAMES))
        world.cache.flights.start(
            world.cache.core.evict(world.cache.core.blocks(), tier=None, now=world.cache.clock.now())
        )
        if says == "of more":
            monkeypatch.setattr("tierd.cache.ahead.AT_ONCE_BYTES", 4 * BLOCK_BYTES - 1)
        if says == "of many":
            monkeypatch.setattr("tierd.cache.ahead.AT_ONCE_BLOCKS", 3)
        counted, board = Counted(world), Board(world)
        reserved = await world.reserve(NAMES)
        board.note(reserved.reservation + (says == "of another"), 3 if says == "some" else 4)
        commit = asyncio.ensure_future(world.commit(reserved.reservation, unwritten=True, word=board.word))
        await asyncio.sleep(0)
        assert counted.pages == (4 if says == "all" else 0)
        board.note(reserved.reservation, 4)
        async with asyncio.timeout(SOON_S):
            committed = await commit
        assert (committed.statuses.tolist(), committed.is_followed) == ([BlockStatus.READY] * 4, True)
        assert digests(world, committed) == whole
        assert counted.pages == (4 if says == "all" else 0)
        assert not world.cache.ahead._jobs


async def test_what_cannot_be_hashed_at_once_is_hashed_by_the_process() -> None:
    """A commit whose bytes the daemon fails to hash when it comes is as any other."""

    def fail() -> None:
        raise MemoryError

    async with hashing() as world:
        Counted(world, meanwhile=fail)
        board, reserved = Board(world), await world.reserve(NAMES)
        board.note(reserved.reservation, 4)
        async with asyncio.timeout(SOON_S):
            committed = await world.commit(reserved.reservation, unwritten=True, word=board.word)
        assert committed.statuses.tolist() == [BlockStatus.READY] * 4


async def test_sums_are_those_of_their_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the second message is answered before the first, whose pages are written later."""
    monkeypatch.setattr("tierd.cache.ahead.BEHIND_BYTES", 3 * BLOCK_BYTES)
    async with hashing() as world:
        board, counted = Board(world), Counted(world)
        reserved = await world.reserve(NAMES)
        commit = await waiting(world, reserved.reservation, named(4)[[2, 3, 0, 1]], word=board.word)
        assert len(world.cache.parts.mover.hashing._asked) == 2
        board.note(reserved.reservation, 2)
        await made(world, 1)
        assert not commit.done()
        board.note(reserved.reservation, 4)
        async with asyncio.timeout(SOON_S):
            assert ((await commit).statuses.tolist(), counted.pages) == ([BlockStatus.READY] * 4, 0)
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


@pytest.mark.parametrize("says", ["too soon", "nothing", "of another"])
async def test_a_board_that_is_wrong_costs_no_more_than_blocks(says: str) -> None:
    """One that speaks before its pages are written has them missed later, all that come after the first bad one; one that says nothing, or speaks of another put, makes no commit and costs no block."""
    async with hashing() as world:
        board, counted = Board(world), Counted(world)
        reserved = await world.cache.reserve(world.session, [world.put_query(NAMES)], kind=TierKind.HOST)
        pages = [world.page(extent) for extent in reserved.extents[0]]
        commit = await waiting(world, reserved.reservation, word=board.word)
        for page, name in zip(pages[: 2 if says == "too soon" else 4], NAMES, strict=False):
            page[:] = content_of(name, BLOCK_BYTES).tobytes()
        if says == "too soon":
            board.note(reserved.reservation, (1 << 32) - 1)
            await commit
        if says == "of another":
            board.note(reserved.reservation + 1, 4)
        for page, name in zip(pages, NAMES, strict=True):
            page[:] = content_of(name, BLOCK_BYTES).tobytes()
        if says != "too soon":
            await another_put(world)
            assert not commit.done()
            for _ in range(2):
                world.cache.ahead.note(world.session, reserved.reservation, end=(1 << 64) - 1)
        assert ((await commit).statuses.tolist(), counted.pages) == ([BlockStatus.READY] * 4, 0)
        good = 2 if says == "too soon" else 4
        assert (await world.acquire(NAMES)).served.tokens == good * TOKENS


async def test_what_was_not_written_when_its_session_ended_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two commits of one reservation that wait side by side, where the session ends in the moment in which the first one is hashed, the second one comes to nothing."""
    async with hashing() as world:
        ahead, board, inner = world.cache.ahead, Board(world), world.cache.ahead._ring
        reserved = await world.cache.reserve(world.session, [world.put_query(NAMES)], kind=TierKind.HOST)
        for extent, name in zip(reserved.extents[0][:2], NAMES, strict=False):
            world.page(extent)[:] = content_of(name, BLOCK_BYTES).tobytes()
        number, halves = reserved.reservation, (named(4)[:2], named(4)[2:])
        first = asyncio.ensure_future(world.commit(number, halves[0], unwritten=True, word=board.word, keep_open=True))
        second = await waiting(world, number, halves[1], word=board.word)

        def ring(key: tuple[int, int]) -> None:
            monkeypatch.undo()
            inner(key)
            world.cache.stop_session(world.session)

        monkeypatch.setattr(ahead, "_ring", ring)
        board.note(number, 2)
        async with asyncio.timeout(SOON_S):
            assert (await first).statuses.tolist() == [BlockStatus.READY] * 2
            with pytest.raises(NotFound):
                await second
        assert not ahead._jobs


async def test_a_writer_that_stands_still_holds_up_nobody() -> None:
    """Its pages are not hashed, and those of who came after it are."""
    async with hashing() as world:
        counted, board = Counted(world), Board(world)
        reserved = await world.reserve(NAMES)
        commit = await waiting(world, reserved.reservation, word=board.word)
        board.note(reserved.reservation, 2)
        other = await world.reserve(chain(2, 4))
        second = await waiting(world, other.reservation)
        world.cache.ahead.note(world.session, other.reservation, end=4)
        async with asyncio.timeout(SOON_S):
            assert (await second).statuses.tolist() == [BlockStatus.READY] * 4
        assert not commit.done()
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        await commit
        assert counted.pages == 0


async def test_writers_that_stand_still_leave_others_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One session whose commits are never written does not have all that the process may be asked for: another's put is hashed by it."""
    monkeypatch.setattr("tierd.cache.ahead.BEHIND_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr("tierd.cache.ahead.BEHIND_LIMIT_BYTES", 16 * BLOCK_BYTES)
    async with hashing() as world:
        counted, word, first = Counted(world), Board(world).word, world.session
        mine = [await world.reserve(chain(seed, 4)) for seed in range(1, 5)]
        held = [await waiting(world, each.reservation, word=word) for each in mine]
        world.cache.open_session(901, tenant=world.cache.tenant_of(first))
        world.session = 901
        other = await world.reserve(chain(9, 4))
        world.cache.ahead.note(901, other.reservation, end=4)
        done = await world.commit(other.reservation, unwritten=True)
        assert (done.statuses.tolist(), counted.pages) == ([BlockStatus.READY] * 4, 0)
        world.cache.end_session(first)
        await asyncio.wait(held)


def test_a_board_cannot_be_taken_away() -> None:
    """Its client can make it neither shorter nor longer."""
    boards = Boards()
    descriptor, length = boards.give(7)
    for size in (0, 2 * length):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)
    boards.end(7)
    assert board_of(7) not in boards
