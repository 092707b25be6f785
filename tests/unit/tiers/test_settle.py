"""A start after a crash: if journals hold little, the snapshot stays and a new journal repeats them."""

from __future__ import annotations

import os
import tempfile
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tiers.store.test_snapshot import CLASS, STORE, index_of, journal
from tests.unit.tiers.store_world import metas_of
from tierd.tiers.store import recovery
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
    read_journal,
)
from tierd.tiers.store.recovery import JOURNALS_LIMIT, load_index, open_index, settle
from tierd.tiers.store.snapshot import snapshot_path, write_snapshot
from tierd.tiers.store.stored_index import StoredIndex, changes_since, gathered, replay

BLOCKS = 40
"""Blocks of the snapshot: several times those in the journals."""
FIRST: list[Record] = [Marks(900, 9000)]


def begin(directory: Path) -> None:
    """Writes a snapshot and two journals: blocks stored, stored again and removed; a segment that
    ended with its blocks; one that began; a name."""
    segments = {0: SegmentBegun(0, 1, 1, CLASS, 100), 1: SegmentBegun(1, 2, 1, CLASS, 100)}
    metas = index_of(BLOCKS).metas
    metas["segment"][-1] = 2
    write_snapshot(directory, StoredIndex(segments, metas, [b"old"]), store=STORE, number=1)
    journal(directory, 1, 50, 3)
    late = metas_of([7], 10)
    late["segment"], late["offset"] = 3, CLASS
    removed = np.array([(1, 0, slot * CLASS) for slot in (5, 50)], dtype=REMOVED)
    told = [SegmentBegun(1, 3, 1, CLASS, 100), NamespaceKept(b"new"), BlocksStored(late), BlocksRemoved(removed)]
    Journal.create(directory, store=STORE, number=2, first=[Marks(5, 5), *told]).close()


def same_index(one: StoredIndex, other: StoredIndex) -> bool:
    """Compares indexes without marks and without the order of names."""
    names = sorted(one.namespaces) == sorted(other.namespaces)
    return rows_of(one) == rows_of(other) and one.segments == other.segments and names


def rows_of(index: StoredIndex) -> list[bytes]:
    return sorted(row.tobytes() for row in gathered(index).metas)


def started(directory: Path) -> recovery.Settled:
    settled = settle(directory, open_index(directory, store=STORE), store=STORE, first=FIRST)
    settled.journal.close()
    return settled


