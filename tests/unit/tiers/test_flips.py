"""Single-bit flips in every bit of every record: damage is detected, and no other record is lost.

`FLIP_SEED=` selects other blocks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.depth import count, report
from tests.unit.tiers import disk_formats
from tests.unit.tiers.disk_formats import STORE, Format
from tests.unit.tiers.store_world import content, extents_of, metas_of, table_digest
from tierd.checksum import slice_sums, verify
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.layout import CATALOGUE_HEADER, HEADER_BYTES
from tierd.core.formats.meta import META_BYTES
from tierd.errors import CorruptRecord
from tierd.tiers.store import journal, slots
from tierd.tiers.store.snapshot import read_snapshot

SEED = int(os.environ.get("FLIP_SEED", "1"))
HEADER_FLIPS = count(test=8_192, nightly=1_200_000, weekly=2_400_000)
PAYLOAD_FLIPS = count(test=8_192, nightly=1_775_000, weekly=3_500_000)
FILE_FLIPS = count(test=1_000, nightly=100_000, weekly=100_000)
"""Upper bound: each bit of a file once, some thousands."""
LAYERS, LENGTH = 5, 20_480
"""Bytes of a payload: five slices of 4096 bytes."""
COVERED = META_BYTES + 8 * LAYERS
"""Bytes of such a block's header that its checksums cover; zeros follow."""
BATCH = 1024


def flips(length: int, total: int, *, step: int = 1) -> Iterator[tuple[int, int]]:
    """Byte and bit of each flip: every bit of `length` bytes, over and over; step > 1 spreads them out."""
    bits = length * 8
    step = next(s for s in itertools.count(step) if np.gcd(s, bits) == 1)
    for turn in range(total):
        bit = turn * step % bits
        yield bit // 8, bit % 8


def flipped(data: bytes, place: tuple[int, int]) -> bytes:
    """The bytes with one bit changed."""
    changed = bytearray(data)
    changed[place[0]] ^= 1 << place[1]
    return bytes(changed)


def _tables(key: int) -> list[np.ndarray]:
    return [slice_sums(content(key, LENGTH), slice_lengths(LENGTH, LAYERS))]


