"""Loads of blocks in parts, from a real store to a real arena."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.compiled import check_library
from tests.unit.tiers.arena.test_arena import CLASS_BYTES, SPEC, opened, segment
from tests.unit.tiers.store_world import CORRUPT, FAILED, LAYERS, READY, World, content, slot_file
from tierd import failpoint, loads_by_layer
from tierd.core.formats.meta import META
from tierd.core.formats.model import TRANSFER, Reason, StructArray
from tierd.core.plan import Plan
from tierd.mover import Mover
from tierd.tiers.arena.arena import Arena
from tierd.tiers.io.calls import HangError
from tierd.tiers.store import slots
from tierd.tiers.store.moves import PartRun, _Group

SOON_S = 10.0
LENGTH = LAYERS * 8192
SHORT = 9_000
"""Bytes of a block whose layers are too thin for slices of their own."""
UNEVEN = LAYERS * 6000
"""Bytes of a block whose layers begin within pages of the disk."""


@pytest.fixture(autouse=True, params=["library", "plain"])
def _small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts may be as small as a layer of these blocks. Both forms of reading, if the library is built."""
    monkeypatch.setattr(loads_by_layer, "PART_BYTES", 4096)
    monkeypatch.setattr(loads_by_layer, "PART_BATCH_BYTES", 4096)
    if request.param == "plain":
        monkeypatch.setattr(slots, "library", None)
    else:
        check_library()


class Loads:
    """Blocks in a store, and pages for them in an arena."""

    def __init__(self, store: World, arena: Arena) -> None:
        self.store, self.arena = store, arena
        self._mover = Mover([arena, None, store.store], hash_threads=1, link_limit=1)  # type: ignore[list-item]

    async def load(
        self, keys: Sequence[int], *, generation: int = 1, wrong: int | None = None
    ) -> tuple[StructArray, list[int]]:
        """Target pages EXTENT [n], and the statuses of a load by layer. wrong: row with another
        block's digest."""
        batch = np.zeros(len(keys), TRANSFER)
        for row, key in zip(batch, keys, strict=True):
            row["source"] = self.store.held[key][0][0]
        target = batch["target"]
        target["segment"], target["slot"] = 1, np.arange(len(keys))
        target["offset"], target["length"] = target["slot"] * CLASS_BYTES, batch["source"]["length"]
        target["generation"] = generation + np.arange(len(keys))
        batch["reason"], batch["by_layer"] = Reason.DEMAND, True
        self.arena.apply(Plan(reserved=target))
        metas = np.concatenate([self.store.held[key][1] for key in keys])
        if wrong is not None:
            metas["digest"][wrong] ^= 1
        return target, (await self._mover.copy(batch, metas)).tolist()

    def counts(self, pages: StructArray) -> list[int]:
        """The counts of slices in the catalogue."""
        catalogue = self.arena._segments[1].catalogue
        assert catalogue is not None
        return [int(count) for count in catalogue._metas["slices"][pages["slot"]]]

    async def close(self) -> None:
        await self.store.store.close(release=False)
        await self.arena.close(release=True)


async def made(tmp_path: Path, directory: Path, *, queue_depth: int = 16) -> Loads:
    """Blocks 1 and 2 have all layers as slices; block 3 is short, and the layers of block 4 are uneven."""
    store = World.at(tmp_path / "store", queue_depth=queue_depth)
    await store.open()
    await store.begin(1)
    for slot, (key, length) in enumerate(((1, LENGTH), (3, SHORT), (4, UNEVEN), (2, LENGTH))):
        assert await store.write([key], segment=1, slots=[slot], length=length) == [READY]
    arena, _ = await opened(directory, SPEC, segment(1, writer=0))
    return Loads(store, arena)


