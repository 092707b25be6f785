"""The catalogue of a segment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierd.checksum import record_checksum
from tierd.core.formats.block import size_class, slice_lengths
from tierd.core.formats.layout import CATALOGUE_HEADER, RETIRED, CatalogueLayout, generation_offset, slice_words
from tierd.core.formats.meta import META_BYTES, new_meta
from tierd.core.formats.model import SegmentAssignment, StructArray
from tierd.core.index.pages import GENERATION_LIMIT
from tierd.errors import CorruptRecord, InvalidArgument, VersionMismatch
from tierd.tiers.arena.catalogue import Catalogue, CatalogueHead, pack_head, read_head

PAGES = 16
CLASS_BYTES = 16384


def head(**changes: int) -> CatalogueHead:
    given = SegmentAssignment(1, 2, 3, 4, CLASS_BYTES, PAGES, 5, None, False)
    return CatalogueHead(store=bytes(range(16)), segment_bytes=1 << 20, assignment=replace(given, **changes))


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint32)


def metas(*generations: int) -> StructArray:
    rows = new_meta(len(generations))
    rows["generation"] = generations
    rows["stored_length"] = 9000
    rows["hash"][:, 0] = np.arange(len(rows))
    return rows


def tables(count: int, entries: int = 3) -> list[np.ndarray]:
    return [np.arange(entries, dtype="<u8") + i + 1 for i in range(count)]


def filled(path: Path, *generations: int) -> Catalogue:
    """A catalogue whose first pages are published with these generations."""
    catalogue = Catalogue.create(path, head=head())
    catalogue.allocate(path)
    where = slots(*range(len(generations)))
    catalogue.stamp(where, np.array(generations, dtype=np.uint64))
    catalogue.publish(where, metas=metas(*generations), slices=tables(len(where)))
    return catalogue


def test_a_retired_page_is_read_by_leases_alone(tmp_path: Path) -> None:
    """A retired page keeps its generation with a flag. A start ignores its entry, copies still get
    its table, and new generations are higher."""
    catalogue = filled(tmp_path / "1.cat", 7, 8, 9)
    catalogue.retire(slots(1, 2), np.array([8, 5], np.uint64))
    assert catalogue._generations[:3].tolist() == [7, 8 | int(RETIRED), 9], "one of another generation is passed over"
    found = catalogue.survivors()
    assert found.slots.tolist() == [0, 2] and found.highest == 9
    assert catalogue.find_tables(slots(1), np.array([8], np.uint64))[0] is not None
    catalogue.retire(slots(2), np.array([9], np.uint64))
    assert catalogue.survivors().highest == 9
    catalogue.retract(slots(1))
    assert catalogue._generations[1] == 0
    catalogue.retire(slots(1), np.array([8], np.uint64))
    assert catalogue._generations[1] == 0, "what is free stays free"


def test_layout_has_the_parts_in_order_and_aligned() -> None:
    """Words begin at 4096, entries on the next 4 KiB boundary, the slice table behind the entries."""
    layout = CatalogueLayout(pages=600, class_bytes=8192)
    assert generation_offset(0) == 4096 and generation_offset(599) + 8 <= layout.meta_offset == 4096 + 8192
    assert layout.slices_offset == layout.meta_offset + 600 * META_BYTES
    assert layout.total_bytes % 4096 == 0 and layout.total_bytes >= layout.slices_offset + 600 * 2 * 8
    assert [slice_words(c) for c in (4096, 8192, 1 << 21, 1 << 30)] == [1, 2, 480, 480]


@given(st.integers(1, 1 << 31), st.integers(0, 3000))
def test_slices_of_any_block_fit_the_table_of_its_page(length: int, layers: int) -> None:
    """The slices of any block cover it, are not empty, and fit the row of its size class."""
    lengths = slice_lengths(length, layers)
    assert sum(lengths) == length and min(lengths) > 0
    assert len(lengths) <= slice_words(size_class(length))
    assert max(lengths) <= 256 << 10 or length > 480 * (256 << 10)


def test_header_comes_back_as_written(tmp_path: Path) -> None:
    """The next daemon reads the assignment from the file."""
    Catalogue.create(tmp_path / "3.cat", head=head())
    assert Catalogue.open(tmp_path / "3.cat").head == head()
    assert (tmp_path / "3.cat").stat().st_mode & 0o777 == 0o600


def test_published_entries_survive_with_their_tables(tmp_path: Path) -> None:
    """Entries published before a restart survive it with their data."""
    filled(tmp_path / "3.cat", 70, 71, 72)
    again = Catalogue.open(tmp_path / "3.cat")
    found = again.survivors()
    assert found.slots.tolist() == [0, 1, 2] and found.metas["generation"].tolist() == [70, 71, 72]
    assert found.metas["segment"].tolist() == [3] * 3 and found.metas["offset"].tolist() == [
        0,
        CLASS_BYTES,
        2 * CLASS_BYTES,
    ]
    got = again.find_tables(slots(1, 0), np.array([71, 70], dtype=np.uint64))
    assert [t.tolist() for t in got if t is not None] == [[2, 3, 4], [1, 2, 3]]
    assert found.highest == 72


def test_tables_of_different_lengths_survive_each_as_it_was(tmp_path: Path) -> None:
    """One publish takes blocks of different lengths, and skips one whose page has moved on."""
    catalogue, generations = filled(tmp_path / "3.meta"), np.arange(1, 6, dtype=np.uint64)
    where, given = slots(7, 2, 5, 0, 9), [tables(1, entries)[0] for entries in (3, 1, 3, 2, 1)]
    catalogue.stamp(where, generations)
    catalogue.stamp(where[2:3], generations[:1] + np.uint64(90))
    catalogue.publish(where, metas=metas(*generations.tolist()), slices=given)
    found = catalogue.find_tables(where, generations)
    assert [None if table is None else table.tolist() for table in found] == [[1, 2, 3], [1], None, [1, 2], [1]]
    assert Catalogue.open(tmp_path / "3.meta").survivors().slots.tolist() == [0, 2, 7, 9]


def test_stamped_page_has_no_entry_and_no_table(tmp_path: Path) -> None:
    """From the stamp on, before any byte of reuse, the page's former entry no longer counts."""
    catalogue = filled(tmp_path / "3.cat", 70, 71)
    catalogue.stamp(slots(0), np.array([90], dtype=np.uint64))
    assert Catalogue.open(tmp_path / "3.cat").survivors().slots.tolist() == [1]
    assert catalogue.find_tables(slots(0, 0), np.array([70, 90], dtype=np.uint64)) == [None, None]


