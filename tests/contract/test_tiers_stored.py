"""The promises of every stored tier: one suite over O_DIRECT and over the page cache."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.unit.tiers.store_world import (
    CLASS_BYTES,
    LENGTH,
    PAGES,
    PLACES,
    World,
    content,
    extents_of,
    metas_of,
    pages,
    segment,
    spec,
    tables_of,
    told,
)
from tierd.core.formats.model import BlockStatus
from tierd.core.plan import Plan
from tierd.errors import AlreadyOwned, InvalidArgument, TierFailed
from tierd.tiers.store.slots import TABLE_SLICES, SlotFile
from tierd.tiers.tier import StoredTier

READY, FAILED, CORRUPT = BlockStatus.READY, BlockStatus.FAILED, BlockStatus.CORRUPT
PLACE = ["tier", "segment", "slot", "length", "offset", "generation"]
MODES = {"o_direct": "on", "buffered": "off"}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["known", "unknown"])
async def world(request: pytest.FixtureRequest, mode: str, tmp_path: Path) -> AsyncIterator[World]:
    """A store that gets known slice tables, or unknown ones."""
    made = again(mode, tmp_path)
    made.knows = request.param
    await made.open()
    await made.begin(1)
    yield made
    await made.store.close(release=False)


def again(mode: str, path: Path, **options: object) -> World:
    return World.at(path / "store", direct=MODES[mode], **options)


async def reopened(world: World, mode: str, path: Path, **options: object) -> World:
    await world.store.close(release=False)
    other = again(mode, path, **options)
    other.next_generation = world.next_generation
    return other


async def test_store_is_a_stored_tier(world: World, mode: str) -> None:
    """The store has a stored tier's interface and reports its mode."""
    assert isinstance(world.store, StoredTier)
    assert world.store.mode == mode
    assert not world.store.health().fault
    await world.store.probe()


async def test_what_was_written_is_read_back(world: World) -> None:
    """Blocks come back byte for byte with their slice tables, in any order of the query."""
    slots = [5, 0, 1, 2, 7]
    assert await world.write(range(5), segment=1, slots=slots) == [READY] * 5
    order = [3, 0, 4, 2, 1]
    assert await world.read(order) == [content(key) for key in order]


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, CLASS_BYTES - 4096])
async def test_every_length_that_fits_is_kept(world: World, length: int) -> None:
    """A block of one byte and one that fills its slot come back whole; their neighbours too."""
    assert await world.write([1, 2, 3], segment=1, slots=[0, 1, 2], length=length) == [READY] * 3
    assert await world.read([1, 2, 3]) == [content(key, length) for key in (1, 2, 3)]


@pytest.mark.parametrize("length", [LENGTH, LENGTH - 1])
async def test_a_page_that_is_too_short_is_refused(world: World, length: int) -> None:
    """A source or target shorter than its block's page raises, and nothing is written."""
    extents, metas = extents_of(1, [3], generation=1), metas_of([9])
    page = pages(1)[0][:length]
    with pytest.raises(InvalidArgument, match=f"page 0: {length} bytes, its block of {LENGTH} takes"):
        await world.store.write(extents, metas, told(tables_of([9])), [page])
    with pytest.raises(InvalidArgument, match="give a view of the whole page"):
        await world.store.read(extents, [page], metas)
    assert not world.store.holds(extents).any()


async def test_what_does_not_fit_is_failed_alone(world: World) -> None:
    """A block that does not fit its slot, table or segment is FAILED; the others are stored."""
    extents = np.concatenate([extents_of(1, [0, 1, PAGES, 2], generation=1), extents_of(77, [0], generation=9)])
    extents["length"][0] = CLASS_BYTES
    tables = tables_of(range(5))
    tables[1] = np.zeros(TABLE_SLICES + 1, dtype=np.uint64)
    statuses = await world.store.write(extents, metas_of(range(5)), told(tables), pages(5))
    assert statuses.tolist() == [FAILED, FAILED, FAILED, READY, FAILED]


async def test_synced_blocks_survive_in_the_next_life(world: World, mode: str, tmp_path: Path) -> None:
    """The next open finds the written blocks with full records, at their places, and reads them."""
    await world.begin(2, place=3)
    await world.write([1, 2], segment=1, slots=[4, 6])
    await world.write([3], segment=2, slots=[0])
    other = await reopened(world, mode, tmp_path)
    found = await other.open()
    assert sorted((s.segment, s.slot, s.class_bytes, s.pages, s.domain) for s in found.segments) == [
        (1, 0, CLASS_BYTES, PAGES, 1),
        (2, 3, CLASS_BYTES, PAGES, 1),
    ]
    assert set(other.held) == {1, 2, 3}
    for key, (extent, meta) in other.held.items():
        assert extent[PLACE].tolist() == world.held[key][0][PLACE].tolist()
        assert extent["page"] == -1
        assert meta["digest"].tolist() == world.held[key][1]["digest"].tolist()
    assert await other.read([1, 2, 3]) == [content(key) for key in (1, 2, 3)]
    await other.store.close(release=False)


