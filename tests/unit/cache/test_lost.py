"""Blocks that a store loses in a failed sync: the daemon never reports them durable, and rewrites
them."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from tests.unit.cache.world import CONFIG, SOON_S, World, opened
from tests.unit.tiers.store_world import kind_of
from tierd._proto import admin_pb2 as pb
from tierd.cache.operator import Flushed, Operator
from tierd.decisions.causes import Cause
from tierd.server.operators.explaining import Explaining
from tierd.testing import chain
from tierd.tiers.io.files import OsFiles
from tierd.tiers.store.nvme import NvmeStore

BLOCKS = chain(1, 8)
MARKED = CONFIG.replace("[[host]]", "[[host]]\nhigh_watermark = 1e-5\nlow_watermark = 1e-6")
"""Watermarks under which every block is due for demotion."""


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, *, times: int = 1) -> Iterator[None]:
    """The next syncs of slot files fail."""
    real, left = OsFiles().sync_data, [None] * times

    def sync_data(fd: int) -> None:
        if left and kind_of(fd) == "seg":
            left.pop()
            raise OSError(errno.EIO, "bad disk")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "sync_data", staticmethod(sync_data))
        yield


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Eight blocks in host memory, written ahead to a store and not synced."""
    async with opened(MARKED) as made:
        await made.put(BLOCKS)
        assert await made.cache.background.quiesce(timeout_s=SOON_S) == len(BLOCKS)
        assert stored(made) == len(BLOCKS)
        yield made


def stored(world: World) -> int:
    """The number of blocks that the books have on the store."""
    return len(world.cache.core.blocks(tier=1))


