"""The journal: framing, torn tails, foreign frames, and the index that its records give."""

from __future__ import annotations

import errno
import itertools
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tiers.store_world import metas_of
from tierd.checksum import record_checksum
from tierd.core.formats.model import StructArray
from tierd.errors import VersionMismatch
from tierd.tiers.io import durable
from tierd.tiers.io.files import Files, OsFiles
from tierd.tiers.store.journal import (
    FRAME_LIMIT_BYTES,
    REMOVED,
    BlocksRemoved,
    BlocksStored,
    Journal,
    Marks,
    NamespaceKept,
    Record,
    SegmentBegun,
    decode_record,
    encode_record,
    is_torn,
    journal_path,
    read_journal,
)
from tierd.tiers.store.stored_index import StoredIndex, replay, select, slots_of

STORE = bytes(range(16))
CLASS = 8192


def placed(keys: list[int], *, segment: int, slots: list[int], generation: int = 1) -> StructArray:
    metas = metas_of(keys, 10)
    metas["segment"], metas["offset"] = segment, np.array(slots) * CLASS
    metas["generation"] = np.arange(len(keys)) + generation
    return metas


def removed(segment: int, *slots: int) -> BlocksRemoved:
    return BlocksRemoved(np.array([(segment, 0, slot * CLASS) for slot in slots], dtype=REMOVED))


def begun(segment: int, *, place: int = 0, pages: int = 8) -> SegmentBegun:
    return SegmentBegun(place, segment, 1, CLASS, pages)


RECORDS: list[Record] = [
    Marks(5, 1 << 40),
    begun(1),
    NamespaceKept(b"\x00\xffspace"),
    BlocksStored(placed([7, 8], segment=1, slots=[0, 3])),
    removed(1, 3),
]


def write(path: Path, records: list[Record], number: int = 4) -> Path:
    journal = Journal.create(path, store=STORE, number=number, first=records)
    journal.close()
    return journal_path(path, number)


def plain(records: list[Record]) -> list[bytes]:
    return [encode_record(record) for record in records]


def read(path: Path) -> tuple[list[bytes], int]:
    """The records of the journal, encoded, and the length of the dropped tail."""
    text = read_journal(path, store=STORE, number=4)
    return plain([*text]), text.cut_bytes


