"""A compaction that fails, or that others wait for: the store's other work goes on."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.tiers.store_world import READY, World, content, die, kind_of, next_life
from tierd.errors import TierFailed
from tierd.tiers.io.files import OsFiles
from tierd.tiers.store import ledger, recovery
from tierd.tiers.store.nvme import Patience


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A store with segment 1 begun and durable blocks 1 and 2; a compaction follows its next sync."""
    made = World.at(tmp_path / "store")
    await made.open()
    await made.begin(1)
    assert await made.write([1, 2], segment=1, slots=[0, 1]) == [READY, READY]
    await made.store.sync()
    made.store._ledger._compact_at = 0
    yield made
    await made.store.close(release=False)


async def sync_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the next sync of a slot file fail."""
    real = OsFiles().sync_data

    def fail(fd: int) -> None:
        if kind_of(fd) == "seg":
            raise OSError(errno.EIO, "bad disk")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "sync_data", staticmethod(fail))
        await world.write([9], segment=1, slots=[7])
        with pytest.raises(TierFailed, match="bad disk"):
            await world.store.sync()


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), MemoryError(), OSError(errno.ENOSPC, "full")]
)
@pytest.mark.parametrize("where", [(recovery, "compact"), (ledger.Journal, "create")], ids=["fold", "journal"])
async def test_a_compaction_that_cannot_be_done_is_put_off(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str], error: Exception
) -> None:
    """The sync before a failed compaction succeeds; the compaction gives a notice and is retried.
    The store can still be repaired and closed without loss."""

    def fail(*_: object, **_named: object) -> None:
        raise error

    store = world.store
    with monkeypatch.context() as patch:
        patch.setattr(*where, fail)
        await world.write([3], segment=1, slots=[2])
        await store.sync()
        await store._ledger._compacted()
    assert any("no snapshot could be written" in notice for notice in store.notices)
    await sync_fails(world, monkeypatch)
    await store.probe()
    store._ledger._compact_at = 0
    await world.write([4], segment=1, slots=[3])
    await store.sync()
    await store._ledger._compacted()
    assert list((tmp_path / "store").glob("snapshot-*"))
    await store.close(release=False)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2, 3, 4}
    await other.store.close(release=False)


async def test_a_close_that_gives_up_cuts_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close that times out does not stop a slow compaction."""
    gate, compact = threading.Event(), recovery.compact

    def slow(*given: object, **named: object) -> int:
        assert gate.wait(10)
        return compact(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "compact", slow)
    world.store.patience = Patience(close_s=0.1)
    await world.write([3], segment=1, slots=[2])
    await world.store.sync()
    await world.store.close(release=False)
    compaction = world.store._ledger._compaction
    assert world.store.is_stuck and compaction is not None and not compaction.done()
    gate.set()
    await compaction


async def test_a_probe_that_is_cut_short_cuts_nothing_else(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe cancelled while it waits for a compaction does not stop it. The close finishes the
    repair that the probe had pending."""
    gate, compact = threading.Event(), recovery.compact

    def slow(*given: object, **named: object) -> int:
        assert gate.wait(10)
        return compact(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "compact", slow)
    await world.write([3], segment=1, slots=[2])
    await world.store.sync()
    world.store._ledger._compact_at = 1 << 30
    await sync_fails(world, monkeypatch)
    before = (tmp_path / "store" / "seg-000000.slots").stat().st_ino
    probe = asyncio.create_task(world.store.probe())
    while not world.store._ledger._flying.locked():  # noqa: ASYNC110  # a lock that is taken rings no bell
        await asyncio.sleep(0)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    closing = asyncio.create_task(world.store.close(release=False))
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert not world.store.is_stuck
    assert (tmp_path / "store" / "seg-000000.slots").stat().st_ino != before
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2, 3}
    assert await other.read([1, 2, 3]) == [content(key) for key in (1, 2, 3)]
    die(other)