def test_retracted_page_has_generation_zero_and_no_entry(tmp_path: Path) -> None:
    """A freed page serves neither clients nor the next daemon."""
    catalogue = filled(tmp_path / "3.cat", 70, 71)
    catalogue.retract(slots(1))
    raw = (tmp_path / "3.cat").read_bytes()
    assert int.from_bytes(raw[generation_offset(1) : generation_offset(2)], "little") == 0
    assert Catalogue.open(tmp_path / "3.cat").survivors().slots.tolist() == [0]
    catalogue.retract_all()
    assert len(Catalogue.open(tmp_path / "3.cat").survivors().slots) == 0


@pytest.mark.parametrize("word", [(1 << 64) - 1, GENERATION_LIMIT])
def test_word_that_no_page_was_given_ends_no_range(tmp_path: Path, word: int) -> None:
    """A damaged word at the end of its range frees its page and does not become the highest
    generation. No later generation could follow that."""
    catalogue = filled(tmp_path / "3.cat", 70, 71)
    catalogue.stamp(slots(0, 5), np.array([word, word], dtype=np.uint64))
    found = Catalogue.open(tmp_path / "3.cat").survivors()
    assert (found.slots.tolist(), found.highest) == ([1], 71)


def test_a_catalogue_that_is_not_allocated_is_retracted_too(tmp_path: Path) -> None:
    """While the file has no entries yet, the words alone invalidate all handles of its pages."""
    catalogue = Catalogue.create(tmp_path / "1.cat", head=head())
    catalogue.stamp(slots(0, 1), np.array([7, 8], dtype=np.uint64))
    catalogue.retract(slots(0))
    assert catalogue._generations[:2].tolist() == [0, 8]
    catalogue.retract_all()
    assert not catalogue._generations.any()


