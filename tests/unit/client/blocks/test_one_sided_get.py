"""The library's loops and the plain ones return the same pages for any bytes, and never read beyond."""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from tests.compiled import NEEDS_LIBRARY, check_library
from tests.depth import count
from tierd import failpoint
from tierd.checksum import record_checksum, slice_sums
from tierd.client.blocks import copying, one_sided_get
from tierd.client.session import mapping
from tierd.client.session.mapping import MappedSegment, SegmentTable
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.directory import MIN_BLOCKS, TABLE_OFFSET, Directory, directory_bytes, keys_of, places_of
from tierd.core.formats.layout import CATALOGUE_HEADER
from tierd.core.formats.meta import META, META_BYTES, new_meta, sums_of
from tierd.core.formats.model import SegmentAssignment
from tierd.errors import TierFailed, VersionMismatch
from tierd.native import find_library
from tierd.testing import chain, content_of
from tierd.tiers.arena.catalogue import Catalogue, CatalogueHead

PAGES, CLASS_BYTES, NAMESPACE, TOKENS, SHORT = 16, 16384, 7, 16, 5
ROUNDS = count(test=400, nightly=20_000, weekly=200_000)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fenced(length: int) -> np.ndarray:
    """Memory that is followed by an unreadable page."""
    whole = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
    array = np.frombuffer(memory, np.uint8)
    assert _libc.mprotect(array.ctypes.data + whole, mmap.PAGESIZE, 0) == 0
    return array[whole - length : whole]


