"""The NVMe store: its syncs and its journal, its buffers, and how it opens."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tiers.store_world import (
    PAGES,
    PLACES,
    READY,
    SEGMENT_BYTES,
    World,
    content,
    die,
    extents_of,
    key_of,
    kind_of,
    metas_of,
    next_life,
    pages,
    raiser,
    segment,
    spec,
    tables_of,
    told,
)
from tierd.core.formats.model import StructArray
from tierd.core.plan import Plan
from tierd.errors import ConfigError, TierFailed, VersionMismatch
from tierd.linux.mapping import address_of
from tierd.tiers.io import durable
from tierd.tiers.io.files import Files, OsFiles
from tierd.tiers.store import ledger, slots
from tierd.tiers.store.journal import Journal, Record
from tierd.tiers.store.nvme import Patience
from tierd.tiers.store.recovery import open_index
from tierd.tiers.store.snapshot import FiledRows, read_snapshot
from tierd.tiers.store.stored_index import count_of

# -- syncs


async def test_batch_takes_two_syncs_data_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of waiters for one segment's batch cost one sync of its slot file, then of the journal."""
    await world.write(range(4), segment=1, slots=range(4))
    synced: list[str] = []
    sync_data = OsFiles().sync_data

    def note(fd: int) -> None:
        synced.append(kind_of(fd))
        sync_data(fd)

    monkeypatch.setattr(OsFiles, "sync_data", staticmethod(note))
    await asyncio.gather(*(world.store.sync() for _ in range(20)))
    assert synced == ["seg", "journal"]
    await world.store.sync()
    assert synced == ["seg", "journal"]


async def test_sync_that_comes_late_is_not_served_by_the_flight_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks written during a flight are durable when their own sync returns."""
    gate, entered, synced = threading.Event(), threading.Event(), list[str]()
    sync_data = OsFiles().sync_data

    def slow(fd: int) -> None:
        synced.append(kind_of(fd))
        entered.set()
        gate.wait(10)
        sync_data(fd)

    monkeypatch.setattr(OsFiles, "sync_data", staticmethod(slow))
    await world.write([1], segment=1, slots=[0])
    first = asyncio.create_task(world.store.sync())
    await asyncio.to_thread(entered.wait, 10)
    await world.write([2], segment=1, slots=[1])
    second = asyncio.create_task(world.store.sync())
    gate.set()
    await asyncio.gather(first, second)
    assert synced == ["seg", "journal"] * 2


async def test_full_disk_is_survived(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the journal has no space, sync raises and the store serves; with space all becomes durable."""
    await world.write([1], segment=1, slots=[0])
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", raiser(errno.ENOSPC))
        with pytest.raises(TierFailed, match="space"):
            await world.store.sync()
    assert not world.store.health().fault
    await world.write([2], segment=1, slots=[1])
    await world.store.sync()
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2}
    await other.store.close(release=False)


