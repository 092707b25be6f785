"""Slots: headers, vectors over adjacent slots, and reads and writes that come back short."""

from __future__ import annotations

import errno
import os
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tiers.store_world import CLASS_BYTES, extents_of, metas_of, tables_of
from tierd.core.formats.meta import META_BYTES
from tierd.tiers.io.files import OsFiles
from tierd.tiers.store import slots
from tierd.tiers.store.slots import (
    HEADER_BYTES,
    RUN_BYTES,
    RUN_SLOTS,
    TABLE_SLICES,
    HeaderPool,
    SlotRun,
    advance,
    allows_direct,
    fill_headers,
    join_runs,
    matches,
    read_at,
    read_tables,
    stamp,
    vector,
    whole_pages,
    write_at,
)

STORE = bytes(range(16))
MOST_BYTES = 1 << 20


def headers_of(keys: list[int]) -> np.ndarray:
    extents = extents_of(1, range(len(keys)), generation=1)
    stamped = stamp(metas_of(keys), extents, tables_of(keys), store=STORE)
    area = np.zeros((len(keys), HEADER_BYTES), dtype=np.uint8)
    fill_headers(area, range(len(area)), stamped, tables_of(keys))
    return area


def test_header_comes_back() -> None:
    """Records and tables of full and empty length come back as written and match the expected ones."""
    keys, extents = [1, 2], extents_of(1, [0, 1], generation=1)
    tables = [tables_of([1])[0], np.arange(TABLE_SLICES, dtype=np.uint64)]
    area = np.full((2, HEADER_BYTES), 0xFF, dtype=np.uint8)
    fill_headers(area, range(len(area)), stamp(metas_of(keys), extents, tables, store=STORE), tables)
    metas, found = read_tables(area)
    assert [table is not None and table.tolist() for table in found] == [table.tolist() for table in tables]
    assert matches(metas, metas_of(keys), extents, store=STORE).all()


