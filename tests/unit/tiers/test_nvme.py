"""The NVMe store: what a crash, a bad disk and a full one leave of it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.unit.tiers.store_world import (
    CLASS_BYTES,
    LENGTH,
    PAGES,
    PLACES,
    SEGMENT_BYTES,
    World,
    content,
    extents_of,
    key_of,
    metas_of,
    pages,
    segment,
    spec,
    tables_of,
)
from tierd.core.model import BlockStatus
from tierd.core.plan import Plan
from tierd.errors import ConfigError, TierFailed, VersionMismatch
from tierd.tiers import durable, ledger, slots, store_files
from tierd.tiers.files import Files, OsFiles
from tierd.tiers.journal import Journal, Record
from tierd.tiers.mapping import address_of
from tierd.tiers.slots import HEADER_BYTES
from tierd.tiers.snapshot import read_snapshot

READY, FAILED, CORRUPT = BlockStatus.READY, BlockStatus.FAILED, BlockStatus.CORRUPT
VICTIM = Path(__file__).with_name("nvme_victim.py")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World.at(tmp_path / "store")
    await made.open()
    await made.begin(1)
    yield made
    await made.store.close(release=False)


def slot_file(tmp_path: Path, place: int = 0) -> Path:
    return store_files.slots_path(tmp_path / "store", place)


async def next_life(tmp_path: Path, **options: object) -> World:
    """The store opened again without the former one having been closed: its lock is let go, as by death."""
    other = World.at(tmp_path / "store", **options)
    await other.open()
    return other


def die(world: World) -> None:
    """What SIGKILL leaves: the lock gone, nothing flushed."""
    world.store._opened.lock.release()


# -- killed


def lives(directory: Path, direct: str, seed: int) -> tuple[set[int], set[int]]:
    """Runs a victim and kills it after so many lines. Keys acknowledged and not freed, and all ever named."""
    lines = random.Random(seed).randrange(1, 120)
    command = [sys.executable, str(VICTIM), str(directory), direct, str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(lines)]
        child.kill()
        said += child.stdout.read().splitlines(keepends=True)
    kept: set[int] = set()
    for line in (text for text in said if text.endswith("\n")):
        keys = {int(word) for word in line[1:].split()}
        kept = kept | keys if line[0] == "+" else kept - keys
    return kept, {int(word) for line in said for word in line[1:].split()}


@pytest.mark.parametrize("direct", ["on", "off"])
async def test_killed_store_loses_nothing_acknowledged_and_shows_no_wrong_byte(tmp_path: Path, direct: str) -> None:
    """Over lives each ended by SIGKILL while writing: every acknowledged block is read back right, every other is right or a miss."""
    kept: set[int] = set()
    for seed in range(5):
        acknowledged, named = await asyncio.to_thread(lives, tmp_path / "store", direct, seed)
        world = await next_life(tmp_path, direct=direct)
        if seed == 0:
            kept = acknowledged
        keys = list(world.held)
        found = dict(zip(keys, await world.read(keys) if keys else [], strict=True))
        assert all(value in {content(key), CORRUPT} for key, value in found.items())
        missing = {key for key in acknowledged if found.get(key) != content(key)}
        assert not missing, (seed, missing)
        assert named or seed
        await world.store.close(release=False)
    assert kept


async def test_unsynced_blocks_are_a_miss_in_the_next_life(world: World, tmp_path: Path) -> None:
    """What was written after the last sync is not found after a crash, and what was synced is."""
    await world.write([1], segment=1, slots=[0])
    await world.store.sync()
    await world.write([2], segment=1, slots=[1])
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1}
    await other.store.close(release=False)


async def test_slot_reused_without_a_sync_is_a_miss_after_a_crash(world: World, tmp_path: Path) -> None:
    """The journal still names the old block, the slot holds another: CORRUPT, and never the other's bytes."""
    await world.write([1, 2], segment=1, slots=[0, 1])
    await world.store.sync()
    world.free([1])
    await world.write([3], segment=1, slots=[0])
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2}
    assert await other.read([1, 2]) == [CORRUPT, content(2)]
    await other.store.close(release=False)


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, HEADER_BYTES), (HEADER_BYTES, CLASS_BYTES), (0, CLASS_BYTES // 2), (CLASS_BYTES // 2, CLASS_BYTES)],
)
async def test_slot_half_overwritten_is_a_miss(world: World, tmp_path: Path, start: int, end: int) -> None:
    """Whichever part of a new block reached the slot of an old one, the old one is no longer served."""
    await world.write([1], segment=1, slots=[0])
    await world.store.sync()
    await world.write([2], segment=1, slots=[1])
    new = slot_file(tmp_path).read_bytes()[CLASS_BYTES : 2 * CLASS_BYTES]
    with slot_file(tmp_path).open("r+b") as file:
        file.seek(start)
        file.write(new[start:end])
    assert await world.read([1, 2]) == [CORRUPT, content(2)]