def _header(key: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A slot's header, and the META and EXTENT that are expected there."""
    extents = extents_of(1, [key % 8], generation=key + 1, length=LENGTH)
    metas = slots.stamp(metas_of([key], LENGTH), extents, _tables(key), store=STORE)
    header = np.zeros((1, slots.HEADER_BYTES), dtype=np.uint8)
    slots.fill_headers(header, range(len(header)), metas, _tables(key))
    return header, metas_of([key], LENGTH), extents


@pytest.mark.timeout(3600)
def test_slot_headers() -> None:
    """Every flip in META or the slice table of a slot is refused; flips in the zeros behind are harmless."""
    places = itertools.chain(flips(COVERED, HEADER_FLIPS - BATCH), flips(slots.HEADER_BYTES, BATCH, step=31))
    refused = told = 0
    for batch in range(-(-HEADER_FLIPS // BATCH)):
        given, metas, extents = _header(SEED + batch // 32)
        some = np.array(list(itertools.islice(places, BATCH)))
        headers = np.repeat(given, len(some), axis=0)
        headers[np.arange(len(some)), some[:, 0]] ^= (1 << some[:, 1]).astype(np.uint8)
        found, tables = slots.read_tables(headers)
        is_whole = np.array([table is not None for table in tables])
        good = is_whole & slots.matches(found, np.repeat(metas, len(some)), np.repeat(extents, len(some)), store=STORE)
        end = META_BYTES + 8 * int(found["slices"][good][0]) if good.any() else slots.HEADER_BYTES
        assert not good[some[:, 0] < end].any()
        assert good[some[:, 0] >= end].all()
        assert (headers[good, :end] == given[0, :end]).all()
        refused += int((~good).sum())
        told += len(some)
    report("flips at the decoder", of="slot header", flips=told, refused=refused, harmless=told - refused)


@pytest.mark.timeout(3600)
def test_payloads() -> None:
    """Slice table and block digest each detect every flip in a payload."""
    places, told = flips(LENGTH, PAYLOAD_FLIPS, step=1 if PAYLOAD_FLIPS > LENGTH * 8 else 17), 0
    cuts = slice_lengths(LENGTH, LAYERS)
    assert len(cuts) == LAYERS
    for key in itertools.count(SEED):
        payload = bytearray(content(key, LENGTH))
        table = slice_sums(payload, cuts)
        digest = table_digest(table)
        assert verify(payload, table, cuts)
        for at, bit in itertools.islice(places, LENGTH * 8):
            payload[at] ^= 1 << bit
            sums = slice_sums(payload, cuts)
            assert table_digest(sums) != digest
            assert np.flatnonzero(sums != table).tolist() == [at // cuts[0]]
            payload[at] ^= 1 << bit
            told += 1
        if told == PAYLOAD_FLIPS:
            break
    report("flips at the decoder", of="payload", flips=told, refused=told)


# -- files: a read returns the written pieces, without the damaged ones


@dataclass(frozen=True)
class Flipping:
    """pieces: a file's content as comparable parts. covers: whether a flip in this byte must cost a part."""

    given: Format
    pieces: Callable[[bytes], list[object]]
    covers: Callable[[int], bool]


def _journal(directory: Path) -> Flipping:
    given, path = disk_formats.journal_file(directory), directory / "journal" / "journal-0000000000000004.log"

    def pieces(data: bytes) -> list[object]:
        path.write_bytes(data)
        return [*map(journal.encode_record, journal.read_journal(path.parent, store=STORE, number=4))]

    return Flipping(given, pieces, lambda _at: True)


def _snapshot(directory: Path) -> Flipping:
    given, path = disk_formats.snapshot_file(directory), directory / "snapshot" / "snapshot-0000000000000003.bin"

    def pieces(data: bytes) -> list[object]:
        path.write_bytes(data)
        found = read_snapshot(path.parent, store=STORE, number=3)
        return [*sorted(map(repr, found.segments.values())), *found.namespaces, *(m.tobytes() for m in found.metas)]

    return Flipping(given, pieces, lambda _at: True)


def _catalogue(directory: Path) -> Flipping:
    given = disk_formats.catalogue_file(directory)
    regions = [(at, at + dtype.itemsize) for name, at, dtype in given.regions if name == "meta"]
    regions.append((0, CATALOGUE_HEADER.itemsize))
    regions += [(HEADER_BYTES + 8 * slot, HEADER_BYTES + 8 * slot + 8) for slot in (0, 2, 5)]

    def pieces(data: bytes) -> list[object]:
        found = given.decode(data)
        assert isinstance(found, tuple)
        return _rows(*found)

    return Flipping(given, pieces, lambda at: any(start <= at < stop for start, stop in regions))


def _rows(numbers: list[int], raw: bytes) -> list[object]:
    return [(number, raw[i * META_BYTES : (i + 1) * META_BYTES]) for i, number in enumerate(numbers)]


def _sessions(directory: Path) -> Flipping:
    given = disk_formats.session_table(directory)
    regions = [(at, at + dtype.itemsize) for _, at, dtype in given.regions]

    def pieces(data: bytes) -> list[object]:
        found = given.decode(data)
        assert isinstance(found, list)
        return [piece for piece in found if isinstance(piece, tuple)]  # else it reports damage, and all is sealed

    return Flipping(given, pieces, lambda at: any(start <= at < stop for start, stop in regions))


def _log(directory: Path) -> Flipping:
    given = disk_formats.namespace_log(directory)
    return Flipping(given, lambda data: list(given.decode(data)), lambda _at: True)  # type: ignore[call-overload]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", [_journal, _snapshot, _catalogue, _sessions, _log], ids=lambda make: make.__name__[1:])
def test_files(make: Callable[[Path], Flipping], tmp_path: Path) -> None:
    """A flip in an index file costs the parts under that checksum and never adds a part."""
    flipping = make(tmp_path)
    data, refused = flipping.given.data, 0
    whole = flipping.pieces(data)
    where = [at for at in range(len(data)) if flipping.covers(at) or at % 4096 == 0]
    told = min(FILE_FLIPS, len(where) * 8)
    for turn, bit in flips(len(where), told, step=len(where) * 8 // told):
        place = where[turn], bit
        try:
            found = flipping.pieces(flipped(data, place))
        except CorruptRecord:
            found = []
        assert all(piece in whole for piece in found), place
        assert not flipping.covers(place[0]) or len(found) < len(whole), place
        refused += len(found) < len(whole)
    assert len(whole) > 1
    report("flips at the decoder", of=flipping.given.name, flips=told, refused=refused)