def held(index: StoredIndex) -> dict[tuple[int, int], int]:
    return {(int(m["segment"]), int(m["offset"]) // CLASS): int(m["hash"][0]) for m in index.metas}


def test_records_come_back_in_order(tmp_path: Path) -> None:
    """The records of several appends are read in order, and none is cut."""
    journal = Journal.create(tmp_path, store=STORE, number=4, first=RECORDS[:2])
    for record in RECORDS[2:]:
        journal.append([record])
    journal.close()
    assert read(tmp_path) == (plain(RECORDS), 0)
    assert journal.bytes == journal_path(tmp_path, 4).stat().st_size


def test_a_window_of_any_size_shows_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read window of any size gives the same records and cuts the same tail, wherever the window ends."""
    path = write(tmp_path, RECORDS * 2)
    path.write_bytes(path.read_bytes() + b"junk" * 30)
    for window in [*range(1, 700, 3), 1 << 20]:
        monkeypatch.setattr(durable, "WINDOW_BYTES", window)
        assert read(tmp_path) == (plain(RECORDS * 2), 120), window


def test_a_long_journal_is_never_in_memory_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a journal much longer than the window asks for one window at most, each part about once."""
    path = write(tmp_path, RECORDS * 200)
    asked, preadv = list[int](), os.preadv
    monkeypatch.setattr(durable, "WINDOW_BYTES", 1 << 14)
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: asked.append(sum(map(len, parts))) or preadv(fd, parts, at))
    assert len(read(tmp_path)[0]) == 200 * len(RECORDS)
    assert max(asked) <= 1 << 14
    assert sum(asked) <= 1.1 * path.stat().st_size


def test_removals_of_any_number_are_read_back(tmp_path: Path) -> None:
    """More removed blocks than fit a frame are all read back, as is the record after them."""
    rows = np.zeros(FRAME_LIMIT_BYTES // REMOVED.itemsize + 1, dtype=REMOVED)
    rows["segment"] = np.arange(len(rows))
    written = Journal.create(tmp_path, store=STORE, number=7)
    written.append([BlocksRemoved(rows), NamespaceKept(b"after")])
    written.close()
    *parts, last = read_journal(tmp_path, store=STORE, number=7)
    assert last == NamespaceKept(b"after")
    assert all(isinstance(record, BlocksRemoved) for record in parts)
    found = np.concatenate([record.rows for record in parts])  # type: ignore[union-attr]
    assert np.array_equal(found, rows)


def test_tail_torn_anywhere_is_cut(tmp_path: Path) -> None:
    """A file cut at any byte gives exactly its whole records and the length of the lost tail."""
    path = write(tmp_path, RECORDS)
    data = path.read_bytes()
    ends, seen = [48], set()
    for payload in plain(RECORDS):
        ends.append(ends[-1] + 16 + len(payload))
    for length in range(len(data)):
        path.write_bytes(data[:length])
        records, cut_bytes = read(tmp_path)
        assert records == plain(RECORDS)[: len(records)]
        assert len(records) < len(RECORDS)
        assert (cut_bytes == 0) == (length in (0, *ends))
        seen.add(len(records))
    assert seen == set(range(len(RECORDS)))


def test_every_flipped_bit_ends_the_reading_before_it(tmp_path: Path) -> None:
    """A flipped bit costs its record and those after it, and never makes another record."""
    path = write(tmp_path, RECORDS)
    data = path.read_bytes()
    for at in range(0, len(data), 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        records, _ = read(tmp_path)
        assert records == plain(RECORDS)[: len(records)]
        assert len(records) < len(RECORDS)


@pytest.mark.parametrize("origin", [{"store": bytes(16), "number": 4}, {"store": STORE, "number": 5}])
def test_journal_of_another_store_or_number_tells_nothing(tmp_path: Path, origin: dict[str, object]) -> None:
    """Frames are bound to their store and journal: a copied file is cut whole."""
    path = write(tmp_path, RECORDS)
    path.rename(journal_path(tmp_path, int(str(origin["number"]))))
    text = read_journal(tmp_path, **origin)  # type: ignore[arg-type]
    assert [*text] == []
    assert text.cut_bytes > 0


def test_frame_moved_within_the_file_is_not_believed(tmp_path: Path) -> None:
    """A frame is bound to its place: with the first frame removed, the second is not read in its place."""
    path = write(tmp_path, [NamespaceKept(b"first"), NamespaceKept(b"other")])
    data = path.read_bytes()
    frame = (len(data) - 48) // 2
    path.write_bytes(data[:48] + data[48 + frame :])
    assert read(tmp_path)[0] == []


def test_newer_format_is_refused_and_kept(tmp_path: Path) -> None:
    """A journal of a newer version raises VersionMismatch and stays unchanged."""
    path = write(tmp_path, RECORDS)
    head = bytearray(path.read_bytes()[:40])
    head[8] = 3
    data = bytes(head) + record_checksum(head).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(VersionMismatch, match="newer"):
        read(tmp_path)
    assert path.read_bytes() == data


@given(st.binary(max_size=64))
def test_no_payload_breaks_the_decoder(payload: bytes) -> None:
    """Bytes that are no record decode to None or a record, and raise nothing."""
    decode_record(payload)


def test_what_a_crash_leaves_of_the_last_record_is_torn(tmp_path: Path) -> None:
    """Any lost sectors of the last write, with or without its length, count as torn. So does a
    journal of which only the length was written."""
    ahead = len(write(tmp_path, RECORDS[:3]).read_bytes())
    journal_path(tmp_path, 4).unlink()
    path = write(tmp_path, [*RECORDS[:3], BlocksStored(placed([*range(1, 9)], segment=1, slots=[*range(8)]))])
    data = path.read_bytes()
    edges = [ahead, *range(512, len(data), 512), len(data)]
    pieces = list(pairwise(edges))
    for kept in itertools.product((True, False), repeat=len(pieces)):
        left = b"".join(data[a:b] if is_kept else bytes(b - a) for (a, b), is_kept in zip(pieces, kept, strict=True))
        path.write_bytes(data[:ahead] + left)
        records, cut_bytes = read(tmp_path)
        assert (len(records), cut_bytes > 0) == ((4, False) if all(kept) else (3, True))
        assert all(kept) or is_torn(tmp_path, store=STORE, number=4), kept
    for length in (0, 20, 512, len(data)):
        path.write_bytes(bytes(length))
        assert is_torn(tmp_path, store=STORE, number=4), length


def test_damage_before_whole_records_is_not_torn(tmp_path: Path) -> None:
    """A flipped bit is rot, except in a length that then points past the end; so are sectors lost
    before whole records. The last record is no exception."""
    path = write(tmp_path, [*RECORDS, BlocksStored(placed([*range(1, 9)], segment=1, slots=[*range(8)])), begun(2)])
    data = path.read_bytes()
    last = len(data) - 16 - len(encode_record(begun(2)))
    for at in [*range(last), *range(last + 8, len(data))]:
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        assert not is_torn(tmp_path, store=STORE, number=4), at
    for at in range(0, last - 512, 512):
        path.write_bytes(data[:at] + bytes(512) + data[at + 512 :])
        assert not is_torn(tmp_path, store=STORE, number=4), at


def test_append_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a broken write the file holds only whole frames and takes further appends."""
    journal = Journal.create(tmp_path, store=STORE, number=4, first=RECORDS[:1])

    def half(fd: int, data: bytes, *, offset: int, disk: Files) -> int:
        os.pwrite(fd, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_fully", half)
        with pytest.raises(OSError, match="full"):
            journal.append(RECORDS[1:])
    assert not journal.is_abandoned
    journal.append(RECORDS[1:])
    journal.close()
    assert read(tmp_path) == (plain(RECORDS), 0)


def test_failed_sync_abandons_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal whose sync failed is abandoned."""
    journal = Journal.create(tmp_path, store=STORE, number=4)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(OsFiles, "sync_data", staticmethod(fail))
    with pytest.raises(OSError, match="bad disk"):
        journal.sync()
    assert journal.is_abandoned
    journal.close()


# -- replay


def test_later_record_about_a_slot_decides() -> None:
    """A slot stored, removed and stored again holds the last block; a slot removed last holds none."""
    index = replay(
        StoredIndex(),
        [
            begun(1),
            BlocksStored(placed([1, 2, 3], segment=1, slots=[0, 1, 2])),
            removed(1, 0, 1),
            BlocksStored(placed([4], segment=1, slots=[1], generation=9)),
            removed(1, 2),
        ],
    )
    assert held(index) == {(1, 1): 4}
    assert index.next_generation == 10


def test_blocks_end_with_their_segment() -> None:
    """A segment that begins at another's place ends that one's blocks, wherever their records are."""
    stored = BlocksStored(placed([1], segment=1, slots=[0]))
    assert held(replay(StoredIndex(), [begun(1), stored, begun(2)])) == {}
    assert held(replay(StoredIndex(), [begun(1), stored, begun(2, place=1)])) == {(1, 0): 1}
    assert held(replay(StoredIndex(), [begun(1), begun(2), stored])) == {}


def test_block_that_lies_on_no_slot_is_not_believed() -> None:
    """Blocks off the slots' boundaries, beyond the segment, or of an unknown format are dropped."""
    metas = placed([1, 2, 3, 4], segment=1, slots=[0, 8, 1, 2])
    metas["offset"][2] += 4096
    metas["version"][3] = 99
    index = replay(StoredIndex(), [begun(1), BlocksStored(metas)])
    assert held(index) == {(1, 0): 1}


def test_marks_and_namespaces_only_grow() -> None:
    """The highest mark holds, a segment's beginning counts too, and a namespace is kept once."""
    index = replay(
        StoredIndex(),
        [Marks(7, 70), NamespaceKept(b"a"), Marks(3, 90), begun(20), NamespaceKept(b"b"), NamespaceKept(b"a")],
    )
    assert (index.next_segment, index.next_generation, index.namespaces) == (21, 90, [b"a", b"b"])


def test_select_leaves_out_segments_with_their_blocks() -> None:
    """Only chosen segments stay, and `slots_of` maps their blocks to slots."""
    stored = np.concatenate([placed([1], segment=5, slots=[3]), placed([2], segment=2, slots=[1])])
    index = replay(StoredIndex(), [begun(5), begun(2, place=1), BlocksStored(stored)])
    assert sorted(slots_of(index.metas, index.segments.values()).tolist()) == [1, 3]
    assert held(select(index, within=lambda s: s.place == 0)) == {(5, 3): 1}


OPS = st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 4)), max_size=40)


@given(OPS, st.integers(0, 40))
def test_replay_is_the_same_in_one_go_and_in_two(ops: list[tuple[bool, int, int]], cut: int) -> None:
    """Records replayed at once, or in two parts, give the same index as a dictionary."""
    records: list[Record] = [begun(1), begun(2, place=1), begun(3, place=2)]
    expected: dict[tuple[int, int], int] = {}
    for key, (is_stored, segment, slot) in enumerate(ops):
        if is_stored:
            records.append(BlocksStored(placed([key + 1], segment=segment, slots=[slot])))
            expected[segment, slot] = key + 1
        else:
            records.append(removed(segment, slot))
            expected.pop((segment, slot), None)
    halfway = replay(StoredIndex(), records[: 3 + cut])
    assert held(replay(halfway, records[3 + cut :])) == held(replay(StoredIndex(), records)) == expected
