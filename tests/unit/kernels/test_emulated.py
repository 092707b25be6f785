"""The kernels' own source, compiled for the CPU and run by the emulator, equals the f64 reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import (
    CUT_DECODES,
    DECODES,
    MERGES,
    NARROW_DECODES,
    PREFILLS,
    SHORT_PREFILLS,
    Narrow,
    Shape,
    allocate,
    check,
    check_cut_decode,
    check_decode,
    check_dirty_decode,
    check_merge,
    check_narrow_decode,
    check_prefill,
    check_short_prefill,
    decoded,
    made,
    prefilled,
)
from tests.unit.kernels.nan_cases import ODD_DECODES, ODD_PREFILLS, Odd, check_odd_decode, check_odd_prefill
from tierd.kernels import Attended
from tierd.kernels.library import Emulated
from tierd.kernels.paged import DecodeShape, PagedDecode

TYPES = [("bf16", "bf16"), ("f16", "f16"), ("bf16", "e4m3"), ("f16", "e4m3")]
SMALLEST_BLOCK = 101_376
"""Bytes of shared memory of a thread block of sm_86, 89 and 120: 99 KiB."""
RAGGED = ((1, 133), (1, 0), (1, 1), (1, 16), (1, 300))


# -- decode


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_decode_of_every_type_and_head_dim(library: Emulated, types: tuple[str, str], head_dim: int) -> None:
    """Output, log-sum-exp and page masses of a ragged batch are those of the reference."""
    check_decode(library, Shape(RAGGED, types, head_dim, seed=head_dim))


@pytest.mark.parametrize("group", range(1, 17))
def test_decode_of_every_group(library: Emulated, group: int) -> None:
    """One to sixteen query heads share a kv head."""
    check_decode(library, Shape(((1, 70), (1, 33)), group=group, kv_heads=1, seed=group))


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128, 256])
def test_decode_of_every_page_size(library: Emulated, page_tokens: int) -> None:
    """Pages of 16 to 256 tokens give right results, also with a partly filled last page."""
    check_decode(library, Shape(((1, 300), (1, page_tokens), (1, page_tokens + 1)), page_tokens=page_tokens))


@pytest.mark.parametrize("blocks", [1, 2, 7, 64])
def test_any_number_of_blocks_gives_the_same(library: Emulated, blocks: int) -> None:
    """The result is right with few blocks, many, or more than there is work."""
    case = made(Shape(((1, 500), (1, 20), (1, 40))))
    check(case, decoded(library, case, blocks=blocks))


@pytest.mark.parametrize("parts", [16, 17, 65])
def test_a_row_of_many_parts(library: Emulated, parts: int) -> None:
    """A row of any number of parts is right and repeats to the bit: joined in one step, two and three."""
    case = made(Shape(((1, 64 * parts - 5),), kv_heads=1, group=2))
    decode = PagedDecode(library, DecodeShape(1, 2, 1, 64), blocks=parts, allocate=allocate)
    got = [Attended(np.empty_like(case.q), allocate(case.q.shape[:2], "float32")) for _ in range(2)]
    for to in got:
        check(case, decode(case.q, case.pages, case.device, to))
    np.testing.assert_array_equal(got[0].out.view(np.uint16), got[1].out.view(np.uint16))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("cut", CUT_DECODES, ids=[blocks for blocks, _ in CUT_DECODES])
def test_decode_by_one_block_few_and_many(library: Emulated, cut: tuple[int, Shape]) -> None:
    """Runs longer than their rings, and rows of many parts, are right in any order of blocks."""
    check_cut_decode(library, cut)


@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (4, 100), (40, 33), (16, 16), (3, 1000)])
def test_decode_of_a_window_with_sinks(library: Emulated, sinks: int, window: int) -> None:
    """The first tokens and the last ones are seen, and the pages between have no mass."""
    check_decode(library, Shape(((1, 500), (1, 20), (1, 3), (1, 0)), sinks=sinks, window=window))


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_decode_of_chosen_pages(library: Emulated, page_tokens: int) -> None:
    """Each kv head sees the pages that were chosen for it."""
    check_decode(library, Shape(((1, 500), (1, 20), (1, 3), (1, 0), (1, 700)), page_tokens=page_tokens, chosen=3))


def test_decode_without_masses_gives_the_same(library: Emulated) -> None:
    """Output and log-sum-exp are the same to the bit with page masses and without."""
    case = made(DECODES[0])
    plain, with_mass = decoded(library, case, with_mass=False), decoded(library, case)
    np.testing.assert_array_equal(plain.out.view(np.uint16), with_mass.out.view(np.uint16))
    np.testing.assert_array_equal(plain.lse, with_mass.lse)


def test_masses_sum_to_one(library: Emulated) -> None:
    """The masses of each query head that sees any token sum to one."""
    case = made(DECODES[0])
    mass = decoded(library, case).mass
    assert mass is not None
    np.testing.assert_allclose(mass.sum(axis=2), np.array([[1], [0], [1], [1], [1]]) * np.ones((1, 8)), atol=1e-5)


def test_one_decode_serves_growing_lengths(library: Emulated) -> None:
    """One decode, and so its captured launches, is right for other lengths in the same arrays."""
    case = made(Shape(((1, 300), (1, 200))))
    n, heads, dim = case.q.shape
    decode = PagedDecode(library, DecodeShape(n, heads, 2, dim), blocks=3, allocate=allocate)
    for lens in ([17, 1], [180, 64], [300, 200]):
        case.device.kv_lens[:] = lens
        case.batch = replace(case.batch, kv_lens=lens)
        out, lse = np.empty_like(case.q), allocate((n, heads), "float32")
        check(case, decode(case.q, case.pages, case.device, Attended(out, lse)))


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_decode_of_flat_attention(library: Emulated, types: tuple[str, str]) -> None:
    """If many tokens weigh nearly the same, the output stays within its limit, in a batch and alone."""
    for sequences in (((1, 2000), (1, 777)), ((1, 1000),)):
        check_decode(library, Shape(sequences, types, kv_heads=1, spread=0.5))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("shape", DECODES, ids=range(len(DECODES)))
def test_decode_in_any_order_of_threads(library: Emulated, shape: Shape) -> None:
    """The result is right whichever thread of a block runs first."""
    check_decode(library, shape)


@pytest.mark.parametrize("odd", ODD_DECODES, ids=range(len(ODD_DECODES)))
def test_decode_of_what_is_no_number(library: Emulated, odd: Odd) -> None:
    """NaN in a seen token, or a query that is infinite or beyond fp16, makes the result NaN."""
    check_odd_decode(library, odd)


@pytest.mark.parametrize("cut", CUT_DECODES[1:], ids=[blocks for blocks, _ in CUT_DECODES[1:]])
def test_what_calls_leave_in_counters_is_nothing(library: Emulated, cut: tuple[int, Shape]) -> None:
    """The next call is right with any values in the part counters."""
    check_dirty_decode(library, cut)


# -- prefill


@pytest.mark.parametrize("odd", ODD_PREFILLS, ids=range(len(ODD_PREFILLS)))
def test_prefill_of_what_is_no_number(library: Emulated, odd: Odd) -> None:
    """The same for chunks, except that queries before the odd key are unchanged."""
    check_odd_prefill(library, odd)


@pytest.mark.parametrize("shape", SHORT_PREFILLS, ids=range(len(SHORT_PREFILLS)))
def test_a_longest_sequence_that_is_longer_than_said(library: Emulated, shape: Shape) -> None:
    """Rows without a block are NaN, never stale."""
    check_short_prefill(library, shape)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_prefill_of_every_type_and_head_dim(library: Emulated, types: tuple[str, str], head_dim: int) -> None:
    """A prompt, an append and a single token in one batch are right."""
    check_prefill(library, Shape(((20, 60), (17, 17), (1, 30)), types, head_dim, seed=head_dim))


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_prefill_of_groups(library: Emulated, group: int) -> None:
    """Query tokens and heads of a group share a block's rows, however they divide."""
    check_prefill(library, Shape(((30, 41), (0, 9), (5, 5)), group=group, kv_heads=1, page_tokens=32))