async def test_freed_block_may_come_back_but_only_as_itself(world: World, tmp_path: Path) -> None:
    """A removal that was not synced leaves the old block, whole, in the next life."""
    await world.write([1], segment=1, slots=[0])
    await world.store.sync()
    world.free([1])
    die(world)
    other = await next_life(tmp_path)
    assert await other.read([1]) == [content(1)]
    await other.store.close(release=False)


@pytest.mark.parametrize("writes", [True, False])
async def test_numbers_in_use_are_never_given_again_after_a_crash(world: World, tmp_path: Path, writes: bool) -> None:
    """Even with nothing synced, the next life counts on above every segment prepared and every generation written."""
    if writes:
        world.next_generation = 1 << 40
        await world.write([1], segment=1, slots=[0])
    else:
        await world.begin(123_456, place=1)
    die(world)
    other = World.at(tmp_path / "store")
    found = await other.open()
    assert found.next_generation > 1 << 40 if writes else found.next_segment > 123_456
    await other.store.close(release=False)


async def test_segment_that_ends_under_a_write_fails_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that was being written when its segment ended is FAILED, and not counted as stored."""
    gate, entered = threading.Event(), threading.Event()
    write_at = slots.write_at

    def slow(fd: int, offset: int, buffers: list[memoryview], disk: Files) -> None:
        entered.set()
        gate.wait(10)
        write_at(fd, offset, buffers, disk)

    monkeypatch.setattr(slots, "write_at", slow)
    writing = asyncio.create_task(world.write([1], segment=1, slots=[0]))
    await asyncio.to_thread(entered.wait, 10)
    world.store.apply(Plan(segments=[segment(2)]))
    gate.set()
    assert await writing == [FAILED]


# -- damaged


async def damage(world: World, tmp_path: Path, change: Callable[[bytearray], None]) -> None:
    await world.write([1, 2, 3], segment=1, slots=[0, 1, 2])
    data = bytearray(slot_file(tmp_path).read_bytes())
    change(data)
    with slot_file(tmp_path).open("r+b") as file:
        file.write(data)


@pytest.mark.parametrize("at", [0, 8, 200, 255, 256, 290, HEADER_BYTES, HEADER_BYTES + LENGTH - 1])
async def test_flipped_bit_is_a_miss(world: World, tmp_path: Path, at: int) -> None:
    """A flip in record, slice table or payload of one block costs that block alone."""

    def flip(data: bytearray) -> None:
        data[CLASS_BYTES + at] ^= 4

    await damage(world, tmp_path, flip)
    assert await world.read([1, 2, 3]) == [content(1), CORRUPT, content(3)]


async def test_swapped_slots_are_misses(world: World, tmp_path: Path) -> None:
    """Two slots exchanged whole are both refused: misdirected writes."""

    def swap(data: bytearray) -> None:
        data[:CLASS_BYTES], data[CLASS_BYTES : 2 * CLASS_BYTES] = (
            data[CLASS_BYTES : 2 * CLASS_BYTES],
            data[:CLASS_BYTES],
        )

    await damage(world, tmp_path, swap)
    assert await world.read([1, 2, 3]) == [CORRUPT, CORRUPT, content(3)]


async def test_older_version_of_a_slot_is_a_miss(world: World, tmp_path: Path) -> None:
    """The same block's bytes from a former life of its page are refused by their generation: lost writes."""
    await world.write([1], segment=1, slots=[0])
    old = slot_file(tmp_path).read_bytes()[:CLASS_BYTES]
    world.free([1])
    await world.write([1], segment=1, slots=[0])
    with slot_file(tmp_path).open("r+b") as file:
        file.write(old)
    assert await world.read([1]) == [CORRUPT]


@pytest.mark.parametrize("sector", [0, 8, 16, 80])
async def test_zeroed_sector_is_a_miss(world: World, tmp_path: Path, sector: int) -> None:
    """512 zero bytes in header or payload cost the block."""

    def zero(data: bytearray) -> None:
        data[sector * 512 : (sector + 1) * 512] = bytes(512)

    await damage(world, tmp_path, zero)
    assert await world.read([1, 2, 3]) == [CORRUPT, content(2), content(3)]


