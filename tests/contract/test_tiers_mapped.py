"""The promises of every mapped tier: one suite over the host arena and the "cpu" device arena."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.tiers.store_world import table_digest
from tierd.checksum import slice_sums
from tierd.core.formats.layout import RETIRED, generation_offset
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import EXTENT, FREED, UNVERIFIED, SegmentAssignment, StructArray, TierKind, TierSpec
from tierd.core.plan import Plan
from tierd.errors import AlreadyOwned, TierFailed
from tierd.tiers.arena.arena import Arena
from tierd.tiers.tier import MappedTier, Tier

SEGMENT_BYTES = 1 << 20
CLASS_BYTES = 64 << 10
PAGES = SEGMENT_BYTES // CLASS_BYTES
PLACES = 4


@dataclass(frozen=True)
class Medium:
    """Makes one mapped tier, again and again, at the same place."""

    position: int
    make: Callable[[], MappedTier]

    def segment(self, number: int, *, place: int = 0, **changes: object) -> SegmentAssignment:
        given = SegmentAssignment(self.position, place, number, 1, CLASS_BYTES, PAGES, 7, None, False)
        return replace(given, **changes)  # type: ignore[arg-type]

    def pages(self, segment: int, *slots: int, generation: int = 1) -> StructArray:
        """Extents of these slots, with generations that count up from the given one."""
        rows = np.zeros(len(slots), dtype=EXTENT)
        rows["tier"], rows["segment"], rows["slot"], rows["length"] = self.position, segment, slots, 60_000
        rows["offset"] = np.array(slots, dtype=np.uint64) * CLASS_BYTES
        rows["generation"] = np.arange(len(slots)) + generation
        return rows


@pytest.fixture
def directory() -> Iterator[str]:
    """A folder in memory."""
    path = tempfile.mkdtemp(dir="/dev/shm", prefix="tierd-test-")
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["host", "device"])
def medium(request: pytest.FixtureRequest, directory: str) -> Medium:
    kind, position = (TierKind.HOST, 1) if request.param == "host" else (TierKind.DEVICE, 0)
    spec = TierSpec(kind, 0, PLACES * SEGMENT_BYTES, SEGMENT_BYTES, writer_owned=True)
    return Medium(position, lambda: Arena(spec, position=position, instance="t", arena_dir=directory))


def freed(extents: StructArray) -> StructArray:
    rows = np.zeros(len(extents), dtype=FREED)
    rows["extent"], rows["was_ready"] = extents, True
    return rows


def metas_of(extents: StructArray, *, time_ms: int = 5) -> StructArray:
    metas = new_meta(len(extents))
    metas["stored_length"] = metas["logical_length"] = extents["length"]
    metas["hash"][:, 0] = extents["slot"]
    metas["namespace"], metas["tokens"], metas["time_ms"] = 3, 16, time_ms
    metas["position"] = np.arange(len(extents))
    return metas


def fill(tier: MappedTier, extents: StructArray) -> list[np.ndarray]:
    """Writes distinct bytes into the pages and returns their slice tables."""
    tables = []
    for row in extents:
        view = tier.view(row)
        view[:] = np.random.default_rng(int(row["generation"])).bytes(CLASS_BYTES)
        tables.append(slice_sums(view, [30_000, 30_000]))
    return tables


def files(directory: str) -> set[str]:
    """Names of all files below a directory."""
    return {path.name for path in Path(directory).rglob("*") if path.is_file()}


def directories(directory: str) -> set[str]:
    """Names of all directories below a directory."""
    return {path.name for path in Path(directory).rglob("*") if path.is_dir()}


async def begun(medium: Medium, *segments: SegmentAssignment) -> MappedTier:
    tier = medium.make()
    await tier.open()
    tier.apply(Plan(segments=list(segments)))
    await tier.prepare(segments)
    return tier


async def test_new_tier_is_empty_and_says_what_it_is(medium: Medium) -> None:
    """A new tier has no blocks and reports its mode, its place and its first-touch speed."""
    tier = medium.make()
    found = await tier.open()
    assert isinstance(tier, Tier) and isinstance(tier, MappedTier)
    assert not len(found.extents) and not len(found.metas) and found.segments == [] and found.namespaces == []
    assert found.next_segment == 1 and found.next_generation == 1
    assert tier.mode == "tmpfs" and "arena.tbl" in files(tier.place) and tier.first_touch_bytes_per_s > 0
    await tier.close(release=True)


async def test_pages_are_whole_apart_and_aligned(medium: Medium) -> None:
    """The pages of a segment are class_bytes each, 4 KiB aligned, and do not overlap."""
    tier = await begun(medium, medium.segment(1))
    pages = medium.pages(1, *range(PAGES))
    tier.apply(Plan(reserved=pages))
    for number, row in enumerate(pages):
        view = tier.view(row)
        assert view.nbytes == CLASS_BYTES and not view.readonly
        assert np.frombuffer(view, dtype=np.uint8).ctypes.data % 4096 == 0
        view[:] = bytes([number]) * CLASS_BYTES
    assert all(tier.view(row) == bytes([number]) * CLASS_BYTES for number, row in enumerate(pages))
    await tier.close(release=True)


async def test_client_maps_what_the_daemon_wrote(medium: Medium) -> None:
    """A client writes in place through a writable descriptor; a read-only one refuses that."""
    tier = await begun(medium, medium.segment(1))
    page = medium.pages(1, 3)
    tier.apply(Plan(reserved=page))
    fd, length = tier.descriptor(1, writable=True)
    with mmap.mmap(fd, length) as client:
        client[3 * CLASS_BYTES : 3 * CLASS_BYTES + 5] = b"hello"
    os.close(fd)
    assert bytes(tier.view(page[0])[:5]) == b"hello" and length == SEGMENT_BYTES
    for fd, length in (tier.descriptor(1, writable=False), tier.catalogue_descriptor(1)):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, length, prot=mmap.PROT_WRITE)
        os.close(fd)
    await tier.close(release=True)


async def test_generation_moves_with_the_page(medium: Medium) -> None:
    """Clients see a page's generation from its reservation on, the next after reuse, 0 once
    free."""
    tier = await begun(medium, medium.segment(1))
    fd, length = tier.catalogue_descriptor(1)
    word = slice(generation_offset(2), generation_offset(3))
    with mmap.mmap(fd, length, prot=mmap.PROT_READ) as client:
        first, second = medium.pages(1, 2, generation=40), medium.pages(1, 2, generation=41)
        tier.apply(Plan(reserved=first))
        assert int.from_bytes(client[word], "little") == 40
        tier.apply(Plan(freed=freed(first), reserved=second))
        assert int.from_bytes(client[word], "little") == 41
        tier.apply(Plan(freed=freed(second)))
        assert int.from_bytes(client[word], "little") == 0
    os.close(fd)
    await tier.close(release=True)


async def test_a_retired_page_says_so_until_it_is_free(medium: Medium) -> None:
    """A retired page shows its generation and the mark; its free clears both, in any order."""
    tier = await begun(medium, medium.segment(1))
    fd, length = tier.catalogue_descriptor(1)
    word = slice(generation_offset(2), generation_offset(3))
    with mmap.mmap(fd, length, prot=mmap.PROT_READ) as client:
        page = medium.pages(1, 2, generation=40)
        tier.apply(Plan(reserved=page))
        tier.apply(Plan(retired=page))
        assert int.from_bytes(client[word], "little") == 40 | int(RETIRED)
        tier.apply(Plan(freed=freed(page)))
        assert int.from_bytes(client[word], "little") == 0
        tier.apply(Plan(retired=page))
        assert int.from_bytes(client[word], "little") == 0
    os.close(fd)
    await tier.close(release=True)


async def test_end_of_a_segment_makes_old_handles_stale(medium: Medium) -> None:
    """A client that still maps an ended segment's catalogue reads no generation in it."""
    tier = await begun(medium, medium.segment(1))
    fd, length = tier.catalogue_descriptor(1)
    tier.apply(Plan(reserved=medium.pages(1, 0, 5, generation=9)))
    with mmap.mmap(fd, length, prot=mmap.PROT_READ) as client:
        tier.apply(Plan(segments=[medium.segment(2, replaces=1)], reserved=medium.pages(2, 0, generation=20)))
        assert not any(client[generation_offset(0) : generation_offset(PAGES)])
    os.close(fd)
    with pytest.raises(KeyError):
        tier.view(medium.pages(1, 0)[0])
    await tier.close(release=True)