@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (4, 20), (16, 7), (3, 1000)])
def test_prefill_of_a_window_with_sinks(library: Emulated, sinks: int, window: int) -> None:
    """Each query of a chunk has its own window."""
    check_prefill(library, Shape(((40, 130), (9, 9)), sinks=sinks, window=window, group=2))


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_prefill_of_chosen_pages(library: Emulated, page_tokens: int) -> None:
    """All queries of a chunk see the chosen pages up to themselves; some see none."""
    check_prefill(library, Shape(((40, 500), (20, 20), (0, 9), (1, 300)), page_tokens=page_tokens, chosen=3, group=2))


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_prefill_of_flat_attention(library: Emulated, types: tuple[str, str]) -> None:
    """The same for chunks behind long prompts."""
    for sequences in (((8, 1500), (5, 777)), ((4, 1000),)):
        check_prefill(library, Shape(sequences, types, kv_heads=1, group=1, spread=0.5))


def test_chunks_are_the_whole(library: Emulated) -> None:
    """A prompt in chunks gives each query the same as in one call, up to rounding."""
    whole = made(Shape(((60, 60),)))
    for first, last in ((0, 16), (16, 45), (45, 60)):
        part = made(Shape(((60, 60),)))
        part.batch = replace(part.batch, query_starts=[0, last - first], kv_lens=[last])
        part.device.kv_lens[:] = last
        part.q = whole.q[first:last].copy()
        part.shape = replace(part.shape, sequences=((last - first, last),))
        check(part, prefilled(library, part))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("shape", PREFILLS, ids=range(len(PREFILLS)))