@pytest.mark.parametrize(("length", "last"), [(2 * CLASS_BYTES, FAILED), (3 * CLASS_BYTES - CLASS_BYTES // 2, FAILED)])
async def test_truncated_file_fails_what_is_gone(world: World, tmp_path: Path, length: int, last: int) -> None:
    """Blocks before the cut are read, the one at or behind it is FAILED."""
    await world.write([1, 2, 3], segment=1, slots=[0, 1, 2])
    os.truncate(slot_file(tmp_path), length)
    assert await world.read([1, 2, 3]) == [content(1), content(2), last]


async def test_truncated_file_is_a_miss_in_the_next_life(world: World, tmp_path: Path) -> None:
    """A cut slot file is set aside again at start; what was in the cut part is CORRUPT."""
    await world.write([1, 2], segment=1, slots=[0, 5])
    await world.store.close(release=False)
    os.truncate(slot_file(tmp_path), CLASS_BYTES)
    other = await next_life(tmp_path)
    assert await other.read([1, 2]) == [content(1), CORRUPT]
    await other.store.close(release=False)


async def test_slots_of_another_store_are_misses(world: World, tmp_path: Path) -> None:
    """Slot files under an index of another store id are refused."""
    await world.write([1], segment=1, slots=[0])
    data = slot_file(tmp_path).read_bytes()
    other = World.at(tmp_path / "other")
    await other.open()
    await other.begin(1)
    await other.write([1], segment=1, slots=[0])
    store_files.slots_path(tmp_path / "other", 0).write_bytes(data)
    assert await other.read([1]) == [CORRUPT]
    await other.store.close(release=False)


async def test_one_bad_sector_costs_one_block(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a call over adjacent slots fails, each is read by itself and only the bad one is FAILED."""
    await world.write([1, 2, 3], segment=1, slots=[0, 1, 2])
    read_at = slots.read_at

    def fail(fd: int, offset: int, buffers: list[memoryview], disk: Files) -> int:
        if offset <= CLASS_BYTES < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "bad sector")
        return read_at(fd, offset, buffers, disk)

    monkeypatch.setattr(slots, "read_at", fail)
    assert await world.read([1, 2, 3]) == [content(1), FAILED, content(3)]


async def test_failed_write_stores_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose write failed is FAILED and unknown to the next life; the store goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(slots, "write_at", raiser(errno.EIO))
        assert await world.write([1], segment=1, slots=[0]) == [FAILED]
    assert await world.write([2], segment=1, slots=[1]) == [READY]
    await world.store.close(release=False)
    other = await next_life(tmp_path)
    assert set(other.held) == {2}
    await other.store.close(release=False)


# -- syncs


def raiser(code: int) -> Callable[..., None]:
    def fail(*_: object, **_named: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def kind_of(fd: int) -> str:
    """`seg` or `journal`: the file behind a descriptor."""
    return Path(os.readlink(f"/proc/self/fd/{fd}")).name.split("-")[0]


async def test_batch_takes_two_syncs_data_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in one segment costs one sync of its slot file and then one of the journal, however many wait for it."""
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
    """What was written while a flight was under way is durable when its own sync returns."""
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
    """While the journal finds no space, sync raises and the store serves; with space again everything becomes durable."""
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
    """A long journal gives way to a snapshot, old files go, and a crash afterwards finds everything."""
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
    """After close the newest snapshot alone tells of every block, removed ones left out."""
    await world.write([1, 2, 3], segment=1, slots=[0, 1, 2])
    world.free([2])
    store = world.store._opened.store
    await world.store.close(release=False)
    newest = max((tmp_path / "store").glob("snapshot-*.bin"))
    index = read_snapshot(tmp_path / "store", store=store, number=int(newest.stem.rpartition("-")[2]))
    assert {key_of(meta) for meta in index.metas} == {1, 3}


async def test_compaction_that_fails_changes_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no snapshot can be written the journals stay, it is said, and nothing is lost."""
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
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1, 2}
    await other.store.close(release=False)


async def test_records_become_durable_unasked(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that nobody syncs set a flight off by themselves once they are many."""
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
    """A plan with everything in it is noted without opening, writing or syncing a file."""
    await world.write([1], segment=1, slots=[0])
    for name in ("open", "write", "pwritev", "fdatasync", "fsync", "ftruncate", "posix_fallocate", "rename", "unlink"):
        monkeypatch.setattr(os, name, raiser(errno.EPERM))
    world.free([1])
    world.store.apply(Plan(segments=[segment(2, place=1)], reserved=extents_of(2, [0], generation=1 << 30)))
    world.store.note_namespaces([b"space"])
    monkeypatch.undo()


# -- buffers and modes


async def test_payload_goes_straight_into_the_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned pages are themselves what is handed to the kernel, two adjacent ones in one call."""
    calls: list[list[int]] = []
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)
        monkeypatch.setattr(
            slots.os, name, lambda fd, b, at, call=call: calls.append([address_of(v) for v in b]) or call(fd, b, at)
        )
    extents, metas, area = extents_of(1, [0, 1], generation=1), metas_of([1, 2]), pages(2)
    await world.store.write(extents, metas, tables_of([1, 2]), area)
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
    """No more calls than queue_depth are under way at one time, and all come to their end."""
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
    """On a file system that refuses O_DIRECT the store works through the page cache, with one notice; "on" is refused."""
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
    """A full disk at start is TierFailed with the setting to lower, and the directory is free for another try."""
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
    """With segments made larger the blocks stay; made smaller than what they hold, they go."""
    await world.write([1], segment=1, slots=[0])
    await world.store.close(release=False)
    for size, kept in ((SEGMENT_BYTES * 2, {1}), (SEGMENT_BYTES // 2, set())):
        other = await next_life(tmp_path, spec=spec(segment_bytes=size))
        assert set(other.held) == kept
        await other.store.close(release=False)