def test_what_journals_told_is_told_again_and_the_snapshot_stays(tmp_path: Path) -> None:
    """After a crash with short journals the snapshot stays, and one new journal repeats their records."""
    begin(tmp_path)
    before, inode = load_index(tmp_path, store=STORE).index, snapshot_path(tmp_path, 1).stat().st_ino
    assert len(before.metas) == BLOCKS - 1
    settled = started(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [journal_path(tmp_path, 3).name, snapshot_path(tmp_path, 1).name]
    assert snapshot_path(tmp_path, 1).stat().st_ino == inode
    assert settled.has_news
    assert settled.snapshot_bytes == snapshot_path(tmp_path, 1).stat().st_size
    assert same_index(settled.index, before)
    assert same_index(load_index(tmp_path, store=STORE).index, before)


def test_a_torn_tail_is_not_told_again(tmp_path: Path) -> None:
    """A start skips a journal's torn tail once, with a notice, and the next start reads whole files."""
    begin(tmp_path)
    path = journal_path(tmp_path, 2)
    os.truncate(path, path.stat().st_size - 3)
    before = load_index(tmp_path, store=STORE)
    assert len(before.notices) == 1
    started(tmp_path)
    after = load_index(tmp_path, store=STORE)
    assert not after.notices
    assert rows_of(after.index) == rows_of(before.index)


def test_journals_that_told_much_are_folded(tmp_path: Path) -> None:
    """If journals hold more than half of the snapshot, a start writes a new snapshot and an empty journal."""
    begin(tmp_path)
    journal(tmp_path, 3, *range(BLOCKS))
    before = load_index(tmp_path, store=STORE).index
    assert not started(tmp_path).has_news
    assert sorted(os.listdir(tmp_path)) == [journal_path(tmp_path, 4).name, snapshot_path(tmp_path, 4).name]
    assert same_index(load_index(tmp_path, store=STORE).index, before)


@pytest.mark.parametrize("at", [3, 100])
def test_a_snapshot_that_comes_back_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """If the disk changes the new snapshot, this start and the next keep the older files and all blocks."""
    begin(tmp_path)
    journal(tmp_path, 3, *range(BLOCKS))
    before = load_index(tmp_path, store=STORE).index

    def write(directory: Path, index: StoredIndex, **given: Any) -> int:
        length = write_snapshot(directory, index, **given)
        path = snapshot_path(directory, given["number"])
        changed = bytearray(path.read_bytes())
        changed[at] ^= 1
        path.write_bytes(changed)
        return length

    with monkeypatch.context() as lying:
        lying.setattr(recovery, "write_snapshot", write)
        assert same_index(started(tmp_path).index, before)
    after = load_index(tmp_path, store=STORE)
    assert same_index(after.index, before)
    assert len(after.notices) == 1


class Dies(Exception):
    """Ends a start here."""


def test_starts_that_are_cut_short_do_not_pile_up_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If starts die before their cleanup, the number of journals stays bounded and all blocks survive."""
    begin(tmp_path)
    before = load_index(tmp_path, store=STORE).index

    def die(point: str) -> None:
        if point == "nvme.settle.before_removal":
            raise Dies

    with monkeypatch.context() as dying:
        dying.setattr(recovery, "failpoint", die)
        for _ in range(3 * JOURNALS_LIMIT):
            with pytest.raises(Dies):
                started(tmp_path)
            found = load_index(tmp_path, store=STORE)
            assert found.journals <= JOURNALS_LIMIT + 1
            assert same_index(found.index, before)
    started(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    assert same_index(load_index(tmp_path, store=STORE).index, before)


def test_start_cut_short_anywhere_loses_nothing(tmp_path: Path) -> None:
    """Any part of the new journal with all old ones, or all of it with any old ones, gives the same index."""
    begin(tmp_path)
    old = {number: journal_path(tmp_path, number).read_bytes() for number in (1, 2)}
    before = load_index(tmp_path, store=STORE).index
    started(tmp_path)
    path = journal_path(tmp_path, 3)
    new = path.read_bytes()
    for count in range(len(old) + 1):
        for left in combinations(old, count):
            for number, data in old.items():
                journal_path(tmp_path, number).unlink(missing_ok=True)
                if number in left:
                    journal_path(tmp_path, number).write_bytes(data)
            assert same_index(load_index(tmp_path, store=STORE).index, before), left
    for length in range(0, len(new), 7):
        path.write_bytes(new[:length])
        assert same_index(load_index(tmp_path, store=STORE).index, before), length


def test_what_is_told_again_fits_its_frames(tmp_path: Path) -> None:
    """Many blocks are repeated in several records, each far below a frame's limit, and each slot once."""
    rows = 20_000
    write_snapshot(tmp_path, index_of(4 * rows), store=STORE, number=1)
    metas = index_of(rows).metas
    metas["generation"] += 1
    first = [SegmentBegun(0, 1, 9, CLASS, 4 * rows), BlocksStored(metas), BlocksStored(metas)]
    Journal.create(tmp_path, store=STORE, number=1, first=first).close()
    assert started(tmp_path).has_news
    told = [*read_journal(tmp_path, store=STORE, number=2)]
    sizes = [len(record.metas) for record in told if isinstance(record, BlocksStored)]
    assert sum(sizes) == rows
    assert max(sizes) <= 1 << 13


acts = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "begin", "name"]), st.integers(0, 1), st.integers(0, 2)), max_size=30
)


def records_of(told: list[tuple[str, int, int]]) -> list[Record]:
    """The records of a run: two places with three slots each."""
    records, held = list[Record](), {place: place + 1 for place in range(2)}
    for number, (act, place, slot) in enumerate(told):
        if act == "begin":
            held[place] = 10 + number
            records.append(SegmentBegun(place, held[place], 1, CLASS, 8))
        elif act == "remove":
            records.append(BlocksRemoved(np.array([(held[place], 0, slot * CLASS)], dtype=REMOVED)))
        elif act == "name":
            records.append(NamespaceKept(b"%d" % slot))
        else:
            metas = metas_of([number], 10)
            metas["segment"], metas["offset"], metas["generation"] = held[place], slot * CLASS, number + 1
            records.append(BlocksStored(metas))
    return records


@given(acts, st.lists(st.integers(0, 30), min_size=2, max_size=4), st.integers(0, 15))
def test_told_again_is_what_was_told(told: list[tuple[str, int, int]], cuts: list[int], left: int) -> None:
    """Repeated records give the same index, alone or after some of the journals that they repeat."""
    begun: list[Record] = [SegmentBegun(place, place + 1, 1, CLASS, 8) for place in range(2)]
    records = [*begun, *records_of(told)]
    bounds = [len(begun), *(len(begun) + cut for cut in sorted(cuts)), len(records)]
    with tempfile.TemporaryDirectory() as made:
        write_snapshot(Path(made), replay(StoredIndex(), records[: bounds[1]]), store=STORE, number=1)
        snapshot = open_index(Path(made), store=STORE).index
        journals = [records[start:stop] for start, stop in pairwise(bounds[1:])]
        index = snapshot
        for part in journals:
            index = replay(index, part)
        after = snapshot
        for number, part in enumerate(journals):
            after = replay(after, part) if left >> number & 1 else after
        after = replay(after, [*changes_since(snapshot, index), Marks(index.next_segment, index.next_generation)])
        assert same_index(after, index)
        assert (after.next_segment, after.next_generation) == (index.next_segment, index.next_generation)
