"""Snapshots, and the way from a directory's files to an index."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tiers.store_world import metas_of
from tierd.checksum import record_checksum
from tierd.core.formats.meta import META, new_meta
from tierd.errors import CorruptRecord, VersionMismatch
from tierd.tiers.io.files import OsFiles
from tierd.tiers.store.journal import (
    REMOVED,
    BlocksRemoved,
    BlocksStored,
    Journal,
    Marks,
    NamespaceKept,
    Record,
    SegmentBegun,
    journal_path,
)
from tierd.tiers.store.recovery import compact, load_index, open_index, settle
from tierd.tiers.store.snapshot import HEADER, PIECE_ROWS, read_snapshot, snapshot_path, write_snapshot
from tierd.tiers.store.stored_index import StoredIndex, count_of, gathered, latest_times, replay

STORE = bytes(range(16))
CLASS = 8192


def index_of(rows: int) -> StoredIndex:
    metas = np.repeat(metas_of([1], 10), rows)
    metas["segment"], metas["offset"] = 1, np.arange(rows) * CLASS
    metas["hash"][:, :8] = np.arange(rows, dtype="<u8").view(np.uint8).reshape(-1, 8)
    segments = {0: SegmentBegun(0, 1, 9, CLASS, rows), 3: SegmentBegun(3, 4, 8, CLASS * 2, 5)}
    return StoredIndex(segments, metas, [b"one", b"two"], 77, 1 << 50)


def same(one: StoredIndex, other: StoredIndex) -> bool:
    numbers = one.next_segment == other.next_segment and one.next_generation == other.next_generation
    return numbers and one.segments == other.segments and one.namespaces == other.namespaces


@pytest.mark.parametrize("rows", [0, 1, PIECE_ROWS, PIECE_ROWS + 1])
def test_index_comes_back_whole(tmp_path: Path, rows: int) -> None:
    """Segments, blocks, namespaces and marks come back as written."""
    index = index_of(rows)
    length = write_snapshot(tmp_path, index, store=STORE, number=3)
    found = read_snapshot(tmp_path, store=STORE, number=3)
    assert same(found, index)
    assert found.metas.tobytes() == index.metas.tobytes()
    assert length == snapshot_path(tmp_path, 3).stat().st_size
    assert os.listdir(tmp_path) == [snapshot_path(tmp_path, 3).name]


def test_damaged_piece_costs_its_rows_alone(tmp_path: Path) -> None:
    """A flipped bit among the blocks loses the rows under its checksum, and no other."""
    index = index_of(3 * PIECE_ROWS)
    write_snapshot(tmp_path, index, store=STORE, number=3)
    flip(snapshot_path(tmp_path, 3), -PIECE_ROWS * META.itemsize - 5)
    found = read_snapshot(tmp_path, store=STORE, number=3)
    assert found.metas.tobytes() == np.delete(index.metas, slice(PIECE_ROWS, 2 * PIECE_ROWS)).tobytes()


def test_cut_file_keeps_the_pieces_that_are_whole(tmp_path: Path) -> None:
    """A file cut within its last piece gives the pieces before it."""
    index = index_of(PIECE_ROWS + 10)
    length = write_snapshot(tmp_path, index, store=STORE, number=3)
    os.truncate(snapshot_path(tmp_path, 3), length - 1)
    found = read_snapshot(tmp_path, store=STORE, number=3)
    assert found.metas.tobytes() == index.metas[:PIECE_ROWS].tobytes()


def test_flipped_bit_before_the_rows_refuses_the_file(tmp_path: Path) -> None:
    """Any flipped bit in header, segments, namespaces or sums is detected."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=3)
    path = snapshot_path(tmp_path, 3)
    for at in range(path.stat().st_size - META.itemsize):
        flip(path, at)
        with pytest.raises((CorruptRecord, VersionMismatch)):
            read_snapshot(tmp_path, store=STORE, number=3)
        flip(path, at)