async def test_journal_is_folded_while_the_store_works(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot replaces a long journal, old files go, and a later crash loses nothing."""
    world.store._ledger._compact_at = 1
    await world.store.keep_namespace(b"space")
    await world.write([1, 2], segment=1, slots=[0, 1])
    await world.store.sync()
    compaction = world.store._ledger._compaction
    assert compaction is not None
    await compaction
    await world.write([3], segment=1, slots=[2])
    world.free([1])
    await world.store.sync()
    names = sorted(os.listdir(tmp_path / "store"))
    assert [n.split("-")[0] for n in names if n[0] in "js"][:2] == ["journal", "seg"]
    die(world)
    other = World.at(tmp_path / "store")
    assert (await other.open()).namespaces == [b"space"]
    assert set(other.held) == {2, 3}
    await other.store.close(release=False)


async def test_closing_leaves_one_whole_snapshot(world: World, tmp_path: Path) -> None:
    """After close the newest snapshot alone lists every block, without removed ones."""
    await world.write([1, 2, 3], segment=1, slots=[0, 1, 2])
    world.free([2])
    store = world.store._opened.store
    await world.store.close(release=False)
    newest = max((tmp_path / "store").glob("snapshot-*.bin"))
    index = read_snapshot(tmp_path / "store", store=store, number=int(newest.stem.rpartition("-")[2]))
    assert {key_of(meta) for meta in index.metas} == {1, 3}


async def test_closing_folds_what_a_start_after_a_crash_told_again(tmp_path: Path) -> None:
    """A run after a crash that stores nothing closes with one snapshot and no further changes."""
    world = World.at(tmp_path / "store")
    await world.open()
    await world.begin(1)
    await world.write(range(1, 6), segment=1, slots=range(5))
    await world.store.close(release=False)
    world = await next_life(tmp_path)
    await world.write([6], segment=1, slots=[5])
    await world.store.sync()
    die(world)
    world = await next_life(tmp_path)
    store = world.store._opened.store
    assert open_index(tmp_path / "store", store=store).changes
    await world.store.close(release=False)
    left = open_index(tmp_path / "store", store=store)
    assert (left.changes, count_of(left.index)) == (0, 6)


def snapshots(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "store").glob("snapshot-*.bin"))


async def crashed(tmp_path: Path) -> int:
    """Makes a store: blocks 1 to 8 in a snapshot, 9 only in a journal. Returns the snapshot's length."""
    world = World.at(tmp_path / "store")
    await world.open()
    for number in (1, 2, 3):
        await world.begin(number, place=number - 1)
    for number in (1, 2):
        await world.write(range(4 * number - 3, 4 * number + 1), segment=number, slots=range(4))
    await world.store.close(release=False)
    world = await next_life(tmp_path)
    await world.write([9], segment=3, slots=[0])
    await world.store.sync()
    die(world)
    (snapshot,) = (tmp_path / "store").glob("snapshot-*.bin")
    return snapshot.stat().st_size


async def test_a_long_journal_is_folded_however_long_the_snapshot_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot replaces a journal at its limit, even if the previous snapshot is longer."""
    length = await crashed(tmp_path)
    before = snapshots(tmp_path)
    monkeypatch.setattr(ledger, "JOURNAL_LIMIT_BYTES", length // 4)
    monkeypatch.setattr(ledger, "LONG_JOURNAL_BYTES", length // 2)
    world = await next_life(tmp_path)
    await world.store.sync()
    assert world.store._ledger._compaction is None
    await world.write(range(10, 14), segment=3, slots=range(1, 5))
    await world.store.sync()
    assert world.store._ledger._compaction is not None
    await world.store._ledger._compaction
    assert snapshots(tmp_path) > before
    await world.store.close(release=False)


async def test_nothing_is_folded_before_all_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that is long at start is folded only after the last former block was handed on."""
    await crashed(tmp_path)
    before = snapshots(tmp_path)
    monkeypatch.setattr(ledger, "JOURNAL_LIMIT_BYTES", 1)
    monkeypatch.setattr(ledger, "LONG_JOURNAL_BYTES", 1)
    world = World.at(tmp_path / "store")
    found = await world.store.open()
    await world.store.keep_namespace(b"one")
    await world.store.sync()
    assert world.store._ledger._compaction is None
    assert len(found.gathered().metas) == 9
    await world.store.keep_namespace(b"two")
    await world.store.sync()
    assert world.store._ledger._compaction is not None
    await world.store._ledger._compaction
    assert snapshots(tmp_path) > before
    await world.store.close(release=False)


@pytest.mark.parametrize(("more", "is_folded"), [(1, False), (6, True)])
async def test_closing_folds_what_a_start_would_not_tell_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, is_folded: bool
) -> None:
    """Beside a long snapshot a short journal stays, and the next run recovers the same blocks."""
    await crashed(tmp_path)
    before = snapshots(tmp_path)
    world = await next_life(tmp_path)
    monkeypatch.setattr(ledger, "JOURNAL_LIMIT_BYTES", 0)
    await world.write(range(10, 10 + more), segment=3, slots=range(1, 1 + more))
    await world.store.close(release=False)
    assert (snapshots(tmp_path) > before) == is_folded
    other = await next_life(tmp_path)
    assert set(other.held) == set(range(1, 10 + more))
    assert await other.read([1, 9, 9 + more]) == [content(key) for key in (1, 9, 9 + more)]
    await other.store.close(release=False)


@pytest.mark.parametrize("is_under_way", [True, False])
async def test_a_snapshot_that_takes_too_long_is_given_up_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_under_way: bool
) -> None:
    """A close gives up an endless fold, begun or not, in time; no disk counts as hung, no block is lost."""
    await crashed(tmp_path)
    before = snapshots(tmp_path)
    world = await next_life(tmp_path)
    world.store.patience = Patience(close_s=4.0)  # half of it for the fold; a busy machine needs the rest
    await world.write([10], segment=3, slots=[1])
    stretches = FiledRows.stretches

    def endless(rows: FiledRows) -> Iterator[StructArray]:
        for metas in itertools.cycle([*stretches(rows)]):
            yield metas[:0]

    with monkeypatch.context() as patch:
        patch.setattr(FiledRows, "stretches", endless)
        if is_under_way:
            world.store._ledger._compact_at = 1
            await world.store.sync()
            assert world.store._ledger._compaction is not None
        await world.store.close(release=False)
    assert not world.store.is_stuck
    assert snapshots(tmp_path) == before
    other = await next_life(tmp_path)
    assert set(other.held) == set(range(1, 11))
    await other.store.close(release=False)


