"""Slab numbers, offsets and lengths of pieces: which are valid, and which are refused."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from tests.unit.gpu.processes import pieces_of
from tierd.core.formats.block import slice_lengths
from tierd.errors import InvalidArgument
from tierd.gpu.regions import Region, Regions
from tierd.gpu.runs import RUNS_MAX, RUNS_MIN, Runs, Way, coalesced, ways_of
from tierd.gpu.sums import STAGING_BYTES, parts

BASE, END = 1 << 40, 1 << 20


@pytest.fixture
def slabs() -> Regions:
    """Slab 1 of END bytes at BASE, and slab 2 of END // 2 bytes behind it."""
    regions = Regions("slab")
    regions.add(1, Region(BASE, END))
    regions.add(2, Region(BASE + END, END // 2))
    return regions


@pytest.mark.parametrize(
    ("slab", "offset", "length"),
    [(1, 0, END), (1, END, 0), (1, END - 1, 1), (2, END // 2 - 5, 5), (2, 0, 0)],
)
def test_what_lies_within_has_an_address(slabs: Regions, slab: int, offset: int, length: int) -> None:
    """A piece may reach the last byte, and an empty piece may be at the end."""
    pieces = pieces_of([0, length])
    pieces["slab"][1], pieces["slab_offset"][1] = slab, offset
    with slabs.used(pieces) as used:
        assert used.addresses.tolist() == [BASE, BASE + (slab == 2) * END + offset]


@pytest.mark.parametrize(
    ("slab", "offset", "length"),
    [(1, 0, END + 1), (1, END, 1), (1, END + 1, 0), (2, END // 2 - 4, 5), (1, 2**64 - 1, 2), (1, 2**64 - END, END)],
)
def test_what_lies_outside_is_refused(slabs: Regions, slab: int, offset: int, length: int) -> None:
    """A piece is refused if its length or offset passes the end, also if their sum overflows to zero."""
    pieces = pieces_of([0, length])
    pieces["slab"][1], pieces["slab_offset"][1] = slab, offset
    with (
        pytest.raises(InvalidArgument, match=f"piece 1: {length} bytes at {offset} of slab {slab}"),
        slabs.used(pieces),
    ):
        pass
    slabs.end(slab)


def test_numbers_are_known_and_single(slabs: Regions) -> None:
    """An unknown number is refused, and so is a second region under a used number."""
    for refused in (lambda: slabs.used(pieces_of([1], slab=3)).__enter__(), lambda: slabs.end(3)):
        with pytest.raises(InvalidArgument, match="slab 3: not there"):
            refused()
    with pytest.raises(InvalidArgument, match="slab 1: exists already"):
        slabs.add(1, Region(BASE, END))


def test_a_region_goes_when_its_last_user_has_left(slabs: Regions) -> None:
    """A thread that ends a region waits for its users; from then on no new user gets it."""
    ended = threading.Event()
    slabs._regions[1].ending.callback(ended.set)
    with slabs.used(pieces_of([1])), slabs.used(pieces_of([2])):
        ending = threading.Thread(target=slabs.end, args=(1,))
        ending.start()
        while 1 in slabs._regions:
            pass
        with pytest.raises(InvalidArgument, match="not there"), slabs.used(pieces_of([1])):
            pass
        assert not ended.is_set()
    ending.join(30)
    assert ended.is_set()


def runs(*rows: tuple[int, int, int]) -> Runs:
    return Runs(*np.array(rows, np.uint64).reshape(-1, 3).T)


def test_what_adjoins_on_both_sides_is_one_run() -> None:
    """Runs that adjoin on both sides join, in any order. Runs that adjoin on one side only or have
    another owner stay apart, and empty runs vanish."""
    given = runs((110, 510, 5), (100, 500, 10), (115, 600, 5), (120, 605, 0), (120, 605, 7), (127, 612, 1))
    joined = coalesced(given, np.array([1, 1, 1, 1, 1, 2], np.uint64))
    assert [column.tolist() for column in joined] == [[100, 115, 127], [500, 600, 612], [15, 12, 1]]
    assert [len(column) for column in coalesced(runs((1, 2, 0)), np.ones(1, np.uint64))] == [0, 0, 0]
    assert [len(column) for column in coalesced(runs(), np.ones(0, np.uint64))] == [0, 0, 0]


def engines_of(given: Runs, **how: bool) -> list[Way]:
    """The ways of runs of which none is small."""
    return [way for way, _ in ways_of(given, gather_bytes=0, **how)]


def test_a_batch_is_of_many_runs_of_registered_memory() -> None:
    """One run, unregistered memory or an older driver use single copies; no runs use no way."""
    many, one = runs((1, 2, 3), (9, 9, 9)), runs((1, 2, 3))
    assert engines_of(many, has_batches=True, is_direct=True) == [Way.BATCH]
    for given, has_batches, is_direct in ((one, True, True), (many, False, True), (many, True, False)):
        assert engines_of(given, has_batches=has_batches, is_direct=is_direct) == [Way.SINGLY]
    assert engines_of(runs(), has_batches=True, is_direct=True) == []


def sorted_rows(parts_of: Sequence[Runs]) -> list[tuple[int, ...]]:
    """All runs of all parts, sorted."""
    return sorted(row for part in parts_of for row in zip(*(column.tolist() for column in part), strict=True))


def test_small_runs_are_gathered_if_they_are_many() -> None:
    """The kernel takes runs up to the limit if host memory is registered and their count is between
    RUNS_MIN and RUNS_MAX. Each run goes one way."""
    rng = np.random.default_rng(7)
    for number in (0, 1, RUNS_MIN - 1, RUNS_MIN, RUNS_MIN + 1, 500, RUNS_MAX, RUNS_MAX + 1):
        for large, is_direct, has_batches in product((0, 1, 2), (True, False), (True, False)):
            lengths = np.concatenate([rng.integers(1, 4097, number), rng.integers(4097, 1 << 20, large)])
            lengths = rng.permutation(lengths).astype(np.uint64)
            given = Runs(*rng.permutation(2 * len(lengths)).astype(np.uint64).reshape(2, -1), lengths)
            found = ways_of(given, gather_bytes=4096, has_batches=has_batches, is_direct=is_direct)
            gathered = [part.lengths.tolist() for way, part in found if way is Way.GATHER]
            are_gathered = is_direct and RUNS_MIN <= number <= RUNS_MAX
            assert gathered == ([lengths[lengths <= 4096].tolist()] if are_gathered else [])
            assert sorted_rows([part for _, part in found]) == sorted_rows([given])
            assert all(len(part.lengths) for _, part in found)


def test_staging_takes_every_slice_once() -> None:
    """Every slice is staged once and in order, as many at a time as fit, also of the largest block."""
    blocks = [slice_lengths(length, layers) for length, layers in ((2**32 - 1, 1), (0, 3), (1, 1), (9 << 20, 36))]
    addresses = np.array([0, 5, 2**40, 2**41], np.uint64)
    chosen = list(parts(addresses, blocks))
    assert [length for part in chosen for length in part.lengths] == [length for block in blocks for length in block]
    assert all(part.lengths and sum(part.lengths) <= STAGING_BYTES for part in chosen)
    sources = np.concatenate([part.sources for part in chosen])
    starts = [
        address + sum(block[:i])
        for address, block in zip((0, 5, 2**40, 2**41), blocks, strict=True)
        for i in range(len(block))
    ]
    assert sources.tolist() == starts