async def lose(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A background sync fails."""
    with failing(monkeypatch):
        await world.cache.background.sync()


async def mend(world: World) -> str:
    """The health check sees the fault and probes the disk. Returns the reason that still keeps it shut."""
    world.cache.health.look()
    return await world.cache.health.resume(1, timeout_s=SOON_S)


async def found_without_memory(world: World) -> int:
    """The number of blocks that a get hits when host memory is empty."""
    await Operator(world.cache).evict([], "host.0")
    return len((await world.acquire(BLOCKS)).served.extents)


async def test_what_was_lost_is_written_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync the blocks are dirty in memory, and are rewritten when the store is back."""
    await lose(world, monkeypatch)
    world.cache.health.look()
    assert stored(world) == 0
    world.cache.background._wake.clear()
    assert not await mend(world)
    assert world.cache.background._wake.is_set()
    assert await world.cache.background.quiesce(timeout_s=SOON_S) == len(BLOCKS)
    assert await found_without_memory(world) == len(BLOCKS)
    assert len(world.cache.core.quarantined(1)) == 0
    assert world.cache.health.breakers[1].opened == 1


async def test_a_flush_writes_what_was_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush after a mended sync reports the blocks it rewrote, and leaves none unwritten."""
    await lose(world, monkeypatch)
    assert not await mend(world)
    flushed = await Operator(world.cache).flush(timeout_s=SOON_S)
    assert (flushed.blocks, flushed.left) == (len(BLOCKS), 0)
    assert await found_without_memory(world) == len(BLOCKS)


async def test_a_flush_before_anybody_looked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush right after a failed sync, before any health check, reports all lost blocks as left."""
    await lose(world, monkeypatch)
    assert await Operator(world.cache).flush(timeout_s=SOON_S) == Flushed(0, 0, left=len(BLOCKS))


async def test_a_flush_whose_own_sync_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush reports the blocks that its own sync loses as left."""
    with failing(monkeypatch):
        assert await Operator(world.cache).flush(timeout_s=SOON_S) == Flushed(0, 0, left=len(BLOCKS))


async def test_a_flush_during_which_another_sync_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush reports blocks as left if another sync loses them before its own sync succeeds."""
    persistence, sync = world.cache.persistence, world.cache.persistence.sync

    async def late(**given: object) -> int:
        await lose(world, monkeypatch)
        assert not await mend(world)
        return await sync(**given)  # type: ignore[arg-type]

    monkeypatch.setattr(persistence, "sync", late)
    assert await Operator(world.cache).flush(timeout_s=SOON_S) == Flushed(0, 0, left=len(BLOCKS))


async def test_a_page_of_after_the_sync_is_not_durable_by_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is lost and rewritten during a durable put's sync is not durable by that sync."""
    ids, cache, real = world.cache.core.blocks(tier=1), world.cache, NvmeStore.sync

    async def sync(store: NvmeStore) -> None:
        await real(store)  # the sync is done; before its caller resumes, the store fails, recovers and gets new pages
        monkeypatch.undo()
        rows = cache.core.extents(ids, tier=1)
        store._segments[int(rows["segment"][0])].generations[rows["slot"]] = 0
        store._lost.append(rows)
        cache.health.look()
        await cache.background.quiesce(timeout_s=SOON_S)

    monkeypatch.setattr(NvmeStore, "sync", sync)
    assert not (await cache.persistence.persist(ids, timeout_s=SOON_S)).any()
    assert stored(world) == len(BLOCKS)


async def test_pinned_blocks_are_lost_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned and leased blocks are rewritten too before they count as durable."""
    ids = world.cache.core.blocks(tier=1)
    world.cache.core.pin_blocks(ids)
    lease = await world.acquire(BLOCKS)
    await lose(world, monkeypatch)
    assert not (await world.cache.persistence.persist(ids, timeout_s=SOON_S)).any()
    assert not await mend(world)
    assert (await world.cache.persistence.persist(ids, timeout_s=SOON_S)).all()
    world.cache.release(world.session, [lease.lease])


async def test_a_second_sync_fails_while_the_first_is_mended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the probe's own files fail too, the next probe recovers, and all blocks are rewritten."""
    with failing(monkeypatch, times=2):  # the second sync is that of the new slot file
        await world.cache.background.sync()
        assert "no new file" in await mend(world)
    assert stored(world) == 0
    assert not await mend(world)
    assert (await Operator(world.cache).flush(timeout_s=SOON_S)).left == 0
    assert await found_without_memory(world) == len(BLOCKS)


async def test_what_no_new_file_could_take_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A durable block that cannot be read for its new file is rewritten from memory after recovery."""
    assert (await Operator(world.cache).flush(timeout_s=SOON_S)).left == 0
    await world.put(chain(2, 1))
    assert await world.cache.background.quiesce(timeout_s=SOON_S) == 1
    await lose(world, monkeypatch)
    real, bad = (
        OsFiles().preadv,
        2 * int(world.cache.core.extents(world.cache.core.blocks(tier=1), tier=1)["offset"][1]),
    )

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if kind_of(fd) == "seg" and offset == bad:
            raise OSError(errno.EIO, "bad sector")
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "preadv", staticmethod(preadv))
        for _ in range(3):
            assert "bad sector" in await mend(world)
        assert not await mend(world)
    assert stored(world) == len(BLOCKS) - 1
    assert (await Operator(world.cache).flush(timeout_s=SOON_S)).left == 0
    assert await found_without_memory(world) == len(BLOCKS)


async def test_reads_of_what_was_lost_count_for_no_fault(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A get of lost blocks before any health check is a miss, and no page counts as corrupt."""
    await Operator(world.cache).evict([], "host.0")
    await lose(world, monkeypatch)
    assert (await world.acquire(BLOCKS)).served.tokens == 0
    assert world.cache.flights.corrupt[1] == 0
    world.cache.health.look()
    assert len(world.cache.core.quarantined(1)) == 0
    assert not await mend(world)


async def test_the_loss_explains_later_misses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last copies went with a failed sync, a get's miss has that cause."""
    await Operator(world.cache).evict([], "host.0")
    await lose(world, monkeypatch)
    await mend(world)
    assert not (await world.acquire(BLOCKS)).served.tokens
    await asyncio.sleep(0)  # a get is recorded after its answer
    (row,) = (await Explaining(world.cache).reply(pb.ExplainRequest(last=1))).requests
    assert (row.cause.cause, row.cause.tier, row.cause.hash) == (Cause.STORE_FAILED, "nvme.0", BLOCKS[0].tobytes())