@pytest.mark.parametrize("fresh", [False, True])
async def test_successor_takes_the_file_unless_it_must_be_fresh(medium: Medium, fresh: bool) -> None:
    """A successor has the same memory; with `fresh` it has other, and old mappings keep their
    bytes."""
    tier = await begun(medium, medium.segment(1))
    old = medium.pages(1, 0)
    tier.apply(Plan(reserved=old))
    fd, length = tier.descriptor(1, writable=True)
    with mmap.mmap(fd, length) as client:
        client[:3] = b"old"
        successor = medium.segment(2, replaces=1, fresh=fresh, domain=2)
        tier.apply(Plan(freed=freed(old), segments=[successor], reserved=medium.pages(2, 0, generation=5)))
        await tier.prepare([successor])
        tier.view(medium.pages(2, 0)[0])[:3] = b"new"
        assert client[:3] == (b"old" if fresh else b"new") and len(client[:]) == length
        client[length - 1 :] = b"x"  # the last byte of an unlinked file: no fault
    os.close(fd)
    await tier.close(release=True)


async def test_published_blocks_come_back_as_they_were(medium: Medium) -> None:
    """After a restart every published block has its bytes, record, table and place, UNVERIFIED."""
    tier = await begun(medium, medium.segment(1), medium.segment(2, place=3, class_bytes=CLASS_BYTES))
    pages = np.concatenate([medium.pages(1, 0, 7, generation=10), medium.pages(2, 15, generation=30)])
    tier.apply(Plan(reserved=pages))
    tables = fill(tier, pages)
    contents = [bytes(tier.view(row)) for row in pages]
    tier.publish(pages, metas_of(pages), tables)
    await tier.keep_namespace(b"one")
    await tier.keep_namespace(b"two" * 1000)
    await tier.keep_namespace(b"one")
    await tier.sync()
    await tier.close(release=False)

    again = medium.make()
    found = await again.open()
    order = np.argsort(found.extents["generation"])
    extents, metas = found.extents[order], found.metas[order]
    for field in ("tier", "segment", "slot", "length", "offset", "generation"):
        assert extents[field].tolist() == pages[field].tolist()
    assert set(extents["flags"].tolist()) == {UNVERIFIED} and set(extents["page"].tolist()) == {-1}
    assert [bytes(again.view(row)) for row in extents] == contents
    assert [bytes(m["digest"]) for m in metas] == [table_digest(t) for t in tables]
    assert [t.tolist() for t in again.slices(extents) if t is not None] == [t.tolist() for t in tables]
    assert found.segments == [medium.segment(1), medium.segment(2, place=3)]
    assert found.namespaces == [b"one", b"two" * 1000]
    await again.close(release=True)