@pytest.mark.parametrize("part", range(LAYERS))
async def test_parts_may_come_in_any_order(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """A block is right if a part comes after the next one, and clients are told in order."""
    loads, told, inner = await made(tmp_path, directory), told_of(monkeypatch), PartRun._read
    later = threading.Event()

    def read(job: PartRun, group: _Group) -> None:
        number = group.part.number
        if number == part and part < LAYERS - 1:
            assert later.wait(SOON_S)
        inner(job, group)
        if number == part + 1:
            later.set()

    monkeypatch.setattr(PartRun, "_read", read)
    pages, statuses = await loads.load([1])
    assert [each[1] for each in told] == [1, 2, 3, 4, 5]
    assert statuses == [READY]
    assert bytes(loads.arena.view(pages[0])[:LENGTH]) == content(1, LENGTH)
    await loads.close()


async def test_blocks_of_several_lengths_come_together(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks with fewer layers than the load has parts are right, and come whole with the first part."""
    loads, told = await made(tmp_path, directory), told_of(monkeypatch)
    pages, statuses = await loads.load([3, 1, 2])
    assert statuses == [READY] * 3
    for page, key, length in zip(pages, (3, 1, 2), (SHORT, LENGTH, LENGTH), strict=True):
        assert bytes(loads.arena.view(page)[:length]) == content(key, length)
    assert loads.counts(pages) == [1, LAYERS, LAYERS]
    assert told == [{1: 1, 2: 1, 3: 1}, *({2: n, 3: n} for n in range(2, LAYERS + 1))]
    await loads.close()


async def test_blocks_whose_layers_share_pages_come_whole(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts begin at pages of the disk, so a block whose layers do not comes with the first part."""
    loads, told = await made(tmp_path, directory), told_of(monkeypatch)
    pages, statuses = await loads.load([1, 4])
    assert statuses == [READY, READY]
    assert told == [{1: 1, 2: LAYERS}, *({1: n} for n in range(2, LAYERS + 1))]
    assert bytes(loads.arena.view(pages[1])[:UNEVEN]) == content(4, UNEVEN)
    await loads.close()


async def test_counts_never_pass_what_is_there(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever clients are told of slices, the pages have their bytes, and they are told once a part."""
    loads, told, inner = await made(tmp_path, directory), list[list[int]](), Arena.note_arrived

    def note(arena: Arena, extents: StructArray, counts: np.ndarray) -> None:
        inner(arena, extents, counts)
        told.append(counts.tolist())
        for page, key, count in zip(extents, (1, 2), counts.tolist(), strict=True):
            end = LENGTH // LAYERS * count
            assert bytes(arena.view(page)[:end]) == content(key, LENGTH)[:end]

    monkeypatch.setattr(Arena, "note_arrived", note)
    _, statuses = await loads.load([1, 2])
    assert statuses == [READY, READY]
    assert told == [[n, n] for n in range(1, LAYERS + 1)]
    await loads.close()


def told_of(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> list[dict[int, int]]:
    """Fills with what clients are told of: generation to count. then: called each time."""
    told, inner = list[dict[int, int]](), Arena.note_arrived

    def note(arena: Arena, extents: StructArray, counts: np.ndarray) -> None:
        inner(arena, extents, counts)
        told.append(dict(zip(extents["generation"].tolist(), counts.tolist(), strict=True)))
        then()

    monkeypatch.setattr(Arena, "note_arrived", note)
    return told


async def test_a_wrong_byte_is_not_told(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block with a wrong byte in its third layer two layers are told, and it is CORRUPT."""
    loads, told = await made(tmp_path, directory), told_of(monkeypatch)
    path = slot_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.find(content(2, LENGTH)[:64]) + 2 * LENGTH // LAYERS + 5] ^= 1
    path.write_bytes(data)
    _, statuses = await loads.load([1, 2])
    assert statuses == [READY, CORRUPT]
    assert [each.get(2) for each in told] == [1, 2, None, None, None]
    await loads.close()


async def test_another_blocks_bytes_are_not_told(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that fit the slot's own table, but not the digest asked for, are told to nobody."""
    loads, told = await made(tmp_path, directory), told_of(monkeypatch)
    _, statuses = await loads.load([1, 2], wrong=1)
    assert statuses == [READY, CORRUPT]
    assert not any(2 in each for each in told)
    await loads.close()


async def test_a_part_that_cannot_be_read_fails_its_block_alone(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its file ends within the third part, a block is FAILED, not CORRUPT, and gets no further layers."""
    loads, told, path = await made(tmp_path, directory), told_of(monkeypatch), slot_file(tmp_path)
    os.truncate(path, path.read_bytes().find(content(2, LENGTH)[:64]) + 2 * LENGTH // LAYERS + 4096)
    _, statuses = await loads.load([1, 2])
    assert statuses == [READY, FAILED]
    assert [each.get(2) for each in told] == [1, 2, None, None, None]
    await loads.close()


async def test_a_read_error_fails_its_block_alone(tmp_path: Path, directory: Path) -> None:
    """If the disk refuses one read, its block is FAILED and the other one comes."""
    loads = await made(tmp_path, directory)
    failpoint.arm("nvme.slots.before_read", "error:EIO@1x1")
    _, statuses = await loads.load([1, 2])
    failpoint.disarm()
    assert sorted(statuses) == sorted([READY, FAILED])
    assert loads.store.store.health().read_errors == 1
    await loads.close()


async def test_a_load_that_is_given_up_ends(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk has no turn for the second part, later ones are not read, and the block is FAILED."""
    loads, told, inner = await made(tmp_path, directory, queue_depth=1), told_of(monkeypatch), PartRun._read

    def read(job: PartRun, group: _Group) -> None:
        if group.part.number:
            raise HangError
        inner(job, group)

    monkeypatch.setattr(PartRun, "_read", read)
    async with asyncio.timeout(SOON_S):
        _, statuses = await loads.load([1])
    assert statuses == [FAILED] and told == [{1: 1}]
    assert "hangs" in loads.store.store.health().last_error
    await loads.close()


async def test_a_cancelled_load_ends_after_its_reads(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled load ends only when no thread writes to its pages any more."""
    loads, inner = await made(tmp_path, directory, queue_depth=1), PartRun._read
    begun, go_on, ended = threading.Event(), threading.Event(), list[int]()

    def read(job: PartRun, group: _Group) -> None:
        begun.set()
        assert go_on.wait(SOON_S)
        inner(job, group)
        ended.append(group.part.number)

    monkeypatch.setattr(PartRun, "_read", read)
    load = asyncio.create_task(loads.load([1]))
    assert await asyncio.to_thread(begun.wait, SOON_S)
    for _ in range(2):
        load.cancel()
        await asyncio.sleep(0)
    assert not load.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert ended == list(range(LAYERS))
    await loads.close()


async def test_a_slot_that_is_given_up_meanwhile_fails(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that the store drops during its load is FAILED, as with other reads."""
    loads = await made(tmp_path, directory)
    told = told_of(monkeypatch, lambda: loads.store.free([2]) if 2 in loads.store.held else None)
    _, statuses = await loads.load([1, 2])
    assert told and statuses == [READY, FAILED]
    await loads.close()


async def test_a_reused_page_counts_nothing(tmp_path: Path, directory: Path) -> None:
    """The count of a page's former block is gone when the page is reserved again."""
    loads = await made(tmp_path, directory)
    pages, _ = await loads.load([1, 2])
    again = pages.copy()
    again["generation"] += 2
    loads.arena.apply(Plan(reserved=again))
    assert loads.counts(pages) == [0, 0]
    await loads.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=st.integers(1, 200), blocks=st.integers(1, 600), layer_bytes=st.sampled_from((4096, 6144, 16384, 65536)))
def test_the_first_layers_come_first(layers: int, blocks: int, layer_bytes: int) -> None:
    """Parts have at least a layer each, begin at pages and end with all layers. None is longer than
    two of their mean."""
    metas = np.zeros(blocks, META)
    metas["stored_length"], metas["layers"] = layers * layer_bytes, layers
    stops = loads_by_layer.layer_stops(metas)
    sizes = np.diff([0, *stops])
    assert (sizes > 0).all() and stops[-1] in (1, layers)  # 1: too many layers for a slice table
    step = 2 if layer_bytes % 4096 else 1
    assert all(stop * layer_bytes % 4096 == 0 for stop in stops[:-1])
    assert len(stops) in (1, 2, stops[-1] // step) or sizes[:2].sum() <= sizes.max() + step
    assert len(stops) <= loads_by_layer.MOST_PARTS and sizes.max() <= 2 * step * np.ceil(stops[-1] / step / len(stops))
