"""Cases of the kernels for rotated codes. Pages equal `tierd.codecs` to the bit, attention float64.

Memory that a kernel must not read is poison: scales of stale tails and all bytes of unused pages
are NaN. Payloads and blocks have poison around them, which must stay. A machine with a GPU may lack
packages that `tierd.codecs.block` needs, so `payload_of` uses lower modules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from tests.unit.kernels.kernel_cases import Case, Narrow, Shape, allocate, made, placed
from tierd.codecs import rotated
from tierd.codecs.rotated import length_of
from tierd.codecs.tiles import TILE_TOKENS, packed, unpacked
from tierd.codecs.values import KVShape, bytes_of, floats_of, raw_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.kernels import Attended, paged_attention
from tierd.kernels.buffers import Buffer
from tierd.kernels.coded import BITS, BlockShape, CodedPages, decode_pages, encode_pages
from tierd.kernels.fitting import decode_fit
from tierd.kernels.library import Library
from tierd.kernels.paged import DecodeShape, PagedDecode

Array = np.ndarray[Any, Any]
OUT_LIMIT, LSE_LIMIT = 2e-3, 2e-3
"""Relative L2 distance of outputs, absolute distance of log-sum-exps."""
DTYPES = {"bfloat16": "bf16", "float16": "f16"}
GAP = 64
"""Bytes of poison around blocks and payloads."""


def payload_of(raw: Array, kv: KVShape, codec: str) -> tuple[Array, float]:
    """A block's payload, and the largest error of a value, as FORMAT.md of tierd.codecs has it."""
    values, sides, scales, errors = floats_of(raw, kv.geometry.dtype), [], [], []
    for side, bits in enumerate(BITS[codec]):
        tiles = _tiles(values[:, side])
        done = rotated.encode(tiles.reshape(-1, tiles.shape[-1]), bits)
        sides.append(packed(done.codes.reshape(tiles.shape), bits, turned=side == 1))
        scales.append(done.scales.reshape(-1, TILE_TOKENS).view(np.uint8))
        errors.append(done.error)
    return np.concatenate((*sides, *scales), axis=1).reshape(-1), max(errors)