class Memory:
    """Segments with a block in each page, and a directory of them. names: of all blocks, in page order."""

    def __init__(self, segments: int = 3) -> None:
        self.names = chain(1, segments * PAGES)
        self.catalogues = list[Catalogue]()
        self.contents = list[bytes]()
        self.segments = [self._segment(number) for number in range(segments)]
        words = fenced(directory_bytes(MIN_BLOCKS)).view("<u8")
        self.directory, self.words = Directory.new(words), words[TABLE_OFFSET // 8 :]
        number, slot = np.divmod(np.arange(len(self.names), dtype=np.uint32), np.uint32(PAGES))
        self.keys = keys_of(NAMESPACE, self.names)
        self.directory.add(self.keys, places_of(np.ones(len(number), np.uint16), number + 1, slot))

    def _segment(self, number: int) -> MappedSegment:
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
            data[slot * CLASS_BYTES :][:length] = content = content_of(name, length)
            self.contents.append(content.tobytes())
            tables.append(slice_sums(data[slot * CLASS_BYTES :][:length], slice_lengths(length, slot % 3)))
        catalogue.publish(slots, metas=metas, slices=tables)
        self.catalogues.append(catalogue)
        return MappedSegment(number + 1, 1, data, *mapping.catalogue_of(number + 1, table), is_writable=False)

    def rows(self, table: SegmentTable, which: np.ndarray, last: int = TOKENS) -> tuple[np.ndarray, int]:
        """The pages that the form under test locates for these blocks."""
        hashes = np.ascontiguousarray(self.names[which])
        names = np.array([(hashes.ctypes.data, len(hashes), NAMESPACE, TOKENS, last, 0)], one_sided_get.NAMES)
        return one_sided_get._located(self.directory, table, names, len(hashes))


@pytest.fixture(params=["library", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms, if the library is built."""
    if request.param == "plain":
        for module in (one_sided_get, copying):
            monkeypatch.setattr(module, "_library", None)
    else:
        check_library()
    return str(request.param)


@pytest.mark.usefixtures("form")
def test_what_is_there_is_found_and_copied() -> None:
    """Blocks of several segments, lengths and layer counts are located and copied whole in any order."""
    memory = Memory()
    table, which = SegmentTable(memory.segments), np.random.default_rng(1).permutation(len(memory.names))
    rows, unmapped = memory.rows(table, which)
    assert (len(rows), unmapped) == (len(which), one_sided_get.NOWHERE)
    pages = one_sided_get.Pages(rows, table)
    assert pages.lengths == [CLASS_BYTES - 32 * (at % PAGES) for at in which.tolist()]
    out = [np.zeros(length, np.uint8) for length in pages.lengths]
    assert pages.copy_to(out).all()
    assert all((block == content_of(memory.names[at], len(block))).all() for at, block in zip(which, out, strict=True))


@pytest.mark.usefixtures("form")
def test_up_to_the_first_that_is_not_there() -> None:
    """A missing block, other tokens or an unmapped segment ends the result; an unmapped segment is named."""
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
    """A page that changed since its lookup is bad, the others are good; retired is good for a leaseholder."""
    memory = Memory(1)
    table = SegmentTable(memory.segments)
    pages = one_sided_get.Pages(memory.rows(table, np.arange(PAGES))[0], table)
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


class Reuse:
    """The daemon moves the first page of a segment to another block.
    `now` restores memory to its state after any of these steps.
    """

    def __init__(self, memory: Memory, name: np.ndarray) -> None:
        segment, catalogue, slot = memory.segments[0], memory.catalogues[0], np.zeros(1, np.uint32)
        self._parts = [np.frombuffer(its, np.uint8) for its in (segment.metas, segment.tables)]
        self._parts += [segment.words.view(np.uint8), segment.data]
        self._states = list[list[np.ndarray]]()
        self.content = content_of(name, CLASS_BYTES)
        meta, half = new_meta(1), CLASS_BYTES // 2
        meta["generation"], meta["namespace"], meta["tokens"], meta["stored_length"] = (
            99,
            NAMESPACE,
            TOKENS,
            CLASS_BYTES,
        )
        meta["hash"] = name
        slices = [slice_sums(self.content, slice_lengths(CLASS_BYTES, 0))]
        self._note()
        for step in (
            lambda: catalogue.retire(slot, segment.words[:1].copy()),
            lambda: catalogue.retract(slot),
            lambda: catalogue.stamp(slot, meta["generation"]),
            lambda: segment.data.__setitem__(slice(half), self.content[:half]),
            lambda: segment.data.__setitem__(slice(half, CLASS_BYTES), self.content[half:]),
            lambda: catalogue.publish(slot, metas=meta, slices=slices),
        ):
            failpoint.watch(lambda _point: self._note())  # notes the state in the middle of publishing
            step()
            failpoint.watch(None)
            self._note()

    def __len__(self) -> int:
        return len(self._states)

    def now(self, number: int) -> None:
        """Restores memory to its state after this step."""
        for part, was in zip(self._parts, self._states[number], strict=True):
            part[:] = was

    def _note(self) -> None:
        self._states.append([part.copy() for part in self._parts])


@pytest.mark.usefixtures("form")
def test_a_page_that_is_reused_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A good result is the whole requested block, for all daemon steps between a reader's lookup,
    copy and check.
    """
    memory, other, copy = Memory(1), chain(2, 1), copying.sum_and_copy
    reuse, table = Reuse(memory, other[0]), SegmentTable(memory.segments)
    memory.names = np.concatenate([memory.names, other])
    memory.directory.add(
        keys_of(NAMESPACE, other), places_of(np.ones(1, np.uint16), np.ones(1, np.uint32), np.uint32([0]))
    )
    served = set[tuple[bool, int, int, int]]()
    for is_new, (look, at, last) in product((False, True), combinations_with_replacement(range(len(reuse)), 3)):
        reuse.now(look)
        rows = memory.rows(table, np.array([-1 if is_new else 0]))[0]
        if not len(rows):
            continue

        def copied(blocks: np.ndarray, at: int = at, last: int = last) -> copying.Sums:
            reuse.now(at)
            sums = copy(blocks)
            reuse.now(last)
            return sums

        monkeypatch.setattr(copying, "sum_and_copy", copied)
        out = np.zeros(CLASS_BYTES, np.uint8)
        if one_sided_get.Pages(rows, table).copy_to([out]).all():
            assert out.tobytes() == (reuse.content.tobytes() if is_new else memory.contents[0])
            served.add((is_new, look, at, last))
        monkeypatch.setattr(copying, "sum_and_copy", copy)
    end = len(reuse) - 1
    assert served == {(False, 0, 0, 0), (True, end, end, end)}


def test_whatever_the_head_of_a_catalogue_says() -> None:
    """A segment whose catalogue head has other numbers is refused by name, or all its parts stay
    within the mapping.
    """
    chance, memory, seen = np.random.default_rng(4), Memory(1), 0
    whole = np.frombuffer(memory.catalogues[0]._memory, np.uint8)
    data, catalogue = (os.memfd_create(name) for name in ("data", "catalogue"))
    os.ftruncate(data, PAGES * CLASS_BYTES)
    try:
        for _ in range(ROUNDS):
            raw = whole.copy()
            head = raw[: CATALOGUE_HEADER.itemsize].view(CATALOGUE_HEADER)
            for name in chance.choice(["pages", "class_bytes", "slice_words", "version", "segment"], 2):
                head[name] = chance.integers(1 << 32, dtype=np.uint64) >> np.uint64(chance.integers(33))
            os.pwrite(catalogue, raw.tobytes(), 0)
            given = {"data": (data, PAGES * CLASS_BYTES), "catalogue": (catalogue, len(raw))}
            try:
                segment = mapping.map_segment((1, 1), **given, is_writable=False)
            except (TierFailed, VersionMismatch):
                continue
            pages, seen = len(segment.words), seen + 1
            assert pages * segment.class_bytes <= len(segment.data) == PAGES * CLASS_BYTES
            assert len(segment.metas) == pages * META_BYTES
            assert len(segment.tables) >= pages * segment.slice_words * 8
    finally:
        os.close(data)
        os.close(catalogue)
    assert seen > ROUNDS // 50


@NEEDS_LIBRARY
def test_both_forms_say_the_same_of_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On random directories, entries, tables and words, both forms return the same pages and
    judgements. Good pages are whole requested blocks. Neither form reads beyond its memory.
    """
    chance, memory = np.random.default_rng(2), Memory()
    places, whole = [*range(len(memory.segments))], [_bytes_of(segment) for segment in memory.segments]
    words, seen, right = memory.words.copy(), 0, 0
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
            plain.setattr(one_sided_get, "_library", None)
            found.append(memory.rows(table, which, last))
        assert found[0][0].tolist() == found[1][0].tolist() and found[0][1] == found[1][1]
        seen += len(found[0][0])
        good = _same_judgements(found[0][0])
        right += sum(good)
        for row, at in zip(found[0][0][good], which[: len(good)][good].tolist(), strict=True):
            assert ctypes.string_at(int(row["source"]), int(row["length"])) == memory.contents[at]
    assert seen > right > ROUNDS


def _same_judgements(rows: np.ndarray) -> np.ndarray:
    blocks = copying.blocks_of(rows["source"], [0] * len(rows), rows["length"], rows["layers"])
    sums, good = copying.sum_and_copy(blocks), np.zeros((2, len(rows)), np.bool_)
    one_sided_get.plain_check(rows, sums, one_sided_get.NOWHERE, good[0])
    library = find_library()
    assert library is not None
    library.tierd_check(rows.ctypes.data, len(rows), sums.ctypes.data, one_sided_get.NOWHERE, good[1].ctypes.data)
    assert good[0].tolist() == good[1].tolist()
    return good[0]


def _bytes_of(segment: MappedSegment) -> tuple[bytes, bytes, bytes]:
    return bytes(segment.metas), bytes(segment.tables), segment.words.tobytes()


def _spoil(raw: np.ndarray, whole: bytes, chance: np.random.Generator, width: int) -> None:
    """Restores the bytes and then changes one byte of some rows."""
    raw[:] = np.frombuffer(whole, np.uint8)
    rows = np.flatnonzero(chance.random(len(raw) // width) < 0.05)
    fields = range(width) if width != META_BYTES or chance.random() < 0.5 else (*range(92, 96), *range(204, 208))
    raw[rows * width + chance.choice(fields, len(rows))] ^= chance.integers(1, 256, len(rows), dtype=np.uint8)
