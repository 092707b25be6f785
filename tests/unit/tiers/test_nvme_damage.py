"""The NVMe store after a crash, on a bad disk, and with a slot that holds other bytes."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.tiers.store_world import (
    CLASS_BYTES,
    CORRUPT,
    FAILED,
    LENGTH,
    READY,
    World,
    content,
    die,
    next_life,
    raiser,
    segment,
    slot_file,
)
from tierd.core.plan import Plan
from tierd.tiers.io.files import Files
from tierd.tiers.store import slots, store_files
from tierd.tiers.store.slots import HEADER_BYTES

VICTIM = Path(__file__).with_name("nvme_victim.py")


# -- killed


def lives(directory: Path, direct: str, seed: int) -> tuple[set[int], set[int]]:
    """Runs a victim and kills it after some lines. Returns the acknowledged, unfreed keys, and all keys."""
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
    """After each SIGKILL during writes, acknowledged blocks read right, others are right or a miss."""
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
    """After a crash, blocks written since the last sync are a miss, and synced ones survive."""
    await world.write([1], segment=1, slots=[0])
    await world.store.sync()
    await world.write([2], segment=1, slots=[1])
    die(world)
    other = await next_life(tmp_path)
    assert set(other.held) == {1}
    await other.store.close(release=False)


async def test_slot_reused_without_a_sync_is_a_miss_after_a_crash(world: World, tmp_path: Path) -> None:
    """The journal names the old block, the slot holds another: CORRUPT, and never the other's bytes."""
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
    """A removal that was not synced brings the old block back whole after a restart."""
    await world.write([1], segment=1, slots=[0])
    await world.store.sync()
    world.free([1])
    die(world)
    other = await next_life(tmp_path)
    assert await other.read([1]) == [content(1)]
    await other.store.close(release=False)


@pytest.mark.parametrize("writes", [True, False])
async def test_numbers_in_use_are_never_given_again_after_a_crash(world: World, tmp_path: Path, writes: bool) -> None:
    """Even without a sync, a restart uses numbers above every prepared segment and written generation."""
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
    """A block that was being written when its segment ended is FAILED, and does not count as stored."""
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
    """Two slots exchanged whole, as by misdirected writes, are both refused."""

    def swap(data: bytearray) -> None:
        data[:CLASS_BYTES], data[CLASS_BYTES : 2 * CLASS_BYTES] = (
            data[CLASS_BYTES : 2 * CLASS_BYTES],
            data[:CLASS_BYTES],
        )

    await damage(world, tmp_path, swap)
    assert await world.read([1, 2, 3]) == [CORRUPT, CORRUPT, content(3)]


async def test_older_version_of_a_slot_is_a_miss(world: World, tmp_path: Path) -> None:
    """An older version of a block in its slot, as after a lost write, is refused by its generation."""
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
    """Blocks before the cut are read; the one at or behind it is FAILED."""
    await world.write([1, 2, 3], segment=1, slots=[0, 1, 2])
    os.truncate(slot_file(tmp_path), length)
    assert await world.read([1, 2, 3]) == [content(1), content(2), last]


async def test_truncated_file_is_a_miss_in_the_next_life(world: World, tmp_path: Path) -> None:
    """A start allocates a cut slot file again; a block in the cut part is CORRUPT."""
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
    """A block whose write failed is FAILED and unknown after a restart; the store goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(slots, "write_at", raiser(errno.EIO))
        assert await world.write([1], segment=1, slots=[0]) == [FAILED]
    assert await world.write([2], segment=1, slots=[1]) == [READY]
    await world.store.close(release=False)
    other = await next_life(tmp_path)
    assert set(other.held) == {2}
    await other.store.close(release=False)