@pytest.mark.parametrize("length", [0, 10, HEADER.itemsize, HEADER.itemsize + 8])
def test_stump_is_refused(tmp_path: Path, length: int) -> None:
    """A file cut within header or tables raises CorruptRecord."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=3)
    os.truncate(snapshot_path(tmp_path, 3), length)
    with pytest.raises(CorruptRecord):
        read_snapshot(tmp_path, store=STORE, number=3)


@pytest.mark.parametrize("namespaces", ["a text", [b"one", 2]])
def test_namespaces_of_another_shape_refuse_the_file(tmp_path: Path, namespaces: Any) -> None:
    """Namespaces that are no list of texts make the whole file corrupt, even under good checksums."""
    write_snapshot(tmp_path, replace(index_of(1), namespaces=namespaces), store=STORE, number=3)
    with pytest.raises(CorruptRecord, match="no list of texts"):
        read_snapshot(tmp_path, store=STORE, number=3)


def test_snapshot_of_another_store_is_refused(tmp_path: Path) -> None:
    """A snapshot that another store wrote is refused."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=3)
    with pytest.raises(CorruptRecord, match="another store"):
        read_snapshot(tmp_path, store=bytes(16), number=3)


def test_newer_snapshot_is_refused_and_kept(tmp_path: Path) -> None:
    """A snapshot of a newer version stops the recovery and keeps its name."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=3)
    path = snapshot_path(tmp_path, 3)
    data = np.fromfile(path, dtype=np.uint8)
    data[: HEADER.itemsize].view(HEADER)["version"] = 3
    data[HEADER.itemsize - 8 : HEADER.itemsize].view("<u8")[0] = record_checksum(data[: HEADER.itemsize - 8])
    data.tofile(path)
    with pytest.raises(VersionMismatch, match="newer"):
        load_index(tmp_path, store=STORE)
    assert path.exists()


def test_snapshot_that_cannot_be_synced_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a write fails, the file of that name is unchanged, and no temporary file stays."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=3)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(OsFiles, "sync_data", staticmethod(fail))
    with pytest.raises(OSError, match="bad disk"):
        write_snapshot(tmp_path, index_of(2), store=STORE, number=3)
    assert len(read_snapshot(tmp_path, store=STORE, number=3).metas) == 1
    assert len(os.listdir(tmp_path)) == 1


# -- recovery


def journal(path: Path, number: int, *slots: int) -> None:
    metas = metas_of([s + 1 for s in slots], 10)
    metas["segment"], metas["offset"] = 1, np.array(slots) * CLASS
    begun = SegmentBegun(0, 1, 1, CLASS, 100)
    Journal.create(path, store=STORE, number=number, first=[Marks(5, 5), begun, BlocksStored(metas)]).close()


def slots_in(index: StoredIndex) -> list[int]:
    return sorted((index.metas["offset"] // CLASS).tolist())


def test_journals_follow_the_newest_snapshot(tmp_path: Path) -> None:
    """Snapshot N and the journals from N on form the index; older files are skipped."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=1)
    write_snapshot(tmp_path, index_of(2), store=STORE, number=3)
    journal(tmp_path, 2, 50)
    journal(tmp_path, 3, 60)
    journal(tmp_path, 4, 70)
    loaded = load_index(tmp_path, store=STORE)
    assert (loaded.base, loaded.next_number) == (3, 5)
    assert slots_in(loaded.index) == [0, 1, 60, 70]


def test_damaged_snapshot_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """A damaged snapshot is renamed with a notice; the one before and all later journals replace it."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=1)
    write_snapshot(tmp_path, index_of(2), store=STORE, number=2)
    journal(tmp_path, 1, 50)
    flip(snapshot_path(tmp_path, 2), 9)
    loaded = load_index(tmp_path, store=STORE)
    assert slots_in(loaded.index) == [0, 50]
    assert len(loaded.notices) == 1
    assert snapshot_path(tmp_path, 2).with_suffix(".damaged").exists()


def test_settling_leaves_one_snapshot_and_one_journal(tmp_path: Path) -> None:
    """After a start the directory holds one full snapshot and a fresh journal, with the same index."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=1)
    journal(tmp_path, 1, 50)
    journal(tmp_path, 2, 60)
    loaded = load_index(tmp_path, store=STORE)
    settle(tmp_path, loaded, store=STORE, first=[Marks(900, 9000)]).journal.close()
    assert sorted(os.listdir(tmp_path)) == [journal_path(tmp_path, 3).name, snapshot_path(tmp_path, 3).name]
    again = load_index(tmp_path, store=STORE)
    assert slots_in(again.index) == [0, 50, 60]
    assert again.index.next_segment == 900