async def test_freed_blocks_are_gone_in_the_next_life(world: World, mode: str, tmp_path: Path) -> None:
    """A freed block is not found again; its neighbours are."""
    await world.write([1, 2, 3], segment=1, slots=[0, 1, 2])
    world.free([2])
    other = await reopened(world, mode, tmp_path)
    await other.open()
    assert set(other.held) == {1, 3}
    await other.store.close(release=False)


async def test_slot_that_was_reused_shows_the_new_block_only(world: World, mode: str, tmp_path: Path) -> None:
    """After a slot's reuse the old block reads as FAILED; now and later only the new one is
    served."""
    await world.write([1], segment=1, slots=[0])
    old = world.held[1]
    world.free([1])
    await world.write([2], segment=1, slots=[0])
    world.held[1] = old
    assert await world.read([1, 2]) == [FAILED, content(2)]
    other = await reopened(world, mode, tmp_path)
    await other.open()
    assert set(other.held) == {2}
    await other.store.close(release=False)


async def test_headers_are_checked_without_payloads(world: World) -> None:
    """The check of slots gives the same statuses as a read, but ignores payloads."""
    await world.write([1, 2, 3, 4], segment=1, slots=[0, 1, 2, 5])
    await world.begin(2, place=1)
    await world.write([5], segment=2, slots=[0])
    keys = [5, 4, 1, 3, 2]
    extents = np.concatenate([world.held[key][0] for key in keys])
    path = world.store._opened.files[0].path
    flip(path, 2 * CLASS_BYTES + 8)
    flip(path, 1 * CLASS_BYTES + 4096 + 8)
    metas = metas_of(keys)
    assert (await world.store.check(extents, metas)).tolist() == [READY, READY, READY, CORRUPT, READY]
    extents["generation"][1] += 1  # a page that the store does not hold
    extents["segment"][2] = 77
    metas[4] = metas_of([9])[0]
    assert (await world.store.check(extents, metas)).tolist() == [READY, FAILED, FAILED, CORRUPT, CORRUPT]


@pytest.mark.parametrize("bad", [(1,), (2, 3), (0, 1, 2), (3,)])
async def test_a_header_that_cannot_be_read_costs_its_block_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...]
) -> None:
    """A check returns FAILED for unreadable slots, counted as failed calls, and READY for
    others."""
    await world.write([1, 2, 3, 4], segment=1, slots=[0, 1, 2, 3])
    extents, metas = (np.concatenate([world.held[key][i] for key in (1, 2, 3, 4)]) for i in (0, 1))
    io = world.store._opened.io
    real = io.read

    def read(file: SlotFile, offset: int, buffers: Sequence[memoryview]) -> int:
        if offset // CLASS_BYTES in bad:
            raise OSError(errno.EIO, "bad sector")
        return real(file, offset, buffers)

    monkeypatch.setattr(io, "read", read)
    world.store._headers._free.clear()  # its buffers hold the written headers
    expected = [FAILED if slot in bad else READY for slot in range(4)]
    assert (await world.store.check(extents, metas)).tolist() == expected
    assert world.store.health().read_errors == len(bad)


@pytest.mark.parametrize("at", [30, 200, 255, 256, 263])
async def test_a_damaged_header_is_corrupt_without_a_look_at_the_payload(world: World, at: int) -> None:
    """A flipped bit in an unused part of a record, its checksum or its table makes it CORRUPT."""
    await world.write([1, 2], segment=1, slots=[0, 1])
    extents = np.concatenate([world.held[key][0] for key in (1, 2)])
    flip(world.store._opened.files[0].path, CLASS_BYTES + at)
    assert (await world.store.check(extents, metas_of([1, 2]))).tolist() == [READY, CORRUPT]
    assert (await world.store.read(extents, pages(2), metas_of([1, 2]))).statuses.tolist() == [READY, CORRUPT]


async def test_payloads_lie_where_the_store_says(world: World) -> None:
    """payloads returns a held block's file and offset, and nothing for a block that is gone."""
    await world.write([1, 2], segment=1, slots=[0, 6])
    extents = np.concatenate([world.held[key][0] for key in (2, 1)] + [extents_of(77, [0], generation=1)])
    where = world.store.payloads(extents)
    for key, file, offset in zip((2, 1), where.files[:2], where.offsets[:2], strict=True):
        assert file is not None and world.store.has_file(file) and offset % 4096 == 0
        assert file.path.read_bytes()[offset : offset + LENGTH] == content(key)
    assert where.files[2] is None and not world.store.has_file(SlotFile(Path(), 0))


