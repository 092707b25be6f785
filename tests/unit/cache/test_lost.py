"""What a store loses with a sync that failed: nobody is told that it is durable, and whoever has it still writes it again."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from tests.unit.cache.world import CONFIG, SOON_S, World, opened
from tests.unit.tiers.store_world import kind_of
from tierd.cache.operator import Flushed, Operator
from tierd.testing import chain
from tierd.tiers.io.files import OsFiles
from tierd.tiers.store.nvme import NvmeStore

BLOCKS = chain(1, 8)
MARKED = CONFIG.replace("[[host]]", "[[host]]\nhigh_watermark = 1e-5\nlow_watermark = 1e-6")
"""Everything is to be clean."""


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
    """How many blocks the books have on the store."""
    return len(world.cache.core.blocks(tier=1))


async def lose(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that nobody waits for fails."""
    with failing(monkeypatch):
        await world.cache.background.sync()


async def mend(world: World) -> str:
    """The fault is seen, and the disk tried at once. What keeps the store out of service then."""
    world.cache.health.look()
    return await world.cache.health.resume(1, timeout_s=SOON_S)


async def found_without_memory(world: World) -> int:
    """How many blocks a get gives when host memory is empty."""
    await Operator(world.cache).evict([], "host.0")
    return len((await world.acquire(BLOCKS)).served.extents)


async def test_what_was_lost_is_written_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync the blocks are in memory alone, dirty; when the store is back they are written again, and are there without memory; no page is quarantined."""
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
    """A flush after a failed sync that was mended says how many it has written, and leaves none only if all are there without memory."""
    await lose(world, monkeypatch)
    assert not await mend(world)
    flushed = await Operator(world.cache).flush(timeout_s=SOON_S)
    assert (flushed.blocks, flushed.left) == (len(BLOCKS), 0)
    assert await found_without_memory(world) == len(BLOCKS)


async def test_a_flush_before_anybody_looked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush right after a failed sync, of which no watch has heard, leaves all that was lost."""
    await lose(world, monkeypatch)
    assert await Operator(world.cache).flush(timeout_s=SOON_S) == Flushed(0, 0, left=len(BLOCKS))


async def test_a_flush_whose_own_sync_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a flush found written, and its sync has lost, it leaves."""
    with failing(monkeypatch):
        assert await Operator(world.cache).flush(timeout_s=SOON_S) == Flushed(0, 0, left=len(BLOCKS))


async def test_a_flush_during_which_another_sync_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are lost between a flush's first look and its last sync, which goes well because the store was mended meanwhile, are left."""
    persistence, sync = world.cache.persistence, world.cache.persistence.sync

    async def late(**given: object) -> int:
        await lose(world, monkeypatch)
        assert not await mend(world)
        return await sync(**given)  # type: ignore[arg-type]

    monkeypatch.setattr(persistence, "sync", late)
    assert await Operator(world.cache).flush(timeout_s=SOON_S) == Flushed(0, 0, left=len(BLOCKS))


async def test_a_page_of_after_the_sync_is_not_durable_by_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is lost while a durable put's sync waits its turn, and is written again to another page before that put looks, is not durable by that sync."""
    ids, cache, real = world.cache.core.blocks(tier=1), world.cache, NvmeStore.sync

    async def sync(store: NvmeStore) -> None:
        await real(
            store
        )  # it is over; until its caller hears of it the store fails, is mended, and gets the blocks anew
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
    """Blocks that an operator or a reader holds are written again like others, before they are said to be durable."""
    ids = world.cache.core.blocks(tier=1)
    world.cache.core.pin_blocks(ids)
    lease = await world.acquire(BLOCKS)
    await lose(world, monkeypatch)
    assert not (await world.cache.persistence.persist(ids, timeout_s=SOON_S)).any()
    assert not await mend(world)
    assert (await world.cache.persistence.persist(ids, timeout_s=SOON_S)).all()
    world.cache.release(world.session, [lease.lease])


async def test_a_second_sync_fails_while_the_first_is_mended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the probe's own files fail too it is told at the next look, and when one succeeds all is written again."""
    with failing(monkeypatch, times=2):  # the second is that of the new slot file
        await world.cache.background.sync()
        assert "no new file" in await mend(world)
    assert stored(world) == 0
    assert not await mend(world)
    assert (await Operator(world.cache).flush(timeout_s=SOON_S)).left == 0
    assert await found_without_memory(world) == len(BLOCKS)


async def test_what_no_new_file_could_take_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A durable block that cannot be read when its file gives way is in memory alone as soon as the store is back, and is written again."""
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
    """A get that asks for lost blocks before anybody looked is a miss; nothing is corrupt, and no page is bad."""
    await Operator(world.cache).evict([], "host.0")
    await lose(world, monkeypatch)
    assert (await world.acquire(BLOCKS)).served.tokens == 0
    assert world.cache.flights.corrupt[1] == 0
    world.cache.health.look()
    assert len(world.cache.core.quarantined(1)) == 0
    assert not await mend(world)
