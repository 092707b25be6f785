"""Kernels for pages of rotated codes: payloads and blocks to the bit, attention to codes as they lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import Shape, decoded, made
from tests.unit.kernels.rot_cases import (
    BLOCKS,
    CODED,
    LSE_LIMIT,
    ODD_BLOCKS,
    RAGGED,
    Blocks,
    Coded,
    attended,
    check_blocks,
    check_coded,
    check_odd_blocks,
    coded,
    compare,
    decoded_values,
    expected,
    payload_of,
)
from tierd.codecs.block import NO_CONTEXT
from tierd.codecs.named import codec_named
from tierd.codecs.rot import HEAD_DIMS
from tierd.codecs.values import raw_of, rounded
from tierd.errors import InvalidArgument
from tierd.kernels import Attended, merge_attention, paged_attention
from tierd.kernels.coded import BITS, BlockShape, CodedPages, decode_pages, tile_bytes
from tierd.kernels.library import H100_SHARED_BYTES, Emulated
from tierd.kernels.paged import merge_parts

CODECS = sorted(BITS)


@pytest.mark.parametrize("blocks", BLOCKS, ids=range(len(BLOCKS)))
def test_payloads_of_these_tests(blocks: Blocks) -> None:
    """The payload, error and block that kernels are compared with are those of `tierd.codecs.rot`."""
    codec, kv = codec_named(blocks.codec), blocks.kv
    for block in blocks.values():
        raw = raw_of(block, kv)
        payload, error = payload_of(raw, kv, blocks.codec)
        want = codec.encode(raw, kv, NO_CONTEXT)
        np.testing.assert_array_equal(payload, want.data)
        assert error == want.error
        values = rounded(decoded_values(payload, kv, blocks.codec), blocks.dtype)
        np.testing.assert_array_equal(values, codec.decode(payload, kv, NO_CONTEXT))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("codec", CODECS)
def test_blocks_of_every_codec(library: Emulated, codec: str, head_dim: int, dtype: str) -> None:
    """Payload, error bound and decoded block equal the codec's to the bit, in either layout."""
    spread = 2.0 if dtype == "bfloat16" else 1.0
    check_blocks(library, Blocks(codec, head_dim, 33, dtype, "HND" if head_dim == 128 else "NHD", spread=spread))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("blocks", BLOCKS, ids=range(len(BLOCKS)))
def test_blocks_in_any_order_of_threads(library: Emulated, blocks: Blocks) -> None:
    """The same whichever thread runs first, with 1, 17 and 32 tokens."""
    check_blocks(library, blocks)


@pytest.mark.parametrize("number", ODD_BLOCKS)
def test_a_block_that_no_code_holds(library: Emulated, number: float) -> None:
    """A value that is not finite, or whose square is not, is reported for its block alone."""
    check_odd_blocks(library, number)


@pytest.mark.parametrize("q_type", ["bf16", "f16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("codec", CODECS)
def test_attention_of_every_codec(library: Emulated, codec: str, head_dim: int, q_type: str) -> None:
    """Output and log-sum-exp of a ragged batch are those of float64 over the decoded pages."""
    check_coded(library, Coded(Shape(RAGGED, (q_type, q_type), head_dim), codec))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("given", CODED, ids=range(len(CODED)))
def test_attention_in_any_order_of_threads(library: Emulated, given: Coded) -> None:
    """The same for groups, windows, chosen pages, joined parts, and scales and queries that are NaN."""
    check_coded(library, given)


@pytest.mark.parametrize("group", [1, 5, 8, 12, 16])
def test_attention_of_groups(library: Emulated, group: int) -> None:
    """One to sixteen query heads share a kv head."""
    check_coded(library, Coded(Shape(((1, 70), (1, 33)), group=group, kv_heads=1), "rot-8-4"))


@pytest.mark.parametrize("uneven", [0.0, 3.0])
def test_attention_of_uneven_values(library: Emulated, uneven: float) -> None:
    """Flat attention over values whose lengths differ by e to the 3 keeps its limit."""
    for sequences in (((1, 2000), (1, 777)), ((1, 1000),)):
        check_coded(library, Coded(Shape(sequences, kv_heads=1, spread=0.5), uneven=uneven))


def test_queries_beyond_fp16(library: Emulated) -> None:
    """A query that fp16 cannot represent is right: it is divided by a power of two."""
    case, pages = coded(made(Shape(((1, 100), (1, 30)))), "rot-8-8")
    case.q[0] = (case.q[0].astype(np.float64) * 2.0**120).astype(case.q.dtype)
    got, want = attended(library, case, pages), expected(case)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-3, atol=LSE_LIMIT)
    compare(replace(got, lse=want.lse), want, "large queries")


def test_codes_with_a_tail_of_values(library: Emulated) -> None:
    """Coded pages and a tail of 16-bit pages, merged, are attention over both."""
    head, tail = made(Shape(((1, 96), (1, 0), (1, 16)), seed=1)), made(Shape(((1, 13), (1, 5), (1, 0)), seed=2))
    tail.q = head.q
    case, pages = coded(head, "rot-4-4")
    parts = [attended(library, case, pages), decoded(library, tail, with_mass=False)]
    outs, lses = np.stack([part.out for part in parts]), np.stack([part.lse for part in parts])
    to = Attended(np.empty_like(parts[0].out), np.empty_like(parts[0].lse))
    merge_parts(library, outs, lses, to)
    wants = [expected(case), paged_attention(tail.q.astype(np.float64), tail.pool.astype(np.float64), tail.batch)]
    compare(to, merge_attention([want.out for want in wants], [want.lse for want in wants]), "with a tail")


def test_what_kernels_lack_is_refused() -> None:
    """Other codecs, head dims, groups, shapes and page masses are refused by name before a launch."""
    unbuilt = Unbuilt()
    case, pages = coded(made(Shape(((1, 20),), head_dim=256, group=9, kv_heads=1)), "rot-4-4")
    with pytest.raises(InvalidArgument, match="9 query heads for a kv head of 256 channels; .* decode the pages first"):
        attended(unbuilt, case, pages)
    case, pages = coded(made(Shape(((1, 20),))), "rot-4-4")
    with pytest.raises(InvalidArgument, match="mass: kernels of coded pages have no page masses"):
        attended(unbuilt, case, pages, with_mass=True)
    with pytest.raises(InvalidArgument, match=r"pages.tiles: has shape \[.*\]; wanted \['any', 2, 'any', 2112\]"):
        attended(unbuilt, case, CodedPages(pages.tiles, "rot-8-8"))
    with pytest.raises(InvalidArgument, match="codec: no kernel has 'int8'; use one of rot-8-8"):
        attended(unbuilt, case, CodedPages(pages.tiles, "int8"))
    with pytest.raises(InvalidArgument, match="codec rot-8-4: head_dim 96 is not one of"):
        tile_bytes("rot-8-4", 96)
    none = np.zeros(0, np.uint64)
    with pytest.raises(InvalidArgument, match="shape: no kernel has BlockShape.*; give bf16 or f16"):
        decode_pages(unbuilt, BlockShape("rot-8-4", 1, 1, 16, 64, "e4m3"), coded=none, plain=none)


class Unbuilt(Emulated):
    """A library that no launch may reach, but the clearing of counters."""

    def __init__(self) -> None:
        self.block_shared_bytes = H100_SHARED_BYTES

    def launch(self, kernel: str, *_: object, **__: object) -> None:
        """See Library."""
        assert kernel == "decode_clear"