async def test_compaction_that_fails_changes_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no snapshot can be written, the journals stay, a notice says so, and no block is lost."""
    world.store._ledger._compact_at = 1
    monkeypatch.setattr(durable, "replace_file", raiser(errno.ENOSPC))
    await world.write([1], segment=1, slots=[0])
    await world.store.sync()
    assert world.store._ledger._compaction is not None
    await world.store._ledger._compaction
    assert any("snapshot" in notice for notice in world.store.notices)
    monkeypatch.undo()
    await world.write([2], segment=1, slots=[1])
    await world.store.sync()
    await world.store._ledger._compaction  # or it would go on in the next store's directory
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2}
    await other.store.close(release=False)


async def test_records_become_durable_unasked(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsynced records start a flight by themselves once they are many."""
    monkeypatch.setattr(ledger, "PENDING_LIMIT", 2)
    append, appended, loop = Journal.append, asyncio.Event(), asyncio.get_running_loop()

    def note(journal: Journal, records: list[Record]) -> None:
        append(journal, records)
        loop.call_soon_threadsafe(appended.set)

    monkeypatch.setattr(Journal, "append", note)
    for key in range(4):
        await world.write([key], segment=1, slots=[key])
    await asyncio.wait_for(appended.wait(), 10)
    die(world)
    monkeypatch.undo()
    other = await next_life(tmp_path)
    assert other.held
    await other.store.close(release=False)


async def test_apply_makes_no_call_to_the_system(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`apply` of a full plan opens, writes and syncs no file."""
    await world.write([1], segment=1, slots=[0])
    for name in ("open", "write", "pwritev", "fdatasync", "fsync", "ftruncate", "posix_fallocate", "rename", "unlink"):
        monkeypatch.setattr(os, name, raiser(errno.EPERM))
    world.free([1])
    world.store.apply(Plan(segments=[segment(2, place=1)], reserved=extents_of(2, [0], generation=1 << 30)))
    world.store.note_namespaces([b"space"])
    monkeypatch.undo()


# -- buffers and modes


async def test_payload_goes_straight_into_the_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets the aligned pages themselves, two adjacent ones in one call."""
    calls: list[list[int]] = []
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)
        monkeypatch.setattr(
            slots.os, name, lambda fd, b, at, call=call: calls.append([address_of(v) for v in b]) or call(fd, b, at)
        )
    extents, metas, area = extents_of(1, [0, 1], generation=1), metas_of([1, 2]), pages(2)
    await world.store.write(extents, metas, told(tables_of([1, 2])), area)
    await world.store.read(extents, area, metas)
    assert len(calls) == 2
    assert all({address_of(page) for page in area} <= set(call) for call in calls)


async def test_cancelled_read_lets_go_of_its_pages_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled read ends only when no thread can write into its targets any more."""
    await world.write([1], segment=1, slots=[0])
    gate, entered, left = threading.Event(), threading.Event(), threading.Event()
    read_at = slots.read_at

    def slow(fd: int, offset: int, buffers: list[memoryview], disk: Files) -> int:
        entered.set()
        gate.wait(10)
        left.set()
        return read_at(fd, offset, buffers, disk)

    monkeypatch.setattr(slots, "read_at", slow)
    reading = asyncio.create_task(world.read([1]))
    await asyncio.to_thread(entered.wait, 10)
    for _ in range(3):
        reading.cancel()
        await asyncio.sleep(0)
    assert not reading.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert left.is_set()


async def test_queue_depth_bounds_what_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most queue_depth writes are in progress at one time, and all of them complete."""
    world = World.at(tmp_path / "store", queue_depth=2)
    await world.open()
    await world.begin(1)
    active, most, lock = 0, 0, threading.Lock()
    write_at = slots.write_at

    def count(fd: int, offset: int, buffers: list[memoryview], disk: Files) -> None:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        write_at(fd, offset, buffers, disk)
        with lock:
            active -= 1

    monkeypatch.setattr(slots, "write_at", count)
    jobs = [world.write([slot], segment=1, slots=[slot]) for slot in range(PAGES)]
    assert await asyncio.gather(*jobs) == [[READY]] * PAGES
    assert most <= 2
    await world.store.close(release=False)