async def test_blocks_come_back_cold_to_hot(medium: Medium) -> None:
    """Recovered blocks are ordered by commit time; within a commit the tail is colder."""
    tier = await begun(medium, medium.segment(1), medium.segment(2, place=1))
    late, early = medium.pages(1, 0, 1, 2, generation=10), medium.pages(2, 0, 1, generation=20)
    tier.apply(Plan(reserved=np.concatenate([late, early])))
    tier.publish(late, metas_of(late, time_ms=9), fill(tier, late))
    tier.publish(early, metas_of(early, time_ms=4), fill(tier, early))
    await tier.close(release=False)
    again = medium.make()
    assert (await again.open()).extents["generation"].tolist() == [21, 20, 12, 11, 10]
    await again.close(release=True)


async def test_only_published_and_unfreed_blocks_come_back(medium: Medium) -> None:
    """Pages that were only reserved, freed or reserved again are free after a restart."""
    tier = await begun(medium, medium.segment(1))
    pages = medium.pages(1, 0, 1, 2, 3, generation=10)
    tier.apply(Plan(reserved=pages))
    tables = fill(tier, pages)
    tier.publish(pages[:3], metas_of(pages[:3]), tables[:3])
    tier.apply(Plan(freed=freed(pages[1:2])))
    tier.apply(Plan(reserved=medium.pages(1, 2, generation=50)))
    await tier.close(release=False)
    again = medium.make()
    assert (await again.open()).extents["slot"].tolist() == [0]
    await again.close(release=True)


