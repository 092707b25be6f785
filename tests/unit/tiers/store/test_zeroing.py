"""Space that the store writes over before its first blocks: all of it, and never over a block."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.tiers.store_world import PLACES, READY, SEGMENT_BYTES, World, content, raiser
from tierd.tiers.io.files import OS, READ_WRITE, Files
from tierd.tiers.store import slots, zeroing
from tierd.tiers.store.nvme import NvmeStore
from tierd.tiers.store.slots import HEADER_BYTES


@pytest.fixture(autouse=True)
def eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores begin to write their space over at once."""
    monkeypatch.setattr(NvmeStore, "zero_ahead", True)
    monkeypatch.setattr(zeroing, "START_S", 0.0)
    monkeypatch.setattr(zeroing, "PAUSE_S", 0.001)
    fd = OS.open(tmp_path / "probe", READ_WRITE)
    OS.allocate(fd, SEGMENT_BYTES)
    hole, found = os.lseek(fd, 0, os.SEEK_HOLE), OS.find_unwritten(fd, 0)
    OS.close(fd)
    if hole == SEGMENT_BYTES:
        pytest.skip("this file system does not tell what was never written")
    assert (hole, found) == (0, (0, SEGMENT_BYTES))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A store that writes its space over."""
    made = World.at(tmp_path / "store")
    await made.open()
    yield made
    await made.store.close(release=False)


def unwritten(world: World) -> int:
    """Bytes of slot files that are allocated and never written."""
    found = 0
    for file in world.store._opened.files.values():
        at = 0
        while gap := OS.find_unwritten(file.fd, at):
            found, at = found + gap[1] - gap[0], gap[1]
    return found


async def test_all_that_is_free_is_written_once(world: World) -> None:
    """All free space is written in the end and counts as written; a segment's space and blocks stay."""
    await world.begin(1, place=2)
    assert await world.write([1], segment=1, slots=[3]) == [READY]
    before = world.store.written_bytes
    await asyncio.wait_for(world.store._zeroing.done(), 10)
    assert 0 < unwritten(world) < SEGMENT_BYTES
    assert world.store.written_bytes - before <= (PLACES - 1) * SEGMENT_BYTES
    assert await world.read([1]) == [content(1)]


async def test_a_block_waits_for_the_zeros_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block for a place that is being zeroed is written after the zeros and not before."""
    gate, entered, order, write_at = threading.Event(), threading.Event(), list[str](), slots.write_at

    def slow(fd: int, offset: int, buffers: list[memoryview], disk: Files) -> None:
        is_zeros = len(buffers[0]) > HEADER_BYTES
        if is_zeros:
            entered.set()
            gate.wait(10)
        write_at(fd, offset, buffers, disk)
        order.append("zeros" if is_zeros else "block")

    monkeypatch.setattr(slots, "write_at", slow)
    other = World.at(tmp_path / "other")
    await other.open()
    assert await asyncio.to_thread(entered.wait, 10)
    order.clear()
    await other.begin(1, place=0)
    writing = asyncio.create_task(other.write([1], segment=1, slots=[0]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not writing.done()
    gate.set()
    assert await writing == [READY]
    assert order[:2] == ["zeros", "block"]
    assert await other.read([1]) == [content(1)]
    await other.store.close(release=False)


async def test_a_disk_that_refuses_zeros_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If zeros cannot be written, one notice says so, and blocks are stored as usual."""
    with monkeypatch.context() as patch:
        patch.setattr(slots, "write_at", raiser(errno.EIO))
        await asyncio.wait_for(world.store._zeroing.done(), 10)
    assert sum("zeroed ahead" in notice for notice in world.store.notices) == 1
    await world.begin(1)
    assert await world.write([1], segment=1, slots=[0]) == [READY]
    assert await world.read([1]) == [content(1)]


async def test_without_a_thread_for_zeros_the_store_closes_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a thread for zeros none are written, and stored blocks survive a restart."""
    monkeypatch.setattr(zeroing, "START_S", 0.05)
    store = World.at(tmp_path / "other")
    await store.open()
    store.store._zeroing._threads.shutdown()  # as if the system gives no more threads
    await store.begin(1)
    assert await store.write([1], segment=1, slots=[0]) == [READY]
    await asyncio.wait_for(store.store._zeroing.done(), 10)
    await store.store.close(release=False)
    other = World.at(tmp_path / "other")
    await other.open()
    assert await other.read([1]) == [content(1)]
    await other.store.close(release=False)


async def test_where_segments_lived_before_is_left_alone(tmp_path: Path, world: World) -> None:
    """After a restart, zeroing skips every place that held a segment."""
    for place in range(PLACES):
        await world.begin(place + 1, place=place)
    await world.store.close(release=False)
    other = World.at(tmp_path / "store")
    await other.open()
    before = unwritten(other)
    await asyncio.wait_for(other.store._zeroing.done(), 10)
    assert (unwritten(other), other.store.written_bytes) == (before, 0)
    await other.store.close(release=False)