async def test_refused_direct_io_falls_back_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without O_DIRECT support, "auto" uses the page cache with one notice, and "on" raises ConfigError."""
    opener = OsFiles().open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return opener(path, flags)

    monkeypatch.setattr(OsFiles, "open", staticmethod(refuse))
    with pytest.raises(ConfigError, match="refuses O_DIRECT"):
        await World.at(tmp_path / "store", direct="on").open()
    world = World.at(tmp_path / "store", direct="auto")
    await world.open()
    await world.begin(1)
    assert world.store.mode == "buffered"
    assert len(world.store.notices) == 1
    assert await world.write([1], segment=1, slots=[0]) == [READY]
    assert await world.read([1]) == [content(1)]
    await world.store.close(release=False)


async def test_store_that_cannot_set_its_space_aside_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at start is TierFailed that names the setting to lower; a second try can open the store."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", raiser(errno.ENOSPC))
        with pytest.raises(TierFailed, match=r"nvme\.0\.capacity: .* lower it"):
            await World.at(tmp_path / "store").open()
    world = World.at(tmp_path / "store")
    await world.open()
    await world.store.close(release=False)


async def test_space_is_set_aside_at_open(world: World, tmp_path: Path) -> None:
    """Every byte of the capacity is allocated before the store serves, in files for the owner alone."""
    files = list((tmp_path / "store").glob("*.slots"))
    assert len(files) == PLACES
    for file in files:
        stat = file.stat()
        assert stat.st_blocks * 512 >= SEGMENT_BYTES
        assert stat.st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "error"),
    [('{"format": 2, "store": "00"}', VersionMismatch), ("{", TierFailed), ("[]", TierFailed)],
)
async def test_unreadable_store_is_refused_and_kept(tmp_path: Path, text: str, error: type[Exception]) -> None:
    """A description of a newer format, or none at all, stops the start and changes nothing."""
    world = World.at(tmp_path / "store")
    await world.open()
    await world.store.close(release=False)
    before = sorted(os.listdir(tmp_path / "store"))
    (tmp_path / "store" / "store.json").write_text(text)
    with pytest.raises(error):
        await World.at(tmp_path / "store").open()
    assert sorted(os.listdir(tmp_path / "store")) == before


async def test_larger_segments_keep_what_fits(world: World, tmp_path: Path) -> None:
    """Larger segments keep their blocks; segments smaller than their contents drop them."""
    await world.write([1], segment=1, slots=[0])
    await world.store.close(release=False)
    for size, kept in ((SEGMENT_BYTES * 2, {1}), (SEGMENT_BYTES // 2, set())):
        other = await next_life(tmp_path, spec=spec(segment_bytes=size))
        assert set(other.held) == kept
        await other.store.close(release=False)


async def test_a_lowered_capacity_gives_its_room_back(tmp_path: Path) -> None:
    """A lower capacity cuts every file to the smaller segment before others grow; fitting blocks stay."""
    world = World.at(tmp_path / "store", spec=spec(places=4, segment_bytes=SEGMENT_BYTES * 4))
    await world.open()
    await world.begin(1)
    assert await world.write([1], segment=1, slots=[0]) == [READY]
    await world.store.close(release=False)
    other = await next_life(tmp_path, spec=spec(places=6, segment_bytes=SEGMENT_BYTES))
    sizes = [(path.stat().st_size, path.stat().st_blocks * 512) for path in (tmp_path / "store").glob("*.slots")]
    assert sizes == [(SEGMENT_BYTES, SEGMENT_BYTES)] * 6
    assert set(other.held) == {1}
    assert await other.read([1]) == [content(1)]
    await other.store.close(release=False)


async def test_segments_that_moved_stay_where_they_are(tmp_path: Path) -> None:
    """A smaller store has moved its segments without loss. A segment that ends and begins there
    does not move the others again."""
    world = World.at(tmp_path / "store", spec=spec(places=8))
    await world.open()
    for number, place in ((1, 6), (2, 7)):
        await world.begin(number, place=place)
        assert await world.write([number], segment=number, slots=[0]) == [READY]
    await world.store.close(release=False)
    world = World.at(tmp_path / "store")
    assert [(s.segment, s.slot) for s in (await world.open()).segments] == [(1, 0), (2, 1)]
    world.free([1])
    await world.begin(3, place=0)
    assert await world.write([3], segment=3, slots=[0]) == [READY]
    await world.store.close(release=False)
    world = World.at(tmp_path / "store")
    assert {s.segment: s.slot for s in (await world.open()).segments} == {3: 0, 2: 1}
    assert await world.read([2, 3]) == [content(2), content(3)]
    await world.store.close(release=False)
