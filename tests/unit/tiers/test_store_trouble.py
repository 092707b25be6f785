"""The NVMe store on a disk that fails, fills up or hangs: replaced files and durable blocks."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.unit.tiers.store_world import CLASS_BYTES, FAILED, READY, World, content, die, kind_of, next_life
from tierd.core.formats.model import StructArray
from tierd.errors import TierFailed
from tierd.tiers.io.files import OsFiles
from tierd.tiers.store import ledger, slots
from tierd.tiers.store.nvme import Patience

EAGER = Patience(hang_s=0.2, close_s=0.3)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A store with segment 1 begun; blocks 1 and 2 are durable in it, 3 is written but not durable."""
    made = World.at(tmp_path / "store")
    made.store.patience = EAGER
    await made.open()
    await made.begin(1)
    assert await made.write([1, 2], segment=1, slots=[0, 1]) == [READY, READY]
    await made.store.sync()
    assert await made.write([3], segment=1, slots=[2]) == [READY]
    yield made
    await made.store.close(release=False)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, call: str, *kinds: str) -> Iterator[list[str]]:
    """Makes an operation on these kinds of files (`seg`, `journal`) fail; yields the files tried."""
    tried: list[str] = []
    real = getattr(OsFiles(), call)

    def fail(fd: int, *more: object) -> object:
        if kind_of(fd) in kinds:
            found = os.fstat(fd)  # an inode number is reused, but not with the same time
            tried.append(f"{kind_of(fd)} {found.st_ino} {found.st_ctime_ns}")
            raise OSError(errno.EIO, "bad disk")
        return real(fd, *more)

    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, call, staticmethod(fail))
        yield tried


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch, call: str) -> Iterator[list[str]]:
    """The kinds of files on which the operation ran, in order."""
    kinds: list[str] = []
    real = getattr(OsFiles(), call)

    def record(fd: int, *more: object) -> object:
        kinds.append(kind_of(fd))
        return real(fd, *more)

    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, call, staticmethod(record))
        yield kinds


def held(world: World, key: int) -> bool:
    return bool(world.store.holds(world.held[key][0])[0])


@pytest.mark.parametrize("kind", ["seg", "journal"])
async def test_failed_sync_stops_writes_alone(world: World, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """After a failed sync every sync raises without a retry, writes are FAILED, durable blocks are read."""
    with failing(monkeypatch, "sync_data", kind) as tried:
        for _ in range(3):
            with pytest.raises(TierFailed, match="bad disk"):
                await world.store.sync()
    assert len(tried) == 1
    assert await world.write([4], segment=1, slots=[3]) == [FAILED]
    assert await world.read([1, 2]) == [content(1), content(2)]
    assert "bad disk" in world.store.health().fault


async def test_slot_file_gives_way(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file with only the durable blocks replaces a slot file whose sync failed; writes continue."""
    path = tmp_path / "store" / "seg-000000.slots"
    before = path.stat().st_ino
    with failing(monkeypatch, "sync_data", "seg"), pytest.raises(TierFailed):
        await world.store.sync()
    await world.store.probe()
    assert path.stat().st_ino != before
    assert [held(world, key) for key in (1, 2, 3)] == [True, True, False]
    assert await world.write([4], segment=1, slots=[3]) == [READY]
    await world.store.sync()
    assert await world.read([1, 2, 4]) == [content(key) for key in (1, 2, 4)]
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2, 4}
    assert await other.read([1, 2, 4]) == [content(key) for key in (1, 2, 4)]
    await other.store.close(release=False)


async def test_what_a_failed_sync_has_lost_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfreed blocks lost in a failed sync are reported once, and FAILED before and after the repair."""
    assert await world.write([4, 5], segment=1, slots=[3, 4]) == [READY, READY]
    world.free([5])
    with failing(monkeypatch, "sync_data", "seg"), pytest.raises(TierFailed):
        await world.store.sync()
    assert where(world.store.take_lost()) == where(np.concatenate([world.held[key][0] for key in (3, 4)]))
    assert await world.read([1, 3, 4]) == [content(1), FAILED, FAILED]
    await world.store.probe()
    assert await world.read([1, 3, 4]) == [content(1), FAILED, FAILED]
    extents, metas = (np.concatenate([world.held[key][i] for key in (1, 3)]) for i in (0, 1))
    assert (await world.store.check(extents, metas)).tolist() == [READY, FAILED]
    assert len(world.store.take_lost()) == 0


async def test_a_read_that_meets_the_new_file_is_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a lost block that reaches the replaced file is FAILED, not a wrong byte of the disk."""
    gate, entered, read_at = threading.Event(), threading.Event(), slots.read_at

    def slow(*given: object) -> int:
        entered.set()
        assert gate.wait(10)
        real_file = world.store._opened.files[0]
        return read_at(real_file.fd, *given[1:])  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(slots, "read_at", slow)
        reading = asyncio.create_task(world.read([3]))
        assert await asyncio.to_thread(entered.wait, 10)
        with failing(monkeypatch, "sync_data", "seg"), pytest.raises(TierFailed):
            await world.store.sync()
        await world.store.probe()
        gate.set()
        assert await reading == [FAILED]


def where(extents: StructArray) -> list[tuple[int, ...]]:
    """Tier, segment, slot and generation of each extent."""
    return sorted(tuple(row) for row in extents[["tier", "segment", "slot", "generation"]].tolist())


@pytest.mark.parametrize("in_turn", [4, 1])
async def test_one_of_several_slot_files_gives_way(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turn: int
) -> None:
    """If one of several slot files fails, synced in turn or apart, each is synced once and the
    journal is not. Only that file's blocks are lost."""
    monkeypatch.setattr(ledger, "IN_TURN", in_turn)
    for number in (2, 3):
        await world.begin(number, place=number - 1)
        assert await world.write([2 * number, 2 * number + 1], segment=number, slots=[0, 1]) == [READY, READY]
    bad, synced, real = (tmp_path / "store" / "seg-000001.slots").stat().st_ino, list[str](), OsFiles().sync_data

    def sync_data(fd: int) -> None:
        synced.append(kind_of(fd))
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, "bad disk")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "sync_data", staticmethod(sync_data))
        with pytest.raises(TierFailed, match="bad disk"):
            await world.store.sync()
    assert synced == ["seg"] * 3
    assert world.store.health().write_errors == 1
    await world.store.probe()
    assert [held(world, key) for key in (1, 2, 3, 4, 5, 6, 7)] == [True, True, True, False, False, True, True]
    await world.store.sync()
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2, 3, 6, 7}
    await other.store.close(release=False)


