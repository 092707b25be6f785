"""The library's loops and the plain ones find the same pages in any bytes, and read nothing beyond them."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from tests.compiled import NEEDS_LIBRARY, check_library
from tests.depth import count
from tierd.client import copying, mapping, onesided
from tierd.client.mapping import Segment, SegmentTable
from tierd.core.block import slice_lengths
from tierd.core.directory import MIN_BLOCKS, TABLE_OFFSET, Directory, directory_bytes, keys_of, places_of
from tierd.core.meta import META, META_BYTES, new_meta, sums_of
from tierd.core.model import SegmentAssignment
from tierd.native import find_library
from tierd.testing import chain, content_of
from tierd.tiers.catalogue import Catalogue, CatalogueHead
from tierd.tiers.checksum import record_checksum, slice_sums

PAGES, CLASS_BYTES, NAMESPACE, TOKENS, SHORT = 16, 16384, 7, 16, 5
ROUNDS = count(test=400, nightly=20_000, weekly=200_000)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fenced(length: int) -> np.ndarray:
    """Memory behind which no byte can be read."""
    whole = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
    array = np.frombuffer(memory, np.uint8)
    assert _libc.mprotect(array.ctypes.data + whole, mmap.PAGESIZE, 0) == 0
    return array[whole - length : whole]


class Memory:
    """Segments with a block in each of their pages, and a directory that knows them. names: of all, in the order of
    their pages."""

    def __init__(self, segments: int = 3) -> None:
        self.names = chain(1, segments * PAGES)
        self.segments = [self._segment(number) for number in range(segments)]
        words = fenced(directory_bytes(MIN_BLOCKS)).view("<u8")
        self.directory, self.words = Directory.new(words), words[TABLE_OFFSET // 8 :]
        number, slot = np.divmod(np.arange(len(self.names), dtype=np.uint32), np.uint32(PAGES))
        self.keys = keys_of(NAMESPACE, self.names)
        self.directory.add(self.keys, places_of(np.ones(len(number), np.uint16), number + 1, slot))

    def _segment(self, number: int) -> Segment:
        assignment = SegmentAssignment(1, number, number + 1, 4, CLASS_BYTES, PAGES, 5, None, fresh=False)
        head = CatalogueHead(store=bytes(16), segment_bytes=PAGES * CLASS_BYTES, assignment=assignment)
        table, data = fenced(head.layout.total_bytes), fenced(PAGES * CLASS_BYTES)
        catalogue = Catalogue(memoryview(table), head=head)  # type: ignore[arg-type]
        catalogue.write_head(head)
        catalogue.is_allocated = True
        slots, generations = np.arange(PAGES, dtype=np.uint32), np.arange(PAGES, dtype=np.uint64) + 100 * number + 1
        catalogue.stamp(slots, generations)
        metas, tables = new_meta(PAGES), []
        metas["generation"], metas["namespace"], metas["tokens"] = generations, NAMESPACE, TOKENS
        metas["layers"] = slots % 3
        for slot, name in enumerate(self.names[number * PAGES :][:PAGES]):
            length = CLASS_BYTES - 32 * slot
            metas["hash"][slot], metas["stored_length"][slot] = name, length
            data[slot * CLASS_BYTES :][:length] = content_of(name, length)
            tables.append(slice_sums(data[slot * CLASS_BYTES :][:length], slice_lengths(length, slot % 3)))
        catalogue.publish(slots, metas=metas, slices=tables)
        return Segment(number + 1, 1, data, *mapping.catalogue_of(number + 1, table), is_writable=False)

    def rows(self, table: SegmentTable, which: np.ndarray, last: int = TOKENS) -> tuple[np.ndarray, int]:
        """The pages that the form under test finds of these blocks."""
        hashes = np.ascontiguousarray(self.names[which])
        names = np.array([(hashes.ctypes.data, len(hashes), NAMESPACE, TOKENS, last, 0)], onesided.NAMES)
        return onesided._located(self.directory, table, names, len(hashes))


@pytest.fixture(params=["library", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms, where there are two."""
    if request.param == "plain":
        for module in (onesided, copying):
            monkeypatch.setattr(module, "_library", None)
    else:
        check_library()
    return str(request.param)


@pytest.mark.usefixtures("form")
def test_what_is_there_is_found_and_copied() -> None:
    """Blocks of several segments, of many lengths and layers, in any order: all are found where they lie, and copied
    whole."""
    memory = Memory()
    table, which = SegmentTable(memory.segments), np.random.default_rng(1).permutation(len(memory.names))
    rows, unmapped = memory.rows(table, which)
    assert (len(rows), unmapped) == (len(which), onesided.NOWHERE)
    pages = onesided.Pages(rows, table)
    assert pages.lengths == [CLASS_BYTES - 32 * (at % PAGES) for at in which.tolist()]
    out = [np.zeros(length, np.uint8) for length in pages.lengths]
    assert pages.copy_to(out).all()
    assert all((block == content_of(memory.names[at], len(block))).all() for at, block in zip(which, out, strict=True))


