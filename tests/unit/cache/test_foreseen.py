"""Commits that are answered before the core has published them: with what it says then, and only where nothing came between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.unit.cache.committed import sums_of
from tests.unit.cache.world import SOON_S, TOKENS, World, opened
from tierd import failpoint
from tierd.cache.publication import CommitQuery
from tierd.core.model import BlockStatus, Durability, StructArray
from tierd.core.plan import Committed
from tierd.server import wire
from tierd.testing import chain

NAMES = chain(1, 4)


@dataclass
class Told:
    """What a commit's client would be told early. on_answer: what happens in that moment."""

    world: World
    replies: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    on_answer: Callable[[Committed], None] = lambda _: None

    def foresee(self, foreseen: Committed) -> Callable[[], None]:
        reply = wire.commit_reply(foreseen).SerializeToString()
        self.replies.append(reply)

        def answer() -> None:
            self.on_answer(foreseen)
            self.answers.append(reply)

        return answer

    async def commit(self, reservation: int, **options: object) -> Committed:
        query = CommitQuery(reservation, **options)  # type: ignore[arg-type]
        deadline = asyncio.get_running_loop().time() + SOON_S
        return await self.world.cache.commit(self.world.session, query, deadline=deadline, foresee=self.foresee)

    async def begun(self, names: StructArray = NAMES) -> tuple[asyncio.Event, asyncio.Future[Committed]]:
        """A commit that is prepared, and waits for its pages to be written; what says so."""
        reservation, is_written = (await self.world.reserve(names)).reservation, asyncio.Event()

        async def written() -> bytes:
            await is_written.wait()
            return sums_of(names)

        commit = asyncio.ensure_future(self.commit(reservation, written=written))
        for _ in range(8):
            await asyncio.sleep(0)
        assert not commit.done()
        return is_written, commit

    async def end(self, is_written: asyncio.Event, commit: asyncio.Future[Committed]) -> Committed:
        """All is written."""
        is_written.set()
        async with asyncio.timeout(SOON_S):
            return await commit


def is_catalogued(world: World, committed: Committed) -> bool:
    """Whether all of it would be found after a kill."""
    return all(table is not None for table in world.daemon.tiers[0].slices(committed.extents))  # type: ignore[attr-defined]


@pytest.mark.parametrize("sums", [sums_of(NAMES), b""], ids=["summed by the writer", "summed by the daemon"])
async def test_the_answer_comes_between_catalogue_and_core(sums: bytes) -> None:
    """It is said once, when all would survive a kill and before the core is at it, and it is what the commit returns."""
    async with opened() as world:
        seen: list[tuple[bool, int]] = []
        told = Told(world)
        told.on_answer = lambda it: seen.append((is_catalogued(world, it), world.cache.core.stats().blocks))
        reservation = (await world.reserve(NAMES)).reservation
        committed = await told.commit(reservation, sums=sums)
        assert told.answers == [wire.commit_reply(committed).SerializeToString()]
        assert seen == [(True, 0)]
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
        world.cache.core.check()


async def test_nothing_is_said_before_all_is_written() -> None:
    """What is prepared while the client writes is said when it has, and not at all where the commit is given up."""
    async with opened() as world:
        told = Told(world)
        is_written, commit = await told.begun()
        assert (len(told.replies), told.answers) == (1, [])
        assert (await told.end(is_written, commit)).statuses.tolist() == [BlockStatus.READY] * 4
        assert told.answers == told.replies
        _, given_up = await told.begun(chain(2, 4))
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert (len(told.replies), len(told.answers)) == (2, 1)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 4), slice(0, 4)])
async def test_a_block_that_another_session_commits_meanwhile(rows: slice) -> None:
    """It is not answered early: EXISTS, with the page of the first, which the core finds out."""
    async with opened() as world:
        told, mine = Told(world), world.session
        is_written, commit = await told.begun()
        world.cache.open_session(12, tenant=world.cache.tenant_of(mine))
        world.session = 12
        first = await world.put(NAMES[rows])
        world.session = mine
        committed = await told.end(is_written, commit)
        assert told.answers == []
        assert committed.statuses[rows].tolist() == [BlockStatus.EXISTS] * len(first.statuses)
        assert committed.extents["generation"][rows].tolist() == first.extents["generation"].tolist()
        assert np.count_nonzero(committed.statuses == BlockStatus.READY) == 4 - len(first.statuses)
        world.cache.core.check()


async def test_other_blocks_that_come_meanwhile_do_not_matter() -> None:
    """What was looked up is looked up again, and holds."""
    async with opened() as world:
        told = Told(world)
        is_written, commit = await told.begun()
        await world.put(chain(2, 4))
        assert (await told.end(is_written, commit)).statuses.tolist() == [BlockStatus.READY] * 4
        assert len(told.answers) == 1


async def test_an_epoch_that_ends_meanwhile() -> None:
    """Nothing of it is answered early, catalogued or found: FAILED."""
    async with opened() as world:
        told = Told(world)
        is_written, commit = await told.begun()
        await world.end_epoch()
        committed = await told.end(is_written, commit)
        assert committed.statuses.tolist() == [BlockStatus.FAILED] * 4
        assert told.answers == []
        assert not world.cache.core.stats().blocks
        world.cache.core.check()


async def test_a_parent_that_leaves_meanwhile() -> None:
    """A continuation is answered all the same, and is found again with its parent."""
    async with opened() as world:
        await world.put(NAMES[:1])
        told = Told(world)
        is_written, commit = await told.begun(NAMES[1:])
        cache = world.cache
        cache.flights.start(cache.core.evict(cache.core.blocks(), tier=None, now=cache.clock.now()))
        assert (await told.end(is_written, commit)).statuses.tolist() == [BlockStatus.READY] * 3
        assert len(told.answers) == 1
        await world.put(NAMES[:1])
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
        cache.core.check()


@pytest.mark.parametrize("options", [{"lease": True}, {"durability": Durability.DURABLE}])
async def test_what_has_more_to_come_is_not_answered_early(options: dict[str, object]) -> None:
    """A lease is recorded, and a store has the blocks, before the client hears of it."""
    async with opened() as world:
        told = Told(world)
        await told.commit((await world.reserve(NAMES)).reservation, **options)
        assert not told.replies


async def test_blocks_that_exist_or_come_twice_are_not_answered_early() -> None:
    """What the core alone can say it says."""
    async with opened() as world:
        told = Told(world)
        twice = (await world.reserve(NAMES[[0, 0]])).reservation
        assert sorted((await told.commit(twice)).statuses.tolist()) == [BlockStatus.READY, BlockStatus.EXISTS]
        first, second = await world.reserve(NAMES[1:]), await world.reserve(NAMES[1:])
        await told.commit(first.reservation)
        assert (await told.commit(second.reservation)).statuses.tolist() == [BlockStatus.EXISTS] * 3
        assert len(told.answers) == 1


async def test_an_entry_that_cannot_be_made_is_no_answer() -> None:
    """The commit fails, and comes to its end in the core: no page stays busy."""
    async with opened() as world:
        told = Told(world)
        failpoint.arm("arena.publish.before_seal", "error:EIO@1x1")
        try:
            with pytest.raises(OSError, match="Input/output error"):
                await told.commit((await world.reserve(NAMES)).reservation)
        finally:
            failpoint.disarm()
        assert told.answers == []
        assert world.cache.core.tier_stats()[0].pages_reserved == 0
        world.cache.core.check()
