"""Adoption: blocks and segments that tiers report at start enter the core."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cache.world import CONFIG, SOON_S, World, directories, opened
from tests.unit.core.kit import HOST, NVME, Kit, chain, tier
from tests.unit.core.test_upkeep import survivors
from tierd.cache.operator import Operator
from tierd.core.formats.block import NamespaceSpec
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import EXTENT, Durability, SegmentAssignment
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.server import adoption
from tierd.tiers.tier import FoundBlocks, Recovered


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), max_size=12),
    st.sets(st.integers(1, 9)),
    st.integers(1, 8),
)
def test_pieces_are_in_order(runs: list[tuple[int, int]], known: set[int], size: int) -> None:
    """Each row comes once and in order, each segment once and first; no piece exceeds its limit."""
    metas = new_meta(sum(count for _, count in runs))
    metas["position"] = np.arange(len(metas))
    metas["segment"] = np.repeat([segment for segment, _ in runs], [count for _, count in runs])
    segments = [SegmentAssignment(0, n, n, 1, 4096, 8, 0, None, False) for n in sorted(known)]
    extents = np.zeros(len(metas), EXTENT)
    extents["offset"] = np.arange(len(metas))
    found = Recovered(segments, extents, metas)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adoption, "ADOPTED_BLOCKS", size)
        pieces = list(adoption.pieces_of(found))
    assert [int(row["position"]) for _, _, rows in pieces for row in rows] == list(range(len(metas)))
    assert [int(row["offset"]) for _, rows, _ in pieces for row in rows] == list(range(len(metas)))
    assert pieces[0][0] == segments
    assert not any(given_ for given_, _, _ in pieces[1:])
    assert all(len(rows) <= size for _, _, rows in pieces)


def test_books_are_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks adopted in small pieces have the same places and the same eviction order."""
    specs, names = (tier(HOST, 16),), chain("a", 16)
    old = Kit(*specs)
    old.put(names)
    segments, extents, metas = survivors(old, 0)
    found = Recovered(segments, extents, metas)
    books = []
    for size in (1 << 16, 3):
        monkeypatch.setattr(adoption, "ADOPTED_BLOCKS", size)
        assert len(list(adoption.pieces_of(found))) == (1 if size > 16 else 6)
        kit = Kit(*specs)
        for given_, there, rows in adoption.pieces_of(found):
            assert kit.core.adopt(0, segments=given_, extents=there, metas=rows, now=0.0).all()
        kit.core.close_empty(0)
        kit.core.check()
        there = kit.core.extents(kit.ids(names), tier=0)
        gone = [kit.took(kit.reserve(chain(f"b{i}", 1)).plan).freed["extent"]["slot"].tolist() for i in range(3)]
        books.append((there["segment"].tolist(), there["slot"].tolist(), gone))
    assert books[0] == books[1]


async def test_blocks_that_go_while_the_others_come_take_none_with_them() -> None:
    """Evictions during a load affect no later blocks of the segment; empty segments close only at the end."""
    specs, names = (tier(HOST, 8), tier(NVME, 8)), chain("a", 6)
    old = Kit(*specs)
    old.put(names)
    old.took(old.core.persist(old.ids(names), now=old.tick()))
    old.land()
    segments, extents, metas = survivors(old, 1)
    new, registry = Kit(*specs), NamespaceRegistry()
    registry.open(NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096), tenant="t")
    pieces = [FoundBlocks(extents[rows], metas[rows]) for rows in ([0, 4, 5], [1, 2, 3])]
    assert [len(np.unique(piece.metas["segment"])) for piece in pieces] == [2, 1]

    def second() -> FoundBlocks:
        gone = new.core.blocks(tier=1)
        assert len(new.took(new.core.evict(gone, tier=1, now=new.tick())).freed) == 3
        new.core.check()
        return pieces[1]

    found = Recovered(segments, extents[:0], metas[:0], more=iter([lambda: pieces[0], second]), more_at_most=6)
    loading = adoption.Adoption(new.core, 1, found, registry=registry)
    loading.begin(now=0.0)
    await loading.finish(lambda: 0.0)
    assert len(new.core.segments(1)) == 2
    new.core.close_empty(1)
    new.core.check()
    assert len(new.core.segments(1)) == 1
    assert new.tiers_of(names[1:4]) == [1, 1, 1]