def _tiles(values: Array) -> Array:
    """[layers, tokens, heads, dim] as [layers * heads * tiles, 16, dim], zeros behind the tokens."""
    layers, tokens, heads, dim = values.shape
    whole = np.zeros((layers, heads, -(-tokens // TILE_TOKENS) * TILE_TOKENS, dim), np.float32)
    whole[:, :, :tokens] = values.transpose(0, 2, 1, 3)
    return whole.reshape(-1, TILE_TOKENS, dim)


def decoded_values(payload: Array, kv: KVShape, codec: str) -> Array:
    """The values before rounding, f32 [layers, 2, tokens, heads, dim]."""
    layers, _, tokens, heads, dim = kv.sizes
    bits = BITS[codec]
    ends = np.cumsum([2 * dim * bits[0], 2 * dim * bits[1], 2 * TILE_TOKENS])
    tiles = payload.reshape(layers * heads * -(-tokens // TILE_TOKENS), -1)
    *codes, k_scales, v_scales = np.split(tiles, ends, axis=1)
    sides = []
    for side, scales in enumerate((k_scales, v_scales)):
        lying = unpacked(codes[side], dim, bits[side], turned=side == 1).reshape(-1, dim)
        rows = rotated.decode(lying, np.ascontiguousarray(scales).view(np.float16).reshape(-1), bits[side])
        sides.append(rows.reshape(layers, heads, -1, dim)[:, :, :tokens].transpose(0, 2, 1, 3))
    return np.stack(sides, axis=1)


# -- pages


@dataclass(frozen=True)
class Blocks:
    """count: of blocks. spread: of their values' logarithms."""

    codec: str = "rot-4-4"
    head_dim: int = 64
    tokens: int = 32
    dtype: str = "bfloat16"
    layout: str = "NHD"
    layers: int = 2
    kv_heads: int = 3
    count: int = 2
    spread: float = 2.0

    @property
    def kv(self) -> KVShape:
        """Of one block, for codecs."""
        geometry = KVGeometry(self.layers, self.kv_heads, self.head_dim, self.dtype, self.layout)
        return KVShape(geometry, self.tokens)

    @property
    def shape(self) -> BlockShape:
        """The same for kernels."""
        sizes = (self.layers, self.kv_heads, self.tokens, self.head_dim)
        return BlockShape(self.codec, *sizes, DTYPES[self.dtype], is_hnd=self.layout == "HND")

    def values(self) -> Array:
        """Blocks with outliers, a row of zeros, one whose square is 0 and one of equal values; as
        bits u16 [count, 2, layers, ...]."""
        rng = np.random.default_rng(self.tokens + self.head_dim)
        values = rng.standard_normal((self.count, *self.kv.sizes)).astype(np.float32)
        values *= np.exp(self.spread * rng.standard_normal((self.count, *self.kv.sizes[:-1], 1)))
        values[..., 3] *= 20
        values /= 1 + np.arange(self.count).reshape(-1, *(1,) * 5)  # the first block has the largest
        values[0, 0, :, 0, 0] = 0
        values[0, 0, :, 0, 1] = 1e-30 if self.dtype == "bfloat16" else 0
        values[0, -1, :, -1, 0] = 0.25
        if self.dtype == "float16":  # their decoded values saturate
            values[0, 0, :, 0, 2] = 65000 * rng.choice([-1, 1], self.head_dim)
        return np.stack([bytes_of(rounded(block, self.dtype), self.kv) for block in values])


def _rooms(count: int, size: int) -> Array:
    """Poison, with room for each at a multiple of 16."""
    room = np.full(count * (size + GAP) + 32, 0xFF, np.uint8)
    start = -room.ctypes.data % 16
    return room[start : start + count * (size + GAP)].reshape(count, size + GAP)


def check_blocks(library: Library, blocks: Blocks) -> None:
    """Payloads, errors and decoded blocks are those of the codec, to the bit. Raises AssertionError."""
    shape, kv = blocks.shape, blocks.kv
    given = blocks.values()
    done = [payload_of(raw_of(block, kv), kv, blocks.codec) for block in given]
    size = shape.coded_bytes
    assert size == len(done[0][0]) and shape.plain_bytes == kv.block_bytes == given.shape[1]
    plain, coded, again = (_rooms(blocks.count, n) for n in (shape.plain_bytes, size, shape.plain_bytes))
    plain[:, : given.shape[1]] = given
    found = np.zeros((blocks.count, 2), np.float32)
    with placed(library) as put:
        rooms = [put(each) for each in (plain, coded, again)]
        places = [put(_addresses(each)) for each in rooms]
        encode_pages(library, shape, plain=places[0], coded=places[1], found=put(found))
        decode_pages(library, shape, coded=places[1], plain=places[2])
    for i, (payload, error) in enumerate(done):
        _same(coded[i], payload, f"{blocks}: payload {i}")
        assert length_of(float(found[i, 0])) == error, f"{blocks}: error {i}"
        assert found[i, 1] == np.abs(floats_of(raw_of(given[i], kv), blocks.dtype)).max(), f"{blocks}: magnitude {i}"
        want = bytes_of(rounded(decoded_values(payload, kv, blocks.codec), blocks.dtype), kv)
        _same(again[i], want, f"{blocks}: block {i}")


def _addresses(rooms: Any) -> Array:
    buffer = Buffer.of("rooms", rooms)
    return buffer.address + np.arange(buffer.shape[0], dtype=np.uint64) * np.uint64(buffer.strides[0])


def _same(got: Array, want: Array, what: str) -> None:
    differ = np.flatnonzero(got[: len(want)] != want)
    assert not differ.size, f"{what}: {differ.size} of {len(want)} bytes differ, the first at {differ[0]}"
    assert (got[len(want) :] == 0xFF).all(), f"{what}: bytes behind it have changed"


def check_odd_blocks(library: Library, number: float) -> None:
    """A block with a value that no code holds is reported; others are unchanged."""
    blocks = Blocks(codec="rot-8-4", tokens=16, count=3)
    shape, given = blocks.shape, blocks.values()
    given[1].view(ml_dtypes.bfloat16)[700] = number
    coded, found = _rooms(3, shape.coded_bytes), np.zeros((3, 2), np.float32)
    plain = _rooms(3, shape.plain_bytes)
    plain[:, : given.shape[1]] = given
    with placed(library) as put:
        places = [put(_addresses(put(each))) for each in (plain, coded)]
        encode_pages(library, shape, plain=places[0], coded=places[1], found=put(found))
    assert np.isfinite(found).all(axis=1).tolist() == [True, False, True], f"{number}: {found}"
    scales = coded[:, : shape.coded_bytes].reshape(3, 6, -1)[:, :, -64:].copy().view(np.float16)
    assert (~np.isfinite(scales)).sum(axis=(1, 2)).tolist() == [0, 1, 0], f"{number}: its scale is a number"


BLOCKS = (
    Blocks(),
    Blocks("rot-8-8", tokens=17, layout="HND"),
    Blocks("rot-8-4", tokens=1, dtype="float16", spread=1.0),
    Blocks("rot-8-4", tokens=16, layers=4, count=12, spread=0.5),
)
"""The last has more tiles than a launch has blocks."""
ODD_BLOCKS = (np.nan, np.inf, -3e38)


# -- attention


@dataclass(frozen=True)
class Coded:
    """A decode of coded pages. uneven: of the logarithms of values' lengths, one per token.
    odd: `key` or `value` has this number as a scale in token 7; `query` has it as a channel.
    blocks: of the grid. is_narrow: with shared memory for the smaller ring alone."""

    shape: Shape
    codec: str = "rot-4-4"
    uneven: float = 0.0
    odd: str = ""
    number: float = np.nan
    blocks: int = 3
    is_narrow: bool = False


def coded(case: Case, codec: str, uneven: float = 0.0) -> tuple[Case, CodedPages]:
    """The same case with its pages coded. The case's pool becomes their decoded values, f64."""
    pool = case.pool.astype(np.float32)
    if uneven:
        rng = np.random.default_rng(3)
        pool[:, 1] *= np.exp(uneven * rng.standard_normal((*pool[:, 1].shape[:-1], 1)))
    stale = np.isnan(pool)
    pages, _, tokens, heads, dim = pool.shape
    kv = KVShape(KVGeometry(pages, heads, dim, "bfloat16", "NHD"), tokens)
    raw = rounded(np.where(stale, np.float32(0), pool), "bfloat16")
    payload, _ = payload_of(raw, kv, codec)
    values = decoded_values(payload, kv, codec).astype(np.float64)
    values[stale] = np.nan
    tiles = payload.reshape(pages, heads, tokens // TILE_TOKENS, -1)
    scales = tiles[..., -4 * TILE_TOKENS :].view(np.float16).reshape(pages, heads, -1, 2, TILE_TOKENS)
    of_token = stale[..., 0].reshape(pages, 2, -1, TILE_TOKENS, heads).transpose(0, 4, 2, 1, 3)
    scales[of_token] = np.nan
    tiles[stale.all(axis=(1, 2, 3, 4))] = 0xFF
    layers = np.full((pages, 2, *tiles.shape[1:]), 0xFF, np.uint8)
    layers[:, 1] = tiles
    return replace_pool(case, values), CodedPages(layers[:, 1], codec)


def replace_pool(case: Case, pool: Array) -> Case:
    """The case over other values."""
    made_again = replace(case, pool=pool)
    made_again.device = case.device
    return made_again


def attended(library: Library, case: Case, pages: CodedPages, *, blocks: int = 3, with_mass: bool = False) -> Attended:
    """The result of the decode kernels."""
    n, heads, dim = case.q.shape
    mass = allocate((n, heads, case.device.tables.shape[1]), "float32") if with_mass else None
    to = Attended(np.full(case.q.shape, np.nan, case.q.dtype), allocate((n, heads), "float32"), mass)
    with placed(library) as put:
        shape = DecodeShape(n, heads, case.shape.kv_heads, dim)
        decode = PagedDecode(library, shape, blocks=blocks, allocate=lambda *asked: put(allocate(*asked)))
        decode(put(case.q), put(pages), put(case.device), put(to))
    return to


def check_coded(library: Library, given: Coded) -> None:
    """Output and log-sum-exp are those of float64 over the decoded pages. Raises AssertionError."""
    case, pages = coded(made(given.shape), given.codec, given.uneven)
    if given.is_narrow:
        kind = given.codec.replace("-", "")
        most = decode_fit(library, given.shape.head_dim, given.shape.group, kind).shared_bytes
        library = Narrow(library, most - 1)
    if given.odd:
        check_odd_coded(library, given, case, pages)
    else:
        compare(attended(library, case, pages, blocks=given.blocks), expected(case), str(given))


def expected(case: Case) -> Attended:
    """By the reference in float64."""
    return paged_attention(case.q.astype(np.float64), case.pool, case.batch)


def compare(got: Attended, want: Attended, what: str) -> None:
    """Raises AssertionError."""
    out = got.out.astype(np.float64)
    assert np.isfinite(out).all(), f"{what}: the output is no number"
    distance = float(np.linalg.norm(out - want.out) / (np.linalg.norm(want.out) or 1.0))
    assert distance <= OUT_LIMIT, f"{what}: the output is {distance:.2e} off"
    some = np.isfinite(want.lse)
    assert np.isneginf(got.lse[~some]).all(), f"{what}: a query that sees nothing has an lse"
    off = np.abs(got.lse[some] - want.lse[some]).max(initial=0.0)
    assert off <= LSE_LIMIT, f"{what}: the lse is {off:.2e} off"


def check_odd_coded(library: Library, given: Coded, case: Case, pages: CodedPages) -> None:
    """NaN comes out of what has an odd number, and others are unchanged. Raises AssertionError."""
    want, group = expected(case), given.shape.group
    odd_out, odd_lse = (np.zeros(want.lse.shape, bool) for _ in range(2))
    if given.odd == "query":
        case.q[0, 1, 5] = given.number
        odd_out[0, 1] = odd_lse[0, 1] = True
    else:
        at = 7 if given.odd == "key" else TILE_TOKENS + 7
        scales = pages.tiles[case.batch.tables[0][0], 1, 0, -4 * TILE_TOKENS :].view(np.float16)
        scales[at] = given.number
        odd_out[0, group : 2 * group] = True
        odd_lse[0, group : 2 * group] = given.odd == "key"
    got = attended(library, case, pages, blocks=given.blocks)
    assert (np.isnan(got.lse) == odd_lse).all(), f"{given}: log-sum-exps"
    assert (np.isnan(got.out.astype(np.float32)).all(axis=2) == odd_out).all(), f"{given}: outputs"
    np.testing.assert_allclose(got.lse[~odd_lse], want.lse[~odd_lse], atol=LSE_LIMIT, err_msg=str(given))


RAGGED = ((1, 133), (1, 0), (1, 1), (1, 16), (1, 17), (1, 300))
CODED = (
    Coded(Shape(RAGGED)),
    Coded(Shape(((1, 100), (1, 70)), ("f16", "f16"), page_tokens=32, group=7, kv_heads=1), "rot-8-4"),
    Coded(Shape(((1, 200), (1, 20), (1, 3)), page_tokens=32, chosen=2, group=16, kv_heads=1), "rot-8-8"),
    Coded(Shape(((1, 209), (1, 20)), sinks=4, window=50), "rot-8-8", is_narrow=True),
    Coded(Shape(((1, 777),), kv_heads=1, spread=0.5), uneven=2.0),
    Coded(Shape(((1, 600),), kv_heads=1, group=9), "rot-8-4", blocks=10),
    *(
        Coded(Shape(((1, 300), (1, 40))), odd=odd, number=number, blocks=9)
        for odd in ("key", "value", "query")
        for number in (np.nan, np.inf)
    ),
)
"""Small ones of each kind."""