async def test_numbers_are_never_given_out_twice(medium: Medium) -> None:
    """The next life's numbers are above every segment id and generation ever used, lost ones
    too."""
    tier = await begun(medium, medium.segment(5))
    tier.apply(Plan(reserved=medium.pages(5, 0, 1, generation=100)))
    tier.apply(Plan(freed=freed(medium.pages(5, 0, 1, generation=100)), segments=[medium.segment(8, replaces=5)]))
    await tier.close(release=False)
    for name in ("8.cat", "8.data"):
        os.unlink(os.path.join(tier.place, name))
    again = medium.make()
    found = await again.open()
    assert (found.next_segment, found.next_generation) == (9, 102)
    await again.close(release=True)


async def test_slices_of_another_generation_are_none(medium: Medium) -> None:
    """A slice table belongs to the published page alone; tables come in the order of the query."""
    tier = await begun(medium, medium.segment(1))
    pages = medium.pages(1, 0, 1, generation=10)
    tier.apply(Plan(reserved=pages))
    tables = fill(tier, pages)
    tier.publish(pages, metas_of(pages), tables)
    asked = np.concatenate([pages[::-1], medium.pages(1, 0, generation=9), medium.pages(77, 0)])
    got = tier.slices(asked)
    assert got[2:] == [None, None]
    assert [t.tolist() for t in got[:2] if t is not None] == [tables[1].tolist(), tables[0].tolist()]
    await tier.close(release=True)


async def test_rows_of_other_tiers_are_passed_over(medium: Medium) -> None:
    """A plan for several tiers changes only this tier's pages here."""
    tier = await begun(medium, medium.segment(1))
    page = medium.pages(1, 0)
    tier.apply(Plan(reserved=page))
    tier.publish(page, metas_of(page), fill(tier, page))
    other = page.copy()
    other["tier"] = medium.position + 1
    elsewhere = medium.segment(9, tier=medium.position + 1)
    tier.apply(Plan(freed=freed(other), segments=[elsewhere], reserved=other))
    await tier.prepare([elsewhere])
    assert tier.slices(page)[0] is not None
    with pytest.raises(KeyError):
        tier.descriptor(9, writable=False)
    await tier.close(release=True)


async def test_segment_has_no_memory_to_give_before_prepare(medium: Medium) -> None:
    """Handles and descriptors to a segment that is not fully allocated are refused."""
    tier = await begun(medium)
    tier.apply(Plan(segments=[medium.segment(1)], reserved=medium.pages(1, 0)))
    for ask in (lambda: tier.descriptor(1, writable=True), lambda: tier.catalogue_descriptor(1)):
        with pytest.raises(TierFailed, match="not prepared"):
            ask()
    await tier.close(release=True)


async def test_views_outlive_the_tier(medium: Medium) -> None:
    """A view in use keeps its bytes after close, and close does not fail."""
    tier = await begun(medium, medium.segment(1))
    tier.apply(Plan(reserved=medium.pages(1, 0)))
    view = tier.view(medium.pages(1, 0)[0])
    view[:4] = b"kept"
    await tier.close(release=True)
    await tier.close(release=True)
    assert bytes(view[:4]) == b"kept"


async def test_one_daemon_at_a_time(medium: Medium) -> None:
    """A second open is refused with the owner's process id, and the first owner goes on."""
    tier = await begun(medium, medium.segment(1))
    with pytest.raises(AlreadyOwned, match=str(os.getpid())):
        await medium.make().open()
    tier.apply(Plan(reserved=medium.pages(1, 0)))
    tier.view(medium.pages(1, 0)[0])[0] = 1
    await tier.close(release=True)


async def test_release_leaves_nothing(medium: Medium, directory: str) -> None:
    """A close with release removes all files and directories of the tier; without it, all stay."""
    tier = await begun(medium, medium.segment(1))
    await tier.close(release=False)
    assert {"1.data", "1.cat", "arena.tbl"} <= files(directory)
    tier = medium.make()
    await tier.open()
    await tier.close(release=True)
    assert files(directory) == set() and "t" not in directories(directory)