async def test_the_segments_of_a_store_that_is_read_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A serving daemon's core learns a store's segments in bounded pieces, with loop turns between."""
    monkeypatch.setattr(adoption, "PAGES", 16)
    kit = Kit(tier(NVME, 64))
    segments = [SegmentAssignment(0, n, n + 1, 1, 4096, 8, 0, None, False) for n in range(5)]
    found = Recovered(segments, np.zeros(0, EXTENT), new_meta(0), more_at_most=1)
    loading = adoption.Adoption(kit.core, 0, found, registry=NamespaceRegistry())
    loading.begin(now=0.0)
    task, seen = asyncio.create_task(loading.finish(lambda: 0.0)), list[int]()
    while not task.done():
        seen.append(len(kit.core.segments(0)))
        await asyncio.sleep(0)
    assert list(dict.fromkeys(seen)) == [0, 2, 4, 5]
    assert kit.core.segments(0) == segments


async def test_who_gives_loading_up_waits_for_the_thread_that_reads() -> None:
    """A cancelled load ends only when no thread reads the index, so its files can be closed and removed."""
    begun, goes_on, has_ended = threading.Event(), threading.Event(), threading.Event()

    def read() -> Iterator[Callable[[], FoundBlocks]]:
        begun.set()
        goes_on.wait(SOON_S)
        has_ended.set()
        yield lambda: FoundBlocks(np.zeros(0, EXTENT), new_meta(0))

    found = Recovered([], np.zeros(0, EXTENT), new_meta(0), more=read(), more_at_most=1)
    loading = adoption.Adoption(Kit(tier(NVME, 8)).core, 0, found, registry=NamespaceRegistry())
    loading.begin(now=0.0)
    task = asyncio.create_task(loading.finish(lambda: 0.0))
    await asyncio.to_thread(begun.wait, SOON_S)
    task.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    goes_on.set()
    await asyncio.wait([task])
    assert task.cancelled() and has_ended.is_set()


FEW_SLOTS = CONFIG.replace('capacity = "8 MiB"\nsegment = "1 MiB"', 'capacity = "128 KiB"\nsegment = "64 KiB"')
"""The store has room for two segments of five slots."""


async def put_as(world: World, hashes: np.ndarray, fill: int, durability: Durability) -> None:
    """Puts blocks that are filled with this byte."""
    reserved = await world.reserve(hashes)
    for extent in reserved.extents[0]:
        world.page(extent)[:] = bytes([fill]) * int(extent["length"])
    await world.commit(reserved.reservation, durability=durability)


async def test_a_store_forgets_what_the_books_know_newer() -> None:
    """If the power fails before an eviction is durable, the next start keeps memory's newer blocks.
    They replace the store's old ones for good, also after a flush and a loss of memory."""
    ahead, beside, after, anew = (chain(name, count) for name, count in (("a", 5), ("b", 1), ("c", 1), ("x", 4)))
    with directories() as places:
        nvme, kept = Path(places["root"], "nvme"), Path(places["root"], "kept")
        async with opened(FEW_SLOTS, places=places) as world:
            operator = Operator(world.cache)
            await put_as(world, ahead, 1, Durability.DURABLE)
            await put_as(world, beside, 1, Durability.DURABLE)
            await put_as(world, anew, 1, Durability.DURABLE)  # fills the second segment
            await operator.evict([name.tobytes().hex() for name in ahead], "")
            await put_as(world, after, 1, Durability.DURABLE)  # a third segment, at the place of the first
            shutil.copytree(nvme, kept)
            await operator.evict([name.tobytes().hex() for name in anew], "")
            await put_as(world, anew, 2, Durability.MEMORY)
        shutil.rmtree(nvme)
        shutil.move(kept, nvme)
        async with opened(FEW_SLOTS, places=places) as world:
            assert (await Operator(world.cache).flush(timeout_s=SOON_S)).left == 0
        for name in os.listdir(places["arena"]):
            shutil.rmtree(os.path.join(places["arena"], name))
        async with opened(FEW_SLOTS, places=places) as world:
            lease = await world.acquire(anew)
            assert [bytes(world.page(extent)[:1]) for extent in lease.served.extents] == [b"\x02"] * len(anew)