@pytest.mark.usefixtures("form")
def test_up_to_the_first_that_is_not_there() -> None:
    """A block that nobody entered, of other tokens, or in a segment that is not mapped ends what is found; of the
    last kind it says which segment."""
    memory = Memory()
    table, which = SegmentTable(memory.segments), np.arange(6)
    memory.directory.remove(memory.keys[4:5], places_of(np.ones(1, np.uint16), np.ones(1, np.uint32), np.uint32([4])))
    assert len(memory.rows(table, which)[0]) == 4
    assert len(memory.rows(table, which[:3], last=SHORT)[0]) == 2
    rows, unmapped = memory.rows(SegmentTable(memory.segments[:1]), np.array([2, PAGES + 3, 3]))
    assert (len(rows), unmapped) == (1, 1 << 32 | 2)
    assert len(memory.rows(SegmentTable(), which)[0]) == 0


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("what", ["byte", "table", "word", "retired"])
def test_what_has_changed_is_not_good(what: str) -> None:
    """A page whose bytes, table or word have changed since it was found is no good copy, and the others are; one
    that is retired is good for who leases it."""
    memory = Memory(1)
    table = SegmentTable(memory.segments)
    pages = onesided.Pages(memory.rows(table, np.arange(PAGES))[0], table)
    segment = memory.segments[0]
    if what == "byte":
        segment.data[3 * CLASS_BYTES + 11] ^= 1
    elif what == "table":
        np.frombuffer(segment.tables, np.uint8)[3 * segment.slice_words * 8 + 1] ^= 1
    else:
        segment.words[3] ^= np.uint64(1 << 63 if what == "retired" else 4)
    out = [np.zeros(length, np.uint8) for length in pages.lengths]
    expected = [at != 3 for at in range(PAGES)]
    assert pages.copy_to(out).tolist() == expected
    assert pages.copy_to(out, is_leased=True).tolist() == (expected if what != "retired" else [True] * PAGES)


@NEEDS_LIBRARY
def test_both_forms_say_the_same_of_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library and the plain form find and judge the same pages in random directories, entries, tables and words;
    neither reads beyond its memory."""
    chance, memory = np.random.default_rng(2), Memory()
    places, whole = [*range(len(memory.segments))], [_bytes_of(segment) for segment in memory.segments]
    words, seen = memory.words.copy(), 0
    for _ in range(ROUNDS):
        for segment, (metas, tables, current) in zip(memory.segments, whole, strict=True):
            _spoil(np.frombuffer(segment.metas, np.uint8), metas, chance, META_BYTES)
            _spoil(np.frombuffer(segment.tables, np.uint8), tables, chance, 8)
            _spoil(segment.words.view(np.uint8), current, chance, 8)
            if chance.random() < 0.7:  # as if the daemon had written it
                entries = np.frombuffer(segment.metas, META)
                entries["checksum"] = sums_of(entries, record_checksum)
        memory.words[:] = words
        entries = memory.words.reshape(-1, 2)
        used = np.flatnonzero(entries[:, 0])
        hit = used[chance.random(len(used)) < chance.choice([0.0, 0.1, 1.0])]
        wild = [*chance.integers(0, 1 << 63, 4, dtype=np.uint64), *(1 << 56 | 2 << 24 | chance.integers(0, 1 << 24, 4))]
        entries[hit, 1] = chance.choice(np.array([*entries[used, 1], *wild * 4], np.uint64), len(hit))
        table = SegmentTable([memory.segments[at] for at in places if chance.random() < 0.9])
        which, last = (
            chance.permutation(len(memory.names))[: chance.integers(1, 9)],
            int(chance.choice([TOKENS, SHORT])),
        )
        found = [memory.rows(table, which, last)]
        with monkeypatch.context() as plain:
            plain.setattr(onesided, "_library", None)
            found.append(memory.rows(table, which, last))
        assert found[0][0].tolist() == found[1][0].tolist() and found[0][1] == found[1][1]
        seen += len(found[0][0])
        _same_judgements(found[0][0])
    assert seen > ROUNDS


def _same_judgements(rows: np.ndarray) -> None:
    blocks = copying.blocks_of(rows["source"], [0] * len(rows), rows["length"], rows["layers"])
    sums, good = copying.sum_and_copy(blocks), np.zeros((2, len(rows)), np.bool_)
    onesided.plain_check(rows, sums, onesided.NOWHERE, good[0])
    library = find_library()
    assert library is not None
    library.tierd_check(rows.ctypes.data, len(rows), sums.ctypes.data, onesided.NOWHERE, good[1].ctypes.data)
    assert good[0].tolist() == good[1].tolist()


def _bytes_of(segment: Segment) -> tuple[bytes, bytes, bytes]:
    return bytes(segment.metas), bytes(segment.tables), segment.words.tobytes()


def _spoil(raw: np.ndarray, whole: bytes, chance: np.random.Generator, width: int) -> None:
    """As it was, but for a byte of some rows."""
    raw[:] = np.frombuffer(whole, np.uint8)
    rows = np.flatnonzero(chance.random(len(raw) // width) < 0.05)
    fields = range(width) if width != META_BYTES or chance.random() < 0.5 else (*range(92, 96), *range(204, 208))
    raw[rows * width + chance.choice(fields, len(rows))] ^= chance.integers(1, 256, len(rows), dtype=np.uint8)
