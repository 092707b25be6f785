"""Hashes made ahead of a commit: taken where they fit, made anew where not, and never the reason that a wrong byte is served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter

import numpy as np
import pytest

from tests.maps import maps_of
from tests.still import stand_still
from tests.unit.cache.hashed import (
    NAMES,
    Board,
    Counted,
    hashing,
    named,
    ready,
    waiting,
)
from tests.unit.cache.world import BLOCK_BYTES, CONFIG, SOON_S, TOKENS, opened
from tierd.cache.ahead import FOLLOWED_LIMIT, SESSION_LIMIT
from tierd.cache.boards import board_of
from tierd.core.block import NamespaceSpec
from tierd.core.model import PUT_BLOCK, ROOT, BlockStatus, TierKind
from tierd.core.plan import PutQuery
from tierd.errors import NotFound, Unavailable
from tierd.hashing.wire import ask
from tierd.testing import chain, content_of

OF_NO_PAGE = ask(0, b"")


async def test_a_commit_whose_reservation_ends_leaves_nothing() -> None:
    """An abort, and the end of the session, end the commits that wait for them; the process has no page of theirs left."""
    async with hashing() as world:
        cache, process = world.cache, world.cache.parts.mover.hashing
        reserved = [await world.reserve(NAMES), await world.reserve(chain(2, 4))]
        board = Board(world)
        commits = [await waiting(world, each.reservation, word=board.word) for each in reserved]
        assert (len(cache.ahead._jobs), len(process._asked)) == (2, 2)
        cache.abort(world.session, reserved[0].reservation)
        with pytest.raises(NotFound):
            await commits[0]
        assert (len(cache.ahead._jobs), len(process._asked)) == (1, 1)
        with pytest.raises(NotFound):
            cache.ahead.note(world.session, reserved[0].reservation, end=4)
        cache.stop_session(world.session)  # its process may live on, and nobody can say any more that it has written
        with pytest.raises(NotFound):
            await commits[1]
        assert not cache.ahead._jobs
        assert not process._asked
        assert not cache.ahead._behind
        assert board_of(world.session) not in cache.ahead.boards


async def test_no_more_commits_are_followed_than_the_limit() -> None:
    """One session has a part of them, all together no more than the limit; the others hash by themselves."""
    async with hashing(CONFIG.replace('capacity = "4 MiB"', 'capacity = "12 MiB"')) as world:
        tenant = world.cache.tenant_of(world.session)
        counted, held = Counted(world), []
        for session in range(901, 901 + FOLLOWED_LIMIT // SESSION_LIMIT + 1):
            world.cache.open_session(session, tenant=tenant)
            world.session = session
            mine = [await world.reserve(chain(100 * session + number, 1)) for number in range(SESSION_LIMIT + 2)]
            held += [(session, each.reservation, await waiting(world, each.reservation)) for each in mine]
            followed = Counter(job.session for job in world.cache.ahead._jobs.values())
            assert followed[session] == min(SESSION_LIMIT, FOLLOWED_LIMIT - sum(followed.values()) + followed[session])
        assert len(world.cache.ahead._jobs) == FOLLOWED_LIMIT
        for session, reservation, commit in held:
            world.cache.ahead.note(session, reservation, end=1)
            assert (await commit).statuses.tolist() == [BlockStatus.READY]
        assert counted.pages == len(held) - FOLLOWED_LIMIT


async def test_no_more_is_asked_for_than_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one commit, and of all, the process has so much before it at one time; the commits have all sums nevertheless."""
    monkeypatch.setattr("tierd.cache.ahead.BEHIND_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr("tierd.cache.ahead.BEHIND_LIMIT_BYTES", 8 * BLOCK_BYTES)
    async with hashing() as world:
        ahead, counted, process = world.cache.ahead, Counted(world), world.cache.parts.mover.hashing
        stand_still(process.pid)
        commits = []
        for seed, asked in ((1, 2), (2, 4), (3, 4)):
            reserved = await world.reserve(chain(seed, 4))
            commits.append(await waiting(world, reserved.reservation))
            ahead.note(world.session, reserved.reservation, end=4)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert sum(each.left for each in process._asked.values()) == asked
        os.kill(process.pid, signal.SIGCONT)
        for commit in commits:
            assert (await commit).statuses.tolist() == [BlockStatus.READY] * 4
        assert counted.pages == 4
        for seed in (1, 2, 3):
            assert (await world.acquire(chain(seed, 4))).served.tokens == 4 * TOKENS
        assert not ahead._behind


@pytest.mark.parametrize("how", ["dies", "hangs", "is behind"])
async def test_hashing_that_fails_is_done_by_the_commit(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends before its time, says nothing, or takes no more costs time and no block, and another takes its place."""
    monkeypatch.setattr("tierd.hashing.process.PATIENCE_S", 0.2)
    monkeypatch.setattr("tierd.hashing.process.PAUSE_S", 0.01)
    async with hashing() as world:
        reserved, process = await world.reserve(NAMES), world.cache.parts.mover.hashing
        process._pause_s, counted, first = 0.01, Counted(world), process.pid
        stand_still(first)
        with contextlib.ExitStack() as ends:
            if how == "is behind":
                ends.callback(os.kill, first, signal.SIGCONT)
                while process._send(OF_NO_PAGE):
                    pass
            commit = await waiting(world, reserved.reservation)
            world.cache.ahead.note(world.session, reserved.reservation, end=4)
            if how == "dies":
                os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(SOON_S):
                committed = await commit
            assert counted.pages == 4
        assert committed.statuses.tolist() == [BlockStatus.READY] * 4
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
        assert not process._asked
        await ready(world)
        assert (process.pid == first) == (how == "is behind")
        async with asyncio.timeout(SOON_S):
            while not process._send(OF_NO_PAGE):  # noqa: ASYNC110  # it rings no bell
                await asyncio.sleep(0.001)
        again, counted.pages = await world.reserve(chain(2, 4)), 0
        world.cache.ahead.note(world.session, again.reservation, end=4)
        assert (await world.commit(again.reservation, unwritten=True)).statuses.tolist() == [BlockStatus.READY] * 4
        assert counted.pages == 0


async def test_memory_that_has_ended_is_let_go_of() -> None:
    """The hash process maps a segment while it lives, for reading alone, and no longer."""
    async with hashing(CONFIG.replace('capacity = "4 MiB"', 'capacity = "1 MiB"')) as world:

        def mapped() -> list[str]:
            lines = maps_of(world.cache.parts.mover.hashing.pid)
            return [line.split()[1] for line in lines if "/dev/shm/tierd-test-" in line]

        reserved = await world.reserve(NAMES)
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        await world.commit(reserved.reservation, unwritten=True)
        assert mapped() == ["r--s"]
        spec = NamespaceSpec(model="other", tokens_per_block=TOKENS, block_bytes=2 * BLOCK_BYTES)
        world.namespace = world.cache.open_namespace(world.session, spec)
        blocks = np.zeros(1, PUT_BLOCK)
        blocks["hash"], blocks["tokens"], blocks["length"] = NAMES[:1], TOKENS, 2 * BLOCK_BYTES
        query = PutQuery(namespace=world.namespace.id, parent=ROOT, position=0, blocks=blocks)
        assert (await world.cache.reserve(world.session, [query], kind=TierKind.HOST)).reservation
        async with asyncio.timeout(SOON_S):
            while mapped():  # noqa: ASYNC110  # it does not answer
                await asyncio.sleep(0.001)


async def test_nothing_is_left_of_the_process() -> None:
    """With its daemon the hash process ends, and its descriptors are closed."""
    before = len(os.listdir("/proc/self/fd"))
    async with hashing() as world:
        pid = world.cache.parts.mover.hashing.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_ready", [True, False], ids=["by the process", "by threads"])
async def test_a_commit_may_come_before_its_pages_are_written(is_ready: bool) -> None:
    """It publishes nothing before all of them are said to be written, and then what they hold; they are hashed by the process where there is one."""
    async with opened() as world:
        if is_ready:
            await ready(world)
        else:
            await world.cache.parts.mover.hashing.stop()
        counted = Counted(world)
        reserved = await world.cache.reserve(world.session, [world.put_query(NAMES)], kind=TierKind.HOST)
        commit = await waiting(world, reserved.reservation)
        for end, (extent, name) in enumerate(zip(reserved.extents[0], NAMES, strict=True), 1):
            assert not (await world.acquire(NAMES)).served.tokens
            world.page(extent)[:] = content_of(name, BLOCK_BYTES).tobytes()
            world.cache.ahead.note(world.session, reserved.reservation, end=end)
        async with asyncio.timeout(SOON_S):
            assert (await commit).statuses.tolist() == [BlockStatus.READY] * 4
        assert counted.pages == (0 if is_ready else 4)
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
        assert not world.cache.ahead._jobs
        assert not world.cache.ahead._awaited


async def test_what_was_said_before_the_commit_came_counts() -> None:
    """A commit whose pages were all said to be written waits for nothing; what comes in parts waits for its own part, each."""
    async with hashing() as world:
        reserved = await world.reserve(NAMES)
        world.cache.ahead.note(world.session, reserved.reservation, end=2)
        last = await waiting(world, reserved.reservation, named(4)[3:])
        third = asyncio.ensure_future(world.commit(reserved.reservation, named(4)[2:3], unwritten=True, keep_open=True))
        first = await world.commit(reserved.reservation, named(2), unwritten=True, keep_open=True)
        assert first.statuses.tolist() == [BlockStatus.READY] * 2
        world.cache.ahead.note(world.session, reserved.reservation, end=3)
        async with asyncio.timeout(SOON_S):
            assert (await third).statuses.tolist() == [BlockStatus.READY]
        assert not last.done()
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        async with asyncio.timeout(SOON_S):
            assert (await last).statuses.tolist() == [BlockStatus.READY]
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


async def test_pages_of_a_commit_that_was_given_up_stay_their_writers() -> None:
    """Its client may still write to them: nobody else gets them, and he may commit them later, or give them back."""
    async with hashing(CONFIG.replace('capacity = "4 MiB"', 'capacity = "1 MiB"')) as world:
        reserved = await world.cache.reserve(world.session, [world.put_query(NAMES)], kind=TierKind.HOST)
        commit = await waiting(world, reserved.reservation)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        others = await world.reserve(chain(2, 120))
        theirs = others.extents[0][others.statuses[0] == BlockStatus.RESERVED]
        mine = {(int(e["segment"]), int(e["offset"])) for e in reserved.extents[0]}
        assert not mine & {(int(e["segment"]), int(e["offset"])) for e in theirs}
        for extent, name in zip(reserved.extents[0], NAMES, strict=True):
            world.page(extent)[:] = content_of(name, BLOCK_BYTES).tobytes()
        assert (await world.commit(reserved.reservation)).statuses.tolist() == [BlockStatus.READY] * 4
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


@pytest.mark.parametrize("end", ["abort", "session"])
async def test_a_reservation_that_ends_under_a_commit_that_waits(end: str) -> None:
    """The commit ends with NotFound at once, and its pages are free."""
    async with hashing() as world:
        reserved = await world.cache.reserve(world.session, [world.put_query(NAMES)], kind=TierKind.HOST)
        commit = await waiting(world, reserved.reservation)
        if end == "abort":
            world.cache.abort(world.session, reserved.reservation)
        else:
            world.cache.stop_session(world.session)
            world.cache.end_session(world.session)
        async with asyncio.timeout(SOON_S):
            with pytest.raises(NotFound):
                await commit
        assert world.pins == 0
        assert not world.cache.ahead._awaited


async def test_what_is_reserved_ahead_stands_back_for_commits() -> None:
    """Pages for puts that may come are looked for when the session's commits have ended, and not for ever after: for others that begin meanwhile nobody waits."""
    async with hashing() as world:
        reserved, later = await world.reserve(NAMES), await world.reserve(chain(2, 4))
        commit = await waiting(world, reserved.reservation)
        group = world.put_query(np.zeros((2, 32), np.uint8))
        ahead = asyncio.ensure_future(world.cache.reserve_ahead(world.session, group, puts=1, kind=TierKind.HOST))
        await asyncio.sleep(0)
        last = await waiting(world, later.reservation)
        assert not ahead.done()
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        async with asyncio.timeout(SOON_S):
            await commit
            assert len((await ahead).reservations) == 1
        assert not last.done()
        last.cancel()


async def test_the_last_block_is_waited_for() -> None:
    """A commit whose last block is not said to be written is not made, nor begun."""
    async with hashing() as world:
        reserved = await world.reserve(NAMES)
        commit = await waiting(world, reserved.reservation)
        world.cache.ahead.note(world.session, reserved.reservation, end=3)
        assert world.cache.ahead._awaited
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        async with asyncio.timeout(SOON_S):
            assert (await commit).statuses.tolist() == [BlockStatus.READY] * 4


async def test_nothing_is_left_of_a_commit_that_was_given_up() -> None:
    """Given up, then made in a commit that leaves the reservation open: it has ended with its last block, and nobody waits for it."""
    async with hashing() as world:
        reserved = await world.reserve(NAMES)
        commit = await waiting(world, reserved.reservation)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        done = await world.commit(reserved.reservation, named(4), keep_open=True)
        assert done.statuses.tolist() == [BlockStatus.READY] * 4
        assert not world.cache.core.stats().reservations
        assert not world.cache.ahead._awaited
        assert not world.cache._under_way._ends


async def test_a_daemon_that_ends_waits_for_no_writer() -> None:
    """A commit whose pages are not written is refused when the daemon ends, and one that comes then is too; their pages stay their writer's."""
    async with hashing() as world:
        reserved = await world.cache.reserve(world.session, [world.put_query(NAMES)], kind=TierKind.HOST)
        commit = await waiting(world, reserved.reservation)
        world.cache.ahead.end(after_s=0.0)
        async with asyncio.timeout(SOON_S):
            with pytest.raises(Unavailable):
                await commit
            with pytest.raises(Unavailable):
                await world.commit(reserved.reservation, unwritten=True)
        assert world.cache.core.tier_stats()[0].pages_reserved == 4
