"""Hashes made ahead of a commit: taken where they fit, made anew where not, and never the reason that a wrong byte is served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from tests.maps import maps_of
from tests.still import stand_still
from tests.unit.cache.world import BLOCK_BYTES, CONFIG, SOON_S, TOKENS, World, opened
from tierd.cache.ahead import FOLLOWED_LIMIT, SESSION_LIMIT
from tierd.core.block import NamespaceSpec
from tierd.core.model import COMMIT_BLOCK, PUT_BLOCK, ROOT, BlockStatus, TierKind
from tierd.core.plan import PutQuery
from tierd.errors import InvalidArgument, NotFound
from tierd.hashing.wire import ask
from tierd.testing import chain, content_of

NAMES = chain(1, 4)
OF_NO_PAGE = ask(0, [])


@contextlib.asynccontextmanager
async def hashing(config: str = CONFIG) -> AsyncIterator[World]:
    """A world whose hash process is ready."""
    async with opened(config) as world:
        await ready(world)
        yield world


async def ready(world: World) -> None:
    async with asyncio.timeout(SOON_S):
        while not world.cache.parts.mover.hashing.is_ready:  # noqa: ASYNC110  # it rings no bell
            await asyncio.sleep(0.001)


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
    """Pages that were said to be written are hashed once, before the commit; what it names besides is hashed when it comes, and all digests are those of the bytes."""
    async with hashing() as world:
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
        assert counted.pages == 0
        assert digests(world, committed) == whole
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
        assert not world.cache.ahead._jobs


async def test_a_page_changed_after_it_was_said_to_be_written() -> None:
    """It is a miss, and so is what follows it: its checksum is not that of what it holds."""
    async with hashing() as world:
        reserved = await world.reserve(NAMES)
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        job = world.cache.ahead._jobs[world.session, reserved.reservation]
        async with asyncio.timeout(SOON_S):
            while job.asked:  # noqa: ASYNC110  # nobody waits for it yet
                await asyncio.sleep(0.001)
        world.page(reserved.extents[0][2])[5] ^= 1
        await world.commit(reserved.reservation)
        assert (await world.acquire(NAMES)).served.tokens == 2 * TOKENS


async def test_more_blocks_than_there_are() -> None:
    """Who says that he has written more blocks than he has, and says so again, has written all of them."""
    async with hashing() as world:
        reserved = await world.reserve(NAMES)
        for _ in range(2):
            world.cache.ahead.note(world.session, reserved.reservation, end=(1 << 64) - 1)
        counted = Counted(world)
        assert (await world.commit(reserved.reservation)).statuses.tolist() == [BlockStatus.READY] * 4
        assert counted.pages == 0


async def test_a_block_that_is_shorter_in_the_end() -> None:
    """Sums of another length are of no use: the block is hashed as it was committed."""
    async with hashing() as world:
        reserved = await world.reserve(NAMES)
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        blocks = named(4)
        blocks["length"][3], blocks["tokens"][3] = 4096, 8
        committed = await world.commit(reserved.reservation, blocks)
        assert committed.statuses.tolist() == [BlockStatus.READY] * 4
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


async def test_a_reservation_that_ends_is_forgotten() -> None:
    """An abort, and the end of the session, leave nothing behind; of what has ended nothing is hashed."""
    async with hashing() as world:
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
    async with hashing(CONFIG.replace('capacity = "4 MiB"', 'capacity = "12 MiB"')) as world:
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
    async with hashing() as world:
        reserved, ahead = await world.reserve(NAMES), world.cache.ahead

        def speak() -> None:
            ahead.note(world.session, reserved.reservation, end=4)
            assert len(ahead._jobs) == 1

        Counted(world, meanwhile=speak)
        assert (await world.commit(reserved.reservation, named(2))).statuses.tolist() == [BlockStatus.READY] * 2
        assert not ahead._jobs


async def test_a_commit_that_is_refused_says_nothing_of_its_pages() -> None:
    """What it named was not hashed: its writer may still write to it, and commits what it holds then."""
    async with hashing() as world:
        reserved = await world.cache.reserve(world.session, [world.put_query(NAMES)], kind=TierKind.HOST)
        world.cache.ahead.note(world.session, reserved.reservation, end=0)
        wrong = named(4)
        wrong["length"] = 1 << 20
        with pytest.raises(InvalidArgument):
            await world.commit(reserved.reservation, wrong)
        assert not world.cache.ahead._jobs[world.session, reserved.reservation].asked
        for extent, name in zip(reserved.extents[0], NAMES, strict=True):
            world.page(extent)[:] = content_of(name, BLOCK_BYTES).tobytes()
        assert (await world.commit(reserved.reservation)).statuses.tolist() == [BlockStatus.READY] * 4
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


async def test_a_commit_has_hashed_what_it_names() -> None:
    """By the hash process where its reservation is followed, and nothing before it that it does not name."""
    async with hashing() as world:
        reserved, process, counted = await world.reserve(NAMES), world.cache.parts.mover.hashing, Counted(world)
        world.cache.ahead.note(world.session, reserved.reservation, end=0)
        stand_still(process.pid)
        commit = asyncio.ensure_future(world.commit(reserved.reservation, named(4)[3:], keep_open=True))
        await asyncio.sleep(0)
        assert sum(asked.left for asked in process._asked.values()) == 1
        os.kill(process.pid, signal.SIGCONT)
        assert ((await commit).statuses.tolist(), counted.pages) == ([BlockStatus.READY], 0)
        await world.commit(reserved.reservation, named(3))
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


async def test_no_more_is_asked_for_than_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one reservation, and of all with those that were given up, the process has so much before it at one time; the commit has all sums nevertheless."""
    monkeypatch.setattr("tierd.cache.ahead.BEHIND_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr("tierd.cache.ahead.BEHIND_LIMIT_BYTES", 4 * BLOCK_BYTES)
    async with hashing() as world:
        ahead, counted, process = world.cache.ahead, Counted(world), world.cache.parts.mover.hashing
        stand_still(process.pid)
        first = await world.reserve(NAMES)
        ahead.note(world.session, first.reservation, end=4)
        assert sum(asked.left for asked in process._asked.values()) == 2
        given_up = await world.reserve(chain(2, 4))
        ahead.note(world.session, given_up.reservation, end=4)
        world.cache.abort(world.session, given_up.reservation)
        late = await world.reserve(chain(3, 4))
        ahead.note(world.session, late.reservation, end=4)
        assert sum(asked.left for asked in process._asked.values()) == 4
        os.kill(process.pid, signal.SIGCONT)
        for reserved, hashed in ((first, 0), (late, 4)):
            assert (await world.commit(reserved.reservation)).statuses.tolist() == [BlockStatus.READY] * 4
            assert counted.pages == hashed
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
        assert not ahead._behind_bytes


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
            world.cache.ahead.note(world.session, reserved.reservation, end=4)
            if how == "dies":
                os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(SOON_S):
                committed = await world.commit(reserved.reservation)
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
        assert (await world.commit(again.reservation)).statuses.tolist() == [BlockStatus.READY] * 4
        assert counted.pages == 0


async def test_memory_that_has_ended_is_let_go_of() -> None:
    """The hash process maps a segment while it lives, for reading alone, and no longer."""
    async with hashing(CONFIG.replace('capacity = "4 MiB"', 'capacity = "1 MiB"')) as world:

        def mapped() -> list[str]:
            lines = maps_of(world.cache.parts.mover.hashing.pid)
            return [line.split()[1] for line in lines if "/dev/shm/tierd-test-" in line]

        reserved = await world.reserve(NAMES)
        world.cache.ahead.note(world.session, reserved.reservation, end=4)
        await world.commit(reserved.reservation)
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