def test_late_publish_of_a_page_that_moved_on_is_passed_over(tmp_path: Path) -> None:
    """A publish under a generation that the page no longer has changes nothing, not even a new entry."""
    catalogue = filled(tmp_path / "3.cat", 70)
    catalogue.stamp(slots(0, 1), np.array([80, 81], dtype=np.uint64))
    catalogue.publish(slots(0), metas=metas(80), slices=tables(1))
    catalogue.publish(slots(0, 1), metas=metas(70, 81), slices=tables(2))
    assert Catalogue.open(tmp_path / "3.cat").survivors().metas["generation"].tolist() == [80, 81]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_to_an_entry_frees_its_page_alone(tmp_path: Path, data: st.DataObject) -> None:
    """A flipped bit anywhere in an entry, its word or its table drops that block and no other."""
    path = tmp_path / "3.cat"
    path.unlink(missing_ok=True)
    filled(path, 70, 71, 72)
    layout = head().layout
    part = data.draw(
        st.sampled_from([(generation_offset(1), 8), (layout.meta_offset + 256, 256), (layout.slices_offset + 32, 24)])
    )
    bit = data.draw(st.integers(0, part[1] * 8 - 1))
    raw = bytearray(path.read_bytes())
    raw[part[0] + bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    assert Catalogue.open(path).survivors().slots.tolist() == [0, 2]


@pytest.mark.parametrize("change", ["store", "segment", "place"])
def test_entry_of_another_place_is_foreign(tmp_path: Path, change: str) -> None:
    """An entry with a good checksum that names another arena, segment or page does not count here."""
    path = tmp_path / "3.cat"
    filled(path, 70, 71)
    raw = bytearray(path.read_bytes())
    entries, here = head().layout.meta_offset, head()
    if change == "place":  # entry 0 and its word and table at slot 1
        raw[entries + META_BYTES : entries + 2 * META_BYTES] = raw[entries : entries + META_BYTES]
        raw[4104:4112] = raw[4096:4104]
        at = here.layout.slices_offset
        raw[at + 32 : at + 64] = raw[at : at + 32]
    moved = replace(here, store=bytes(16)) if change == "store" else here
    moved = replace(moved, assignment=replace(moved.assignment, segment=9)) if change == "segment" else moved
    raw[: CATALOGUE_HEADER.itemsize] = pack_head(moved)
    path.write_bytes(raw)
    assert Catalogue.open(path).survivors().slots.tolist() == ([0] if change == "place" else [])


def test_too_many_slices_are_refused_and_nothing_is_published(tmp_path: Path) -> None:
    """A table longer than its row is an InvalidArgument that names the limit."""
    catalogue = filled(tmp_path / "3.cat", 70)
    catalogue.stamp(slots(0, 1), np.array([80, 81], dtype=np.uint64))
    with pytest.raises(InvalidArgument, match=r"5 of one block.* is 4"):
        catalogue.publish(slots(0, 1), metas=metas(80, 81), slices=[*tables(1), *tables(1, entries=5)])
    assert len(Catalogue.open(tmp_path / "3.cat").survivors().slots) == 0


@pytest.mark.parametrize("at", [0, 9, 20, 60, 125])
def test_damaged_header_drops_the_segment(at: int) -> None:
    """A header with any byte changed is corrupt and drops the segment."""
    raw = bytearray(pack_head(head()))
    raw[at] ^= 0x40
    with pytest.raises(CorruptRecord, match="dropped"):
        read_head(bytes(raw), name="3.cat")


def test_truncated_file_drops_the_segment(tmp_path: Path) -> None:
    """A catalogue shorter than its header says is corrupt."""
    filled(tmp_path / "3.cat", 70)
    with (tmp_path / "3.cat").open("r+b") as file:
        file.truncate(8192)
    with pytest.raises(CorruptRecord, match="8192"):
        Catalogue.open(tmp_path / "3.cat")


def test_newer_header_is_refused_not_dropped() -> None:
    """A catalogue of a later version stops the start with both versions and a remedy."""
    record = np.frombuffer(pack_head(head()), dtype=CATALOGUE_HEADER).copy()
    record["version"] = 3
    record["checksum"] = record_checksum(record.tobytes()[:-8])
    with pytest.raises(VersionMismatch, match=r"version 3.*reads 1 to 2.*purge"):
        read_head(record.tobytes(), name="3.cat")