def flip(path: Path, at: int) -> None:
    """Flips one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def test_segment_that_begins_ends_the_one_at_its_place(world: World, mode: str, tmp_path: Path) -> None:
    """Blocks of the former segment at a place are unreadable, now and in the next life."""
    await world.write([1], segment=1, slots=[0])
    await world.begin(2, class_bytes=CLASS_BYTES // 2, pages=PAGES * 2)
    assert await world.read([1]) == [FAILED]
    await world.write([2], segment=2, slots=[3], length=9_000)
    other = await reopened(world, mode, tmp_path)
    found = await other.open()
    assert [s.segment for s in found.segments] == [2]
    assert set(other.held) == {2}
    assert await other.read([2]) == [content(2, 9_000)]
    await other.store.close(release=False)


async def test_numbers_of_a_former_life_are_never_used_again(world: World, mode: str, tmp_path: Path) -> None:
    """The next life's first segment id and generation are above every number seen, on any tier."""
    foreign = extents_of(9, [0], generation=1 << 40)
    foreign["tier"] = 0
    world.store.apply(Plan(segments=[segment(123_456, place=1)], reserved=foreign))
    other = await reopened(world, mode, tmp_path)
    found = await other.open()
    assert found.next_segment > 123_456
    assert found.next_generation > 1 << 40
    await other.store.close(release=False)


async def test_namespace_records_come_back_in_order(world: World, mode: str, tmp_path: Path) -> None:
    """Opaque records survive lives, once each, oldest first."""
    world.store.note_namespaces([b"one", b"two"])
    await world.store.keep_namespace(b"one")
    await world.write([1], segment=1, slots=[0])
    other = await reopened(world, mode, tmp_path)
    assert (await other.open()).namespaces == [b"one", b"two"]
    await other.store.keep_namespace(b"three")
    third = await reopened(other, mode, tmp_path)
    assert (await third.open()).namespaces == [b"one", b"two", b"three"]
    await third.store.close(release=False)


async def test_second_owner_is_refused(world: World, mode: str, tmp_path: Path) -> None:
    """A directory in use cannot be opened again."""
    with pytest.raises(AlreadyOwned):
        await again(mode, tmp_path).open()


async def test_smaller_capacity_drops_what_has_no_room(world: World, mode: str, tmp_path: Path) -> None:
    """With fewer places the store drops segments with a notice and their files; others stay."""
    for place in (1, 2, 3):
        await world.begin(1 + place, place=place)
        await world.write([1 + place], segment=1 + place, slots=[0])
    other = await reopened(world, mode, tmp_path, spec=spec(places=2))
    await other.open()
    kept = set(other.held)
    assert len(kept) == 2
    assert kept < {2, 3, 4}
    assert any("2 segments with 1 blocks" in notice for notice in other.store.notices)
    assert len(list((tmp_path / "store").glob("*.slots"))) == 2
    await other.store.close(release=False)
    third = again(mode, tmp_path)
    await third.open()
    assert set(third.held) == kept
    await third.store.close(release=False)


async def test_segment_beyond_the_capacity_is_refused(world: World) -> None:
    """Preparing a segment at a place beyond the capacity raises TierFailed."""
    with pytest.raises(TierFailed, match="capacity"):
        await world.store.prepare([segment(5, place=PLACES)])


async def test_released_store_leaves_no_file(mode: str, tmp_path: Path) -> None:
    """A close with release removes every file of the store."""
    world = again(mode, tmp_path)
    await world.open()
    await world.store.close(release=True)
    assert list((tmp_path / "store").iterdir()) == []


async def test_closed_store_takes_nothing(mode: str, tmp_path: Path) -> None:
    """After a close, reads and writes are FAILED, and a second close does nothing."""
    world = again(mode, tmp_path)
    await world.open()
    await world.begin(1)
    await world.store.close(release=False)
    assert await world.write([1], segment=1, slots=[0]) == [FAILED]
    await world.store.close(release=False)


async def test_many_batches_at_once_do_not_mix(world: World) -> None:
    """Concurrent batches of writes and reads each get their own bytes."""
    for place in range(1, PLACES):
        await world.begin(place + 1, place=place)
    jobs = [
        world.write([10 * s + i for i in range(PAGES)], segment=s, slots=range(PAGES)) for s in range(1, PLACES + 1)
    ]
    assert await asyncio.gather(*jobs) == [[READY] * PAGES] * PLACES
    keys = [[10 * s + i for s in range(1, PLACES + 1)] for i in range(PAGES)]
    assert await asyncio.gather(*(world.read(k) for k in keys)) == [[content(key) for key in k] for k in keys]