async def test_a_batch_over_a_file_that_gives_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch's slot file is replaced, blocks sent to the old file are FAILED; the others are held."""
    gate, hangs, first, real = threading.Event(), threading.Event(), threading.Event(), slots.write_at

    def hang(fd: int, offset: int, *more: object) -> None:
        if offset == 5 * CLASS_BYTES and not hangs.is_set():
            hangs.set()
            gate.wait(30)
            raise OSError(errno.EIO, "bad disk")
        real(fd, offset, *more)  # type: ignore[arg-type]
        first.set()

    with monkeypatch.context() as patch:
        patch.setattr(slots, "write_at", hang)
        writing = asyncio.create_task(world.write([4, 5, 6], segment=1, slots=[3, 5, 6]))
        assert await asyncio.to_thread(lambda: first.wait(10) and hangs.wait(10))
        with failing(monkeypatch, "sync_data", "seg"), pytest.raises(TierFailed):
            await world.store.sync()
        await world.store.probe()
        gate.set()
        assert await writing == [FAILED, READY, READY]
    await world.store.sync()
    assert await world.read([1, 5, 6]) == [content(key) for key in (1, 5, 6)]


async def test_journal_gives_way(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new journal replaces one whose sync failed, without loss; the failed records become durable."""
    with failing(monkeypatch, "sync_data", "journal"), pytest.raises(TierFailed):
        await world.store.sync()
    failed = world.store._opened.journal.number
    await world.store.probe()
    assert [held(world, key) for key in (1, 2, 3)] == [True] * 3
    assert not list((tmp_path / "store").glob(f"journal-*{failed}.log"))
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2, 3}
    await other.store.close(release=False)


@pytest.mark.parametrize("in_turn", [4, 0])
async def test_system_gives_no_thread(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turn: int
) -> None:
    """A sync that gets no thread, for slot files in turn or apart, raises; the next one loses no block."""
    monkeypatch.setattr(ledger, "IN_TURN", in_turn)
    with monkeypatch.context() as short:
        short.setattr(ThreadPoolExecutor, "submit", refuse_thread)
        with pytest.raises(TierFailed, match="can't start new thread.*nothing is lost"):
            await world.store.sync()
    with recording(monkeypatch, "sync_data") as synced:
        await world.store.sync()
    assert synced[:2] == ["seg", "journal"], "content first, then what tells of it"
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2, 3}
    assert await other.read([3]) == [content(3)]
    await other.store.close(release=False)


@pytest.mark.parametrize("is_failed", [False, True])
async def test_a_probe_that_gets_no_thread_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, is_failed: bool
) -> None:
    """A probe that gets no thread says so, for a failed or a healthy store; the next probe succeeds."""
    if is_failed:
        with failing(monkeypatch, "sync_data", "journal"), pytest.raises(TierFailed):
            await world.store.sync()
    with monkeypatch.context() as short:
        short.setattr(ThreadPoolExecutor, "submit", refuse_thread)
        with pytest.raises(TierFailed, match="can't start new thread.*limit of threads"):
            await world.store.probe()
    await world.store.probe()
    await world.store.sync()
    assert await world.read([1]) == [content(1)]


async def test_a_busy_thread_does_what_no_thread_was_begun_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queued sync whose thread failed to start, but that a busy thread runs, counts as that sync.
    No other sync runs beside it, and its errors count."""
    real, is_in, go = OsFiles().sync_data, threading.Event(), threading.Event()

    def sync_data(fd: int) -> None:
        is_in.set()
        assert go.wait(10.0)
        real(fd)

    def taken(_pool: object, work: Callable[[], None]) -> None:
        threading.Thread(target=work).start()
        assert is_in.wait(10.0)
        refuse_thread()

    with monkeypatch.context() as short:
        short.setattr(OsFiles, "sync_data", staticmethod(sync_data))
        short.setattr(ThreadPoolExecutor, "submit", taken)
        sync = asyncio.ensure_future(world.store.sync())
        for _ in range(20):
            await asyncio.sleep(0)
        try:
            assert is_in.is_set() and not sync.done()
        finally:
            go.set()
        await sync
    assert held(world, 3)
    assert await world.write([4], segment=1, slots=[3]) == [READY]
    with failing(monkeypatch, "sync_data", "seg"), monkeypatch.context() as short:
        is_in.set()
        short.setattr(ThreadPoolExecutor, "submit", taken)
        with pytest.raises(TierFailed, match="bad disk"):
            await world.store.sync()


def refuse_thread(*_: object) -> None:
    """Fails as if a limit of threads is reached."""
    raise RuntimeError("can't start new thread")


async def test_fold_that_fails_halfway_loses_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the removal of old files fails after a journal was replaced, the next try knows all blocks."""
    unlink, names = OsFiles().unlink, OsFiles().list

    def stubborn(path: Path) -> None:
        if path.name.startswith("snapshot"):
            raise OSError(errno.EIO, "bad disk")
        unlink(path)

    with failing(monkeypatch, "sync_data", "journal"), pytest.raises(TierFailed):
        await world.store.sync()
    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "unlink", staticmethod(stubborn))
        patch.setattr(OsFiles, "list", staticmethod(lambda directory: sorted(names(directory))))  # journals first
        with pytest.raises(TierFailed):
            await world.store.probe()
    await world.store.probe()
    await world.store.sync()
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2, 3}
    await other.store.close(release=False)


async def test_removals_outlive_the_failure(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block freed while the store cannot sync does not come back afterwards."""
    with failing(monkeypatch, "sync_data", "journal"), pytest.raises(TierFailed):
        await world.store.sync()
    world.free([1])
    await world.store.probe()
    await world.store.sync()
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {2, 3}
    await other.store.close(release=False)


async def test_disk_that_stays_bad_is_not_mended(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While new files fail too, a probe says so, no new block is durable, and no file is synced twice."""
    with failing(monkeypatch, "sync_data", "seg") as tried:
        for _ in range(3):
            with pytest.raises(TierFailed):
                await world.store.sync()
            with pytest.raises(TierFailed, match="no new file"):
                await world.store.probe()
    assert tried
    assert len(set(tried)) == len(tried)
    assert [held(world, key) for key in (1, 3)] == [True, False]
    await world.store.probe()
    assert await world.read([1, 2]) == [content(1), content(2)]
    assert not list((tmp_path / "store").glob("*.tmp"))


async def test_write_to_a_file_that_gave_way_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block on its way into the old file when the new one replaces it is FAILED and not held."""
    gate, entered = threading.Event(), threading.Event()
    write_at = slots.write_at

    def slow(*given: object) -> None:
        entered.set()
        gate.wait(10)
        write_at(*given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(slots, "write_at", slow)
        writing = asyncio.create_task(world.write([5], segment=1, slots=[5]))
        await asyncio.to_thread(entered.wait, 10)
    with failing(monkeypatch, "sync_data", "seg"), pytest.raises(TierFailed):
        await world.store.sync()
    await world.store.probe()
    gate.set()
    assert await writing == [FAILED]
    assert await world.write([5], segment=1, slots=[5]) == [READY]
    await world.store.sync()
    assert await world.read([5]) == [content(5)]


async def test_unreadable_durable_block_is_left_behind_in_the_end(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that cannot be copied stops the replacement a few times, and then only its block is lost."""
    real = OsFiles().preadv

    def bad(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0 and kind_of(fd) == "seg":
            raise OSError(errno.EIO, "bad sector")
        return real(fd, buffers, offset)

    with failing(monkeypatch, "sync_data", "seg"), pytest.raises(TierFailed):
        await world.store.sync()
    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "preadv", staticmethod(bad))
        for _ in range(3):
            with pytest.raises(TierFailed, match="bad sector"):
                await world.store.probe()
        with pytest.raises(TierFailed):  # the first slot is the one that a probe reads
            await world.store.probe()
    assert where(world.store.take_lost()) == where(np.concatenate([world.held[key][0] for key in (1, 3)]))
    await world.store.probe()
    assert await world.read([1, 2]) == [FAILED, content(2)]
    assert [held(world, key) for key in (1, 2)] == [False, True]
    await world.store.sync()
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {2}
    await other.store.close(release=False)


async def test_those_who_wait_for_a_hung_disk_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all calls hung, any number of further reads are FAILED soon; a recovered disk serves again."""
    made = World.at(tmp_path / "store", queue_depth=2)
    made.store.patience = EAGER
    await made.open()
    await made.begin(1)
    await made.write(range(1, 5), segment=1, slots=[0, 2, 4, 6])
    await made.store.sync()
    gate, real = threading.Event(), slots.read_at

    def hang(*given: object) -> int:
        gate.wait(30)
        return real(*given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(slots, "read_at", hang)
        hung = [asyncio.create_task(made.read([key])) for key in (1, 2)]
        while made.store._turns.taken["read"] < 2:  # noqa: ASYNC110  # a place that is taken rings no bell
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert await asyncio.gather(*(made.read([3, 4]) for _ in range(3))) == [[FAILED, FAILED]] * 3
        assert made.store.health().read_age_s > EAGER.hang_s
        gate.set()
        assert [(await task)[0] for task in hung] == [content(1), content(2)]
    assert await made.read([3]) == [content(3)]
    await asyncio.wait_for(made.store._lanes["read"].idle(), 10)  # the lane notifies its caller before it sleeps
    assert made.store.health().read_age_s == 0
    await made.store.close(release=False)


async def test_to_wait_for_a_turn_is_no_call_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read's age excludes its wait for another read, so two calls within their time are no hang."""
    made = World.at(tmp_path / "store", queue_depth=1)
    await made.open()
    await made.begin(1)
    await made.write([1, 2], segment=1, slots=[0, 2])
    gates, entered, real = [threading.Event(), threading.Event()], threading.Event(), slots.read_at
    order = iter(gates)

    def hold(*given: object) -> int:
        gate = next(order)
        if gate is gates[1]:
            entered.set()
        assert gate.wait(30)
        return real(*given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(slots, "read_at", hold)
        reads = [asyncio.create_task(made.read([key])) for key in (1, 2)]
        while not made.store._turns.taken["read"] or len(made.store._lanes["read"]._awake) < 2:  # noqa: ASYNC110  # neither rings a bell
            await asyncio.sleep(0)
        turn_s = asyncio.get_running_loop().time()
        gates[0].set()
        assert await asyncio.to_thread(entered.wait, 10)
        while len(made.store._lanes["read"]._awake) > 1:  # noqa: ASYNC110  # who has read the first block lies down a moment after it
            await asyncio.sleep(0)
        age_s, since_turn_s = made.store.health().read_age_s, asyncio.get_running_loop().time() - turn_s
        gates[1].set()
        assert [(await task)[0] for task in reads] == [content(1), content(2)]
        assert 0 < age_s <= since_turn_s
    await made.store.close(release=False)


async def test_close_gives_up_on_a_hung_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that never returns does not block close; the store reports that threads hang."""
    made = World.at(tmp_path / "store")
    made.store.patience = EAGER
    await made.open()
    await made.begin(1)
    await made.write([1], segment=1, slots=[0])
    gate = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "sync_data", staticmethod(lambda _: gate.wait(30)))
        async with asyncio.timeout(10):
            await made.store.close(release=False)
    assert made.store.is_stuck
    gate.set()
