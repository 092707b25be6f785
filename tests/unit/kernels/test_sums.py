"""Sums of slices by the kernel's own source, against the xxhash package and the daemon's host tables."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.depth import count
from tests.unit.kernels.fake_driver import DeviceArray, entered, on_fake_driver
from tests.unit.kernels.kernel_cases import Nothing
from tests.unit.kernels.small_cases import UNITS
from tests.unit.kernels.sum_cases import POISON, RAGGED, Spans, check_sums
from tierd import checksum
from tierd.core.formats.block import slice_lengths
from tierd.errors import InvalidArgument
from tierd.kernels.library import Emulated
from tierd.kernels.loaded import Loaded
from tierd.kernels.sums import cut_pages, slice_sums
from tools.fake_cuda import build_fatbins

MIB = 1 << 20
SEED = int(os.environ.get("SUMS_SEED", "1"))


def test_every_length_of_the_short_paths_and_of_two_blocks(library: Emulated) -> None:
    """Every length from 0 to 2200 bytes gives the right sum, at varying places."""
    check_sums(library, Spans(tuple(range(2201)), offsets=(0, 3, 8, 0, 15)))


@pytest.mark.parametrize("offset", range(16))
def test_slices_at_any_place(library: Emulated, offset: int) -> None:
    """A slice may begin at any offset in a granule of 16 bytes."""
    check_sums(library, Spans(RAGGED, (offset,), seed=offset))


@pytest.mark.parametrize("offset", [0, 6], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("length", [128 << 10, 218_454, 256 << 10, MIB - 1, MIB, MIB + 1, MIB + 1089])
def test_long_slices(library: Emulated, length: int, offset: int) -> None:
    """Slices of real block sizes, and beyond the longest of these, are right."""
    check_sums(library, Spans((length,), (offset,)))


@pytest.mark.parametrize("round", range(count(test=5, nightly=100, weekly=500)))
def test_random_slices(library: Emulated, round: int) -> None:
    """Any lengths up to twenty blocks at any places are right; SUMS_SEED selects others."""
    print(f"SUMS_SEED={SEED}")
    rng = np.random.default_rng((SEED, round))
    lengths = np.exp(rng.uniform(0, np.log(20 << 10), 40)).astype(int)
    check_sums(library, Spans(tuple(lengths.tolist()), tuple(rng.integers(0, 16, 40).tolist()), seed=round))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("case", UNITS["hash"], ids=range(len(UNITS["hash"])))
def test_in_any_order_of_threads(library: Emulated, case: tuple[Any, Any]) -> None:
    """The result is right whichever thread of a block runs first."""
    check, spans = case
    check(library, spans)


# -- pages

BLOCKS = [(131_072, 2), (20_000, 4), (40_001, 0), (4096, 1), (1, 7), (655_360, 1), (640_000, 2), (20_000, 4)]
"""Lengths in bytes and layers: aligned slices and others, opaque blocks, and layers cut in three."""


def pages_of(blocks: list[tuple[int, int]]) -> tuple[Any, list[int]]:
    """Bytes of pages of these blocks, one behind the other, and the start of each."""
    starts = np.cumsum([0, *(-(-length // 4096) * 4096 for length, _ in blocks)]).tolist()
    return np.random.default_rng(SEED).integers(0, 256, starts[-1], np.uint8), starts[:-1]


def host_tables(pool: Any, starts: list[int]) -> list[list[int]]:
    """The slice tables that the daemon computes."""
    spans = [
        (pool[start : start + n], slice_lengths(n, layers)) for start, (n, layers) in zip(starts, BLOCKS, strict=True)
    ]
    return [checksum.slice_sums(view, lengths).tolist() for view, lengths in spans]


def test_pages_have_the_tables_of_the_host(library: Emulated) -> None:
    """Blocks of any length and layers, cut and summed on the device, have the daemon's slice tables."""
    pool, starts = pages_of(BLOCKS)
    slices = cut_pages(pool.ctypes.data + np.array(starts, np.uint64), *zip(*BLOCKS, strict=True))
    sums = slice_sums(library, slices.addresses, slices.lengths, np.full(len(slices.lengths), POISON, np.uint64))
    assert [table.tolist() for table in slices.tables(sums)] == host_tables(pool, starts)


def test_no_pages_have_no_slices() -> None:
    """No pages have no slices and no tables."""
    slices = cut_pages([], [], [])
    assert (len(slices.addresses), len(slices.lengths), slices.tables(np.empty(0, np.uint64))) == (0, 0, [])


@on_fake_driver()
def test_pages_on_a_device() -> None:
    """The loaded kernel sums blocks in device memory."""
    cuda = entered()
    pool, starts = pages_of(BLOCKS)
    there = DeviceArray(cuda, pool)
    slices = cut_pages([there.address + start for start in starts], *zip(*BLOCKS, strict=True))
    out = DeviceArray(cuda, np.full(len(slices.lengths), POISON, np.uint64))
    given = [DeviceArray(cuda, array) for array in (slices.addresses, slices.lengths)]
    assert slice_sums(Loaded(build_fatbins()), *given, out) is out
    assert [table.tolist() for table in slices.tables(out.numpy())] == host_tables(pool, starts)


# -- arguments that do not fit


GIVEN = {"addresses": np.zeros(3, np.uint64), "lengths": np.zeros(3, np.uint32), "out": np.zeros(3, np.uint64)}
WRONG = {
    "addresses: has type": {"addresses": np.zeros(3, np.int64)},
    "addresses: has shape": {"addresses": np.zeros((3, 1), np.uint64)},
    "addresses: axis 0": {"addresses": np.zeros(6, np.uint64)[::2]},
    "lengths: has type": {"lengths": np.zeros(3, np.uint64)},
    "lengths: has shape": {"lengths": np.zeros(4, np.uint32)},
    "out: has type": {"out": np.zeros(3, np.uint32)},
    "out: has shape": {"out": np.zeros(2, np.uint64)},
    "out: axis 0": {"out": np.zeros(6, np.uint64)[::2]},
    "out: list": {"out": [0, 0, 0]},
}


@pytest.mark.parametrize("told", WRONG)
def test_an_argument_that_does_not_fit_is_named(told: str) -> None:
    """Wrong types, shapes and gaps are refused before a kernel sees an address."""
    with pytest.raises(InvalidArgument, match=f"^{told}"):
        slice_sums(Nothing(), **(GIVEN | WRONG[told]))


def test_host_memory_is_none_for_a_device() -> None:
    """A kernel of a GPU refuses arrays of the host."""

    class Elsewhere(Nothing):
        device = "cuda:0"

    with pytest.raises(InvalidArgument, match="^addresses: is on cpu, the kernel runs on cuda:0"):
        slice_sums(Elsewhere(), **GIVEN)