def test_prefill_in_any_order_of_threads(library: Emulated, shape: Shape) -> None:
    """The result is right whichever thread of a block runs first."""
    check_prefill(library, shape)


# -- merge


@pytest.mark.parametrize("kind", MERGES)
def test_merge_of_parts(library: Emulated, kind: str) -> None:
    """Parts are weighed by their log-sum-exps; an empty part is not read."""
    check_merge(library, kind)


@pytest.mark.parametrize("dim", [1, 7, 100, 512])
@pytest.mark.parametrize("kind", MERGES)
def test_merge_of_any_dim(library: Emulated, kind: str, dim: int) -> None:
    """The merge is right for dims that are too small or odd for vector reads."""
    check_merge(library, kind, dim)


# -- blocks with less shared memory


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("types", TYPES[:2], ids="-".join)
def test_decode_with_99_kib(library: Emulated, types: tuple[str, str], head_dim: int, group: int) -> None:
    """Blocks of 99 KiB decode Llama-3-8B (4 query heads per kv head of 128 channels) and wider shapes."""
    check_decode(Narrow(library, SMALLEST_BLOCK), Shape(((1, 133), (1, 0), (1, 40)), types, head_dim, 1, group))


@pytest.mark.parametrize("types", TYPES[:2], ids="-".join)
def test_prefill_with_99_kib(library: Emulated, types: tuple[str, str]) -> None:
    """The same for prompts with the widest heads."""
    check_prefill(Narrow(library, SMALLEST_BLOCK), Shape(((20, 150), (9, 9)), types, 256, kv_heads=1, group=2))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("shape", NARROW_DECODES, ids=range(len(NARROW_DECODES)))
def test_decode_with_little_memory_in_any_order_of_threads(library: Emulated, shape: Shape) -> None:
    """With one tile in flight instead of two, the result is right in any order of threads."""
    check_narrow_decode(library, shape)