@pytest.mark.parametrize("alike", [True, False])
def test_each_header_is_its_blocks_own_in_whatever_order_they_lie(alike: bool) -> None:
    """Rows in any disk order get exactly their own records and tables, and no other header changes."""
    for rows in map(list, permutations(range(1, 5))):
        keys, extents = [row + 10 for row in rows], extents_of(1, rows, generation=1)
        tables = [np.arange(3 if alike else row, dtype=np.uint64) + np.uint64(row) for row in rows]
        area = np.full((6, HEADER_BYTES), 0xFF, dtype=np.uint8)
        fill_headers(area, rows, stamp(metas_of(keys), extents, tables, store=STORE), tables)
        metas, found = read_tables(area[rows])
        assert [table is not None and table.tolist() for table in found] == [table.tolist() for table in tables]
        assert matches(metas, metas_of(keys), extents, store=STORE).all()
        assert not any(area[row, META_BYTES + table.nbytes :].any() for row, table in zip(rows, tables, strict=True))
        assert (area[[0, 5]] == 0xFF).all()


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    """A flip in the record or the slice table invalidates the header; the bytes behind carry nothing."""
    area = headers_of([1])
    used = 256 + 8 * len(tables_of([1])[0])
    for bit in range(used * 8):
        area[0, bit // 8] ^= 1 << bit % 8
        assert read_tables(area)[1] == [None]
        area[0, bit // 8] ^= 1 << bit % 8
    assert read_tables(area)[1][0] is not None


@pytest.mark.parametrize("field", ["segment", "offset", "generation", "length"])
def test_header_of_another_place_or_life_does_not_match(field: str) -> None:
    """Segment, offset, generation and length are compared with the extent."""
    extents, metas = extents_of(1, [0], generation=1), read_tables(headers_of([1]))[0]
    assert matches(metas, metas_of([1]), extents, store=STORE).all()
    extents[field] += 1
    assert not matches(metas, metas_of([1]), extents, store=STORE).any()


def test_header_of_another_block_or_store_does_not_match() -> None:
    """Hash, namespace and store id are compared."""
    extents, metas = extents_of(1, [0], generation=1), read_tables(headers_of([1]))[0]
    foreign = metas_of([1])
    foreign["namespace"] += 1
    assert not matches(metas, foreign, extents, store=STORE).any()
    assert not matches(metas, metas_of([2]), extents, store=STORE).any()
    assert not matches(metas, metas_of([1]), extents, store=bytes(16)).any()


def test_zeros_are_no_header() -> None:
    """A slot that was never written, or whose sector was zeroed, has no header."""
    assert read_tables(np.zeros((1, HEADER_BYTES), dtype=np.uint8))[1] == [None]


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 40)), unique=True, max_size=50))
def test_runs_cover_every_row_once_and_are_side_by_side(places: list[tuple[int, int]]) -> None:
    """Runs take each slot of a batch once, in order, adjacent and within bounds, and none could be longer."""
    extents = np.concatenate([extents_of(1, [], generation=1), *(extents_of(s, [n], generation=1) for s, n in places)])
    runs = join_runs(extents, class_bytes=[CLASS_BYTES] * len(places), most_bytes=MOST_BYTES)
    assert sorted(row for run in runs for row in run.rows) == list(range(len(places)))
    for run in runs:
        offsets = [int(extents["offset"][row]) for row in run.rows]
        assert offsets == [run.offset + i * CLASS_BYTES for i in range(len(offsets))]
        assert {int(extents["segment"][row]) for row in run.rows} == {run.segment}
        assert len(run.rows) <= min(RUN_SLOTS, MOST_BYTES // CLASS_BYTES)
    for run, after in pairwise(runs):
        is_full = len(run.rows) == min(RUN_SLOTS, MOST_BYTES // CLASS_BYTES)
        end = run.offset + len(run.rows) * CLASS_BYTES
        assert is_full or run.segment != after.segment or after.offset != end


def test_two_large_blocks_are_moved_at_once() -> None:
    """Blocks of 2 MiB, whose slots are a header longer, are written in pairs, and read one by one."""
    class_bytes = HEADER_BYTES + (2 << 20)
    extents = extents_of(1, range(4), generation=1)
    extents["offset"] = np.arange(4) * class_bytes
    assert [run.rows for run in join_runs(extents, class_bytes=[class_bytes] * 4, most_bytes=RUN_BYTES["write"])] == [
        (0, 1),
        (2, 3),
    ]
    assert len(join_runs(extents, class_bytes=[class_bytes] * 4, most_bytes=RUN_BYTES["read"])) == 4


def test_large_slots_are_moved_one_by_one() -> None:
    """Slots above half the bound are not joined."""
    extents = extents_of(1, [0, 1], generation=1)
    extents["offset"] = [0, MOST_BYTES]
    assert len(join_runs(extents, class_bytes=[MOST_BYTES] * 2, most_bytes=MOST_BYTES)) == 2


def test_vector_spans_exactly_the_slots() -> None:
    """Buffers of two slots, in slot order: header, page and filler, then header and page without a filler."""
    pool = HeaderPool(1)
    run, pages = SlotRun(1, 16384, 0, (1, 0)), whole_pages([memoryview(bytearray(8192))] * 2, np.array([4096, 5000]))
    with pool.borrow(2) as headers:
        headers[0], headers[1] = 1, 2
        buffers = vector(run, headers, pages, filler=pool.zeros)
    assert [len(b) for b in buffers] == [4096, 8192, 4096, 4096, 4096]
    assert [buffers[0][0], buffers[3][0]] == [2, 1]


@given(st.lists(st.integers(0, 5), max_size=6), st.data())
def test_advance_drops_exactly_the_bytes_done(sizes: list[int], data: st.DataObject) -> None:
    """The remaining buffers hold exactly the bytes not yet moved, in order."""
    text = bytes(range(sum(sizes)))
    ends = np.cumsum([0, *sizes]).tolist()
    buffers = [memoryview(text)[a:b] for a, b in pairwise(ends)]
    count = data.draw(st.integers(0, len(text)))
    assert b"".join(advance(buffers, count)) == text[count:]


@pytest.mark.parametrize("limit", [4096, 5000, 12_288])
def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Reads and writes that move only a part, aligned or not, continue until all bytes are moved."""
    whole = np.random.default_rng(1).bytes(40_960)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(slots.os, "preadv", lambda fd, bufs, at: preadv(fd, cut(bufs, limit), at))
    monkeypatch.setattr(slots.os, "pwritev", lambda fd, bufs, at: pwritev(fd, cut(bufs, limit), at))
    write_at(fd, 4096, [memoryview(whole)[:8192], memoryview(whole)[8192:]])
    assert (tmp_path / "f").read_bytes()[4096:] == whole
    target = bytearray(len(whole))
    assert read_at(fd, 4096, [memoryview(target)[:20_480], memoryview(target)[20_480:]]) == len(whole)
    assert bytes(target) == whole
    os.close(fd)


def cut(buffers: list[memoryview], limit: int) -> list[memoryview]:
    kept = []
    for buffer in buffers:
        kept.append(buffer[:limit])
        limit -= len(kept[-1])
    return [buffer for buffer in kept if len(buffer)]


def test_read_beyond_the_end_tells_how_much_there_was(tmp_path: Path) -> None:
    """A file that ends early gives fewer bytes, in whole pages, and no error."""
    (tmp_path / "f").write_bytes(bytes(6000))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    assert read_at(fd, 0, [memoryview(bytearray(8192))]) == 4096
    os.close(fd)


def test_write_that_makes_no_progress_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that accepts no bytes raises EIO instead of an endless loop."""
    monkeypatch.setattr(slots.os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="nothing") as raised:
        write_at(0, 0, [memoryview(b"x" * 4096)])
    assert raised.value.errno == errno.EIO


def test_refusal_of_direct_io_is_told_from_other_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL at open means no direct I/O, a full disk yes, other errors are raised; no probe file stays."""

    def refuse(code: int) -> None:
        def fail(path: Path, flags: int) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(OsFiles, "open", staticmethod(fail))

    refuse(errno.EINVAL)
    assert not allows_direct(tmp_path)
    refuse(errno.ENOSPC)
    assert allows_direct(tmp_path)
    refuse(errno.EACCES)
    with pytest.raises(OSError, match="Permission denied"):
        allows_direct(tmp_path)
    assert os.listdir(tmp_path) == []
