"""Commits before their pages are written, and commits with the writer's sums."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.unit.cache.committed import NAMES, Counted, Late, named, sums_of
from tests.unit.cache.world import BLOCK_BYTES, CONFIG, TOKENS, World, opened
from tierd import failpoint
from tierd.core.formats.model import BlockStatus, TierKind
from tierd.core.plan import Reserved
from tierd.errors import InvalidArgument
from tierd.testing import chain, content_of

READY = [BlockStatus.READY] * 4


async def unwritten(world: World, names: np.ndarray = NAMES) -> Reserved:
    """Reserved pages without content."""
    return await world.cache.reserve(world.session, [world.put_query(names)], kind=TierKind.HOST)


def write(world: World, reserved: Reserved) -> None:
    """Writes the right bytes into the pages."""
    for extent, name in zip(reserved.extents[0], NAMES, strict=True):
        world.page(extent)[:] = content_of(name, BLOCK_BYTES).tobytes()


@pytest.mark.parametrize("sums", [b"", sums_of(NAMES)], ids=["summed by the daemon", "summed by the writer"])
async def test_a_commit_may_come_before_its_pages_are_written(sums: bytes) -> None:
    """A commit publishes only after its writer reports the bytes. The daemon sums pages without sums."""
    async with opened() as world:
        counted, reserved = Counted(world), await unwritten(world)
        late = await Late(world, reserved.reservation).begun()
        assert not (await world.acquire(NAMES)).served.tokens
        write(world, reserved)
        assert (await late.end(sums)).statuses.tolist() == READY
        assert counted.pages == (0 if sums else 4)
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


async def test_a_writers_sums_are_the_blocks() -> None:
    """A commit with sums publishes the same digests as the daemon's own, and reads no byte."""
    async with opened() as world:
        digests = []
        for names, sums in ((NAMES, sums_of(NAMES)), (chain(2, 4), b"")):
            counted, reserved = Counted(world), await unwritten(world, names)
            write(world, reserved)
            committed = await world.commit(reserved.reservation, sums=sums)
            assert (committed.statuses.tolist(), counted.pages) == (READY, 0 if sums else 4)
            digests.append(world.cache.core.metas(committed.blocks)["digest"].tolist())
        assert digests[0] == digests[1]


async def test_a_writer_that_lies_has_misses() -> None:
    """A block whose bytes do not match the writer's sums is a miss, and so are its descendants."""
    async with opened() as world:
        reserved = await world.reserve(NAMES)
        world.page(reserved.extents[0][2])[5] ^= 1
        assert (await world.commit(reserved.reservation, sums=sums_of(NAMES))).statuses.tolist() == READY
        assert (await world.acquire(NAMES)).served.tokens == 2 * TOKENS


@pytest.mark.parametrize("sums", [sums_of(NAMES[:3]), sums_of(NAMES) + b"\0" * 8, b"\0" * 31])
@pytest.mark.parametrize("is_late", [True, False])
async def test_sums_of_another_length_are_refused(sums: bytes, is_late: bool) -> None:
    """Sums of a wrong length are InvalidArgument, and the writer may commit its pages again."""
    async with opened() as world:
        reserved = await world.reserve(NAMES)
        with pytest.raises(InvalidArgument, match=f"{len(sums)} bytes, but the 4 blocks have 4 slices"):
            await (
                (await Late(world, reserved.reservation).begun()).end(sums)
                if is_late
                else world.commit(reserved.reservation, sums=sums)
            )
        assert (await world.commit(reserved.reservation)).statuses.tolist() == READY


async def test_sums_of_parts() -> None:
    """The sums of a partial commit are those of its blocks alone."""
    async with opened() as world:
        reserved = await world.reserve(NAMES)
        first = await world.commit(reserved.reservation, named(2), sums=sums_of(NAMES[:2]), keep_open=True)
        rest = await world.commit(reserved.reservation, named(4)[2:], sums=sums_of(NAMES[2:]))
        assert [*first.statuses, *rest.statuses] == READY
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


async def test_pages_of_a_commit_that_was_given_up_stay_their_writers() -> None:
    """After a cancelled commit the pages stay their writer's, who may still write and commit them."""
    async with opened(CONFIG.replace('capacity = "4 MiB"', 'capacity = "1 MiB"')) as world:
        reserved = await unwritten(world)
        late = await Late(world, reserved.reservation).begun()
        late.commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late.commit
        others = await world.reserve(chain(2, 120))
        theirs = others.extents[0][others.statuses[0] == BlockStatus.RESERVED]
        mine = {(int(e["segment"]), int(e["offset"])) for e in reserved.extents[0]}
        assert not mine & {(int(e["segment"]), int(e["offset"])) for e in theirs}
        write(world, reserved)
        assert (await world.commit(reserved.reservation)).statuses.tolist() == READY
        assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS


@pytest.mark.parametrize("end", ["abort", "session"])
async def test_a_reservation_that_ends_under_a_commit_that_waits(end: str) -> None:
    """An abort or a session's end during a waiting commit leaves no page reserved."""
    async with opened() as world:
        reserved = await unwritten(world)
        late = await Late(world, reserved.reservation).begun()
        if end == "abort":
            world.cache.abort(world.session, reserved.reservation)
        else:
            world.cache.end_session(world.session)
        late.commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late.commit
        assert (world.pins, world.cache.core.tier_stats()[0].pages_reserved) == (0, 0)
        world.cache.core.check()


@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 4), slice(0, 4)])
async def test_a_block_that_another_session_commits_meanwhile(rows: slice) -> None:
    """A waiting commit answers EXISTS for a block that another session commits first, with that one's
    page."""
    async with opened() as world:
        mine, late = world.session, Late(world, (await world.reserve(NAMES)).reservation)
        await late.begun()
        world.cache.open_session(12, tenant=world.cache.tenant_of(mine))
        world.session = 12
        first = await world.put(NAMES[rows])
        world.session = mine
        committed = await late.end(sums_of(NAMES))
        assert committed.statuses[rows].tolist() == [BlockStatus.EXISTS] * len(first.statuses)
        assert committed.extents["generation"][rows].tolist() == first.extents["generation"].tolist()
        assert np.count_nonzero(committed.statuses == BlockStatus.READY) == 4 - len(first.statuses)
        world.cache.core.check()


async def test_an_epoch_that_ends_under_a_commit_that_waits() -> None:
    """A waiting commit of an ended epoch is FAILED, and publishes nothing."""
    async with opened() as world:
        late = await Late(world, (await world.reserve(NAMES)).reservation).begun()
        await world.end_epoch()
        assert (await late.end(sums_of(NAMES))).statuses.tolist() == [BlockStatus.FAILED] * 4
        assert not world.cache.core.stats().blocks
        world.cache.core.check()


@pytest.mark.parametrize("lease", [False, True])
async def test_blocks_whose_entries_cannot_be_written(*, lease: bool) -> None:
    """The commit raises, a get misses its blocks, and no page stays busy or pinned."""
    async with opened() as world:
        reserved = await world.reserve(NAMES)
        failpoint.arm("arena.publish.before_seal", "error:EIO@1x1")
        try:
            with pytest.raises(OSError, match="Input/output error"):
                await world.commit(reserved.reservation, lease=lease)
        finally:
            failpoint.disarm()
        stats = world.cache.core.tier_stats()[0]
        assert (stats.pages_reserved, world.pins) == (0, 0)
        assert (await world.acquire(NAMES)).served.tokens == 0
        world.cache.core.check()