def test_quiet_life_does_not_write_the_snapshot_again(tmp_path: Path) -> None:
    """If journals hold only marks since the snapshot, the snapshot stays as it is."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=1)
    Journal.create(tmp_path, store=STORE, number=1, first=[Marks(900, 9000)]).close()
    inode = snapshot_path(tmp_path, 1).stat().st_ino
    loaded = load_index(tmp_path, store=STORE)
    settle(tmp_path, loaded, store=STORE, first=[Marks(901, 9001)]).journal.close()
    assert snapshot_path(tmp_path, 1).stat().st_ino == inode
    assert load_index(tmp_path, store=STORE).index.next_segment == 901


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_compaction_killed_between_its_steps_loses_nothing(tmp_path: Path, kept: int) -> None:
    """The index is the same with any old files beside the new snapshot, or without the new snapshot."""
    write_snapshot(tmp_path, index_of(1), store=STORE, number=1)
    journal(tmp_path, 1, 50)
    journal(tmp_path, 2, 60)
    journal(tmp_path, 3, 70)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    compact(tmp_path, store=STORE, number=3)
    assert sorted(os.listdir(tmp_path)) == [journal_path(tmp_path, 3).name, snapshot_path(tmp_path, 3).name]
    for name in sorted(before)[-kept:] if kept else []:
        (tmp_path / name).write_bytes(before[name])
    if kept == 3:
        for name, data in before.items():
            (tmp_path / name).write_bytes(data)
        snapshot_path(tmp_path, 3).unlink()
    assert slots_in(load_index(tmp_path, store=STORE).index) == [0, 50, 60, 70]


def test_torn_journal_is_said_and_those_after_it_are_read(tmp_path: Path) -> None:
    """A notice names a torn journal; journals of later runs still count."""
    journal(tmp_path, 1, 50)
    journal(tmp_path, 2, 60)
    path = journal_path(tmp_path, 1)
    os.truncate(path, path.stat().st_size - 3)
    loaded = load_index(tmp_path, store=STORE)
    assert slots_in(loaded.index) == [60]
    assert [notice.split(":")[0] for notice in loaded.notices] == ["journal 1"]


def test_namespaces_and_marks_survive_compaction(tmp_path: Path) -> None:
    """Compaction keeps namespaces in order and the highest marks."""
    Journal.create(
        tmp_path, store=STORE, number=1, first=[NamespaceKept(b"b"), NamespaceKept(b"a"), Marks(8, 9)]
    ).close()
    compact(tmp_path, store=STORE, number=2)
    index = load_index(tmp_path, store=STORE).index
    assert (index.namespaces, index.next_segment, index.next_generation) == ([b"b", b"a"], 8, 9)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1 << 63)), max_size=20), st.sets(st.integers(1, 6)))
def test_latest_times_are_of_each_segments_newest_block(blocks: list[tuple[int, int]], known: set[int]) -> None:
    """Each requested segment has the time of its newest block, or 0 without blocks; others do not count."""
    metas = new_meta(len(blocks))
    for row, (segment, time_ms) in zip(metas, blocks, strict=True):
        row["segment"], row["time_ms"] = segment, time_ms
    segments = [SegmentBegun(place, segment, 1, 4096, 8) for place, segment in enumerate(sorted(known))]
    expected = {segment: max([0, *(t for s, t in blocks if s == segment)]) for segment in known}
    index = StoredIndex({segment.place: segment for segment in segments}, metas)
    assert latest_times(index) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "remove", "begin"]), st.integers(0, 1), st.integers(0, 2)), max_size=30
    ),
    st.lists(st.integers(0, 15), min_size=1, max_size=3),
)
def test_rows_that_stay_in_their_file_are_those_that_still_hold(
    acts: list[tuple[str, int, int]], cuts: list[int]
) -> None:
    """Snapshots and later journals give the same index as the records in memory, after each fold."""
    records, held = list[Record](), {place: place + 1 for place in range(2)}
    for number, (act, place, slot) in enumerate(acts):
        if act == "begin":
            held[place] = 10 + number
            records.append(SegmentBegun(place, held[place], 1, CLASS, 8))
        elif act == "remove":
            records.append(BlocksRemoved(np.array([(held[place], 0, slot * CLASS)], dtype=REMOVED)))
        else:
            metas = metas_of([number], 10)
            metas["segment"], metas["offset"], metas["generation"] = held[place], slot * CLASS, number + 1
            records.append(BlocksStored(metas))
    first: list[Record] = [SegmentBegun(place, place + 1, 1, CLASS, 8) for place in range(2)]
    bounds = [0, *sorted(cuts), len(records)]
    with tempfile.TemporaryDirectory() as made:
        for number, (start, stop) in enumerate(pairwise(bounds), start=1):
            part = [Marks(1, 1), *(first if number == 1 else []), *records[start:stop]]
            Journal.create(Path(made), store=STORE, number=number, first=part).close()
            if number < len(bounds) - 1:
                compact(Path(made), store=STORE, number=number + 1)
        found = open_index(Path(made), store=STORE).index
        expected = replay(StoredIndex(), [*first, *records])
        assert found.segments == expected.segments
        assert sorted(row.tobytes() for row in gathered(found).metas) == sorted(row.tobytes() for row in expected.metas)
        assert count_of(found) == len(expected.metas)


@pytest.mark.parametrize("rows", [1, 300])
def test_a_journal_is_folded_in_twice_its_length(tmp_path: Path, rows: int) -> None:
    """A fold's memory grows by at most 2.4 bytes per byte of journal, for records of one block or
    of many, in any order."""
    peaks, lengths = list[int](), list[int]()
    for number, blocks in ((1, 12_000), (2, 48_000)):
        directory = tmp_path / str(number)
        directory.mkdir()
        index = index_of(blocks)
        write_snapshot(directory, replace(index, metas=index.metas[:10]), store=STORE, number=1)
        told = index.metas.view(f"V{META.itemsize}")[np.random.default_rng(1).permutation(blocks)].view(META)
        journal = Journal.create(directory, store=STORE, number=1, first=[Marks(5, 5)])
        journal.append(BlocksStored(told[at : at + rows]) for at in range(0, blocks, rows))
        journal.close()
        lengths.append(journal.bytes)
        del index, told
        gc.collect()
        tracemalloc.start()
        try:
            compact(directory, store=STORE, number=2)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert count_of(open_index(directory, store=STORE).index) == blocks
    assert peaks[1] - peaks[0] < 2.4 * (lengths[1] - lengths[0])


def test_a_fold_that_is_given_up_changes_nothing(tmp_path: Path) -> None:
    """A fold given up at any stretch changes no file, and the next fold succeeds."""
    write_snapshot(tmp_path, index_of(3 * PIECE_ROWS), store=STORE, number=1)
    Journal.create(tmp_path, store=STORE, number=1, first=[Marks(5, 5), NamespaceKept(b"three")]).close()
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    for after in range(4):
        asked = iter([False] * after)
        with pytest.raises(OSError, match="cancelled"):
            compact(tmp_path, store=STORE, number=2, is_given_up=lambda asked=asked: next(asked, True))
        assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
    compact(tmp_path, store=STORE, number=2)
    index = load_index(tmp_path, store=STORE).index
    assert (len(index.metas), index.namespaces[-1]) == (3 * PIECE_ROWS, b"three")


def test_only_a_stretch_of_an_index_is_in_memory(tmp_path: Path) -> None:
    """Ten times as many blocks need no more memory to count, nor to fold with a journal."""
    peaks = list[int]()
    for number, pieces in ((1, 8), (2, 80)):
        directory = tmp_path / str(number)
        directory.mkdir()
        write_snapshot(directory, index_of(pieces * PIECE_ROWS), store=STORE, number=1)
        told = index_of(1).metas
        Journal.create(directory, store=STORE, number=1, first=[Marks(5, 5), BlocksStored(told)]).close()
        gc.collect()
        tracemalloc.start()
        try:
            assert count_of(open_index(directory, store=STORE).index) == pieces * PIECE_ROWS
            compact(directory, store=STORE, number=2)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]
