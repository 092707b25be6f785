"""The contract of every codec: blocks of any shape and values come back within the declared bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import count
from tests.unit.codecs.calibrated import decode, encode
from tierd.codecs import block as block_module
from tierd.codecs.block import HEADER, IDENTITY, Codec, Context, Payload, Wanted
from tierd.codecs.int8 import Int8
from tierd.codecs.layered import COARSE
from tierd.codecs.named import ALL, BY_NUMBER, codec_named
from tierd.codecs.planes import COMPRESSORS, Planes
from tierd.codecs.rot import HEAD_DIMS
from tierd.codecs.values import DTYPES, LAYOUTS, KVShape, floats_of, raw_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord, InvalidArgument, TierdError, Unsupported


@pytest.fixture(autouse=True, scope="module")
def narrow_groups() -> Iterator[None]:
    """Calibrations of many shapes are made here: narrow bases are made fast, and blocks have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierd.codecs.transform_fit.WIDTH", 96)
        yield


def has_package(codec: Codec) -> bool:
    """lz4 and zstd are optional packages."""
    return not isinstance(codec, Planes) or find_spec(COMPRESSORS[codec.name].package.split(".")[0]) is not None


CODECS = (*ALL, COARSE)
each_codec = pytest.mark.parametrize("codec", list(filter(has_package, CODECS)), ids=lambda codec: codec.name)
lossy_codec = pytest.mark.parametrize(
    "codec", [codec for codec in CODECS if not codec.is_exact], ids=lambda codec: codec.name
)
exact_codec = pytest.mark.parametrize(
    "codec", [codec for codec in ALL if codec.is_exact and has_package(codec)], ids=lambda codec: codec.name
)


def shape_of(
    layers: int = 2, tokens: int = 16, heads: int = 2, dim: int = 64, dtype: str = "bfloat16", layout: str = "NHD"
) -> KVShape:
    return KVShape(KVGeometry(layers, heads, dim, dtype, layout), tokens)


def block_of(values: np.ndarray, shape: KVShape) -> bytes:
    return rounded(np.broadcast_to(values, shape.sizes).astype(np.float32), shape.geometry.dtype).tobytes()


def noise(shape: KVShape, seed: int = 0, scale: float = 1.0) -> bytes:
    chance = np.random.default_rng(seed)
    return block_of(scale * chance.standard_normal(shape.sizes), shape)


def floats(block: object, shape: KVShape) -> np.ndarray:
    return floats_of(raw_of(block, shape), shape.geometry.dtype).astype(np.float64)


def check(codec: Codec, block: bytes, shape: KVShape) -> float:
    """A block comes back within its bound; the largest error."""
    found = decode(encode(codec, block, shape), BY_NUMBER)
    if codec.is_exact:
        assert (found.block.tobytes(), found.error) == (block, 0.0)
    off = float(np.abs(floats(found.block, shape) - floats(block, shape)).max())
    assert off <= found.error or found.block.tobytes() == block
    return off


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVShape, int, float, list[tuple[int, float]]]:
    dim = draw(st.sampled_from(HEAD_DIMS[:2]))
    shape = shape_of(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 5)),
        dim,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(LAYOUTS)),
    )
    odd = st.sampled_from([0.0, -0.0, 1e4, -1e4, 6e4, 1e-8, 1e-40, 3.0, -3.0])
    return (
        shape,
        draw(st.integers(0, 1 << 30)),
        draw(st.sampled_from([0.0, 1e-20, 3e-7, 1e-4, 1.0, 100.0])),
        draw(st.lists(st.tuples(st.integers(0, 1 << 30), odd), max_size=8)),
    )


@each_codec
@settings(max_examples=count(test=40, nightly=20_000, weekly=200_000), deadline=None)
@given(case=cases())
def test_blocks_come_back_within_the_bound(codec: Codec, case: tuple) -> None:
    """No value of a decoded block is off by more than the header says."""
    shape, seed, scale, odd = case
    if codec.is_calibrated:  # each geometry needs a fit
        g = shape.geometry
        few = replace(g, layers=min(g.layers, 2), kv_heads=min(g.kv_heads, 2), head_dim=64)
        shape = replace(shape, geometry=few)
    values = scale * np.random.default_rng(seed).standard_normal(shape.sizes)
    for place, value in odd:
        values.reshape(-1)[place % values.size] = value
    check(codec, block_of(values, shape), shape)


@each_codec
@pytest.mark.parametrize(("value", "limit"), [(0.0, 0.0), (1.0, 0.75), (-3.0, 2.25), (1e-40, 1e-39)])
def test_a_constant_block(codec: Codec, value: float, limit: float) -> None:
    """A block of one value comes back with a small error, and zeros as zeros. A calibrated codec's
    steps do not follow the block's values, so there the bound alone holds."""
    shape = shape_of()
    off = check(codec, block_of(np.float32(value), shape), shape)
    assert codec.is_calibrated or off <= limit


@lossy_codec
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_as_it_is(codec: Codec, value: float) -> None:
    """A block with NaN or infinity is kept exactly, and its header says so."""
    shape = shape_of()
    raw = np.frombuffer(noise(shape), np.uint16).copy()
    raw[77] = np.array(value, np.float32).view(np.uint32) >> 16
    found = decode(encode(codec, raw, shape), BY_NUMBER)
    assert (found.block.tobytes(), found.error, found.codec) == (raw.tobytes(), 0.0, IDENTITY)


@exact_codec
@settings(max_examples=count(test=40, nightly=5_000, weekly=50_000), deadline=None)
@given(case=cases(), odd=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 0xFFFF)), max_size=8))
def test_exact_codecs_keep_every_bit(codec: Codec, case: tuple, odd: list) -> None:
    """NaN with any bits, infinities, negative zero and subnormal values come back bit by bit."""
    shape, seed, scale, _ = case
    chance = np.random.default_rng(seed)
    raw = np.frombuffer(block_of(scale * chance.standard_normal(shape.sizes), shape), np.uint16).copy()
    for place, bits in odd:
        raw[place % len(raw)] = bits
    if seed % 3 == 0:
        raw[:] = chance.integers(0, 1 << 16, len(raw), dtype=np.uint16)
    assert decode(encode(codec, raw, shape), BY_NUMBER).block.tobytes() == raw.tobytes()
    long = shape_of(shape.geometry.layers, 130 + seed % 40, 1, 32, shape.geometry.dtype, shape.geometry.layout)
    raw = np.resize(raw, long.values)
    assert decode(encode(codec, raw, long), BY_NUMBER).block.tobytes() == raw.tobytes()


@each_codec
@pytest.mark.parametrize("value", [1e38, 3e30, -3e38])
def test_huge_values(codec: Codec, value: float) -> None:
    """Values whose scale or square is beyond its number format come back within the bound too."""
    shape = shape_of()
    block = block_of(np.float32(value) * (1 + np.arange(64, dtype=np.float32) / 512), shape)
    assert np.isfinite(floats(decode(encode(codec, block, shape), BY_NUMBER).block, shape)).all()
    check(codec, block, shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_to_nearest_even(dtype: str) -> None:
    """Rounding agrees with ml_dtypes and numpy on random words, and on every tie of one exponent."""
    words = np.random.default_rng(3).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (np.arange(0x3F80, 0x4000, dtype=np.uint32) << 16) + 0x8000
    values = np.concatenate((words, ties)).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 6e4)]
    other = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    assert np.array_equal(rounded(values, dtype), values.astype(other).view(np.uint16))


@each_codec
@pytest.mark.parametrize("field", ["tokens", "layers", "kv_heads", "head_dim", "payload"])
def test_a_header_with_another_shape(codec: Codec, field: str) -> None:
    """A header whose shape does not fit the payload is refused, though its checksum holds."""
    was = crafted(codec)[: HEADER.itemsize].view(HEADER)[field][0]
    least, most = codec.lengths(shape_of(layers=1))
    fault: type[TierdError] = CorruptRecord
    said = "its shape takes" if least == most else "its shape takes|a plane has|read another copy"
    if codec.is_calibrated and field in ("layers", "kv_heads", "head_dim"):
        fault, said = Unsupported, "is for layers"
    with pytest.raises(fault, match=said):
        decode(crafted(codec, **{field: 2 * int(was)}), BY_NUMBER)


@each_codec
@pytest.mark.parametrize(("scale", "dtype"), [(2.0**-22, "float16"), (2.0**-130, "bfloat16")])
def test_subnormal_values(codec: Codec, scale: float, dtype: str) -> None:
    """The bound covers the rounding of values below the smallest normal number of the dtype."""
    shape = shape_of(dtype=dtype)
    check(codec, noise(shape, scale=scale), shape)
    for most in range(100, 300, 7):  # near 128 units, int8's error is just above half a unit
        ramp = np.arange(shape.values).reshape(shape.sizes) % most
        check(codec, block_of(ramp * (2.0**-24 if dtype == "float16" else 2.0**-133), shape), shape)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("heads", "dim", "values"), [(2, 64, 128), (8, 128, 128), (5, 64, 64), (6, 32, 96), (1, 256, 256), (2**29, 1, 128)]
)
def test_rows_of_int8(heads: int, dim: int, values: int) -> None:
    """A row has the most heads that divide all heads and have at most 128 values together."""
    shape = shape_of(layers=1, tokens=1, heads=heads, dim=dim)
    assert codec_named("int8").lengths(shape).most == 4 + shape.values + shape.values // values


@pytest.mark.parametrize("name", ["rot-8-8", "rot-4-4", "int3"])
def test_a_head_dim_that_no_codec_writes(name: str) -> None:
    """A header with a head_dim that its codec refuses is refused when decoding too."""
    shape, codec = shape_of(dim=17), codec_named(name)
    payload = Payload(np.zeros(codec.lengths(shape).most, np.uint8), 0.0)
    with pytest.raises(Unsupported, match="head_dim 17"):
        decode(block_module._framed(codec, shape, payload, Context()), BY_NUMBER)


def test_a_codec_gets_finite_values_alone() -> None:
    """A codec is not asked to encode a block with NaN or infinity."""
    shape = shape_of()
    raw = np.frombuffer(noise(shape), np.uint16).copy()
    raw[5] = 0x7F80

    class Careful(Int8):
        def encode(self, raw: np.ndarray, shape: KVShape, context: Context) -> Payload:
            raise AssertionError("it was asked")

    assert decode(encode(Careful(1), raw, shape), BY_NUMBER).block.tobytes() == raw.tobytes()


def crafted(codec: Codec, **fields: int) -> np.ndarray:
    """An encoded block whose header has other numbers, and a checksum that matches."""
    shape = shape_of(layers=1, tokens=16)
    coded = encode(codec, noise(shape), shape)
    header = coded[: HEADER.itemsize].view(HEADER)
    for field, value in fields.items():
        header[field] = value
    header["checksum"] = block_module._checksum(header.tobytes(), coded[HEADER.itemsize :])
    return coded


@each_codec
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(("tokens", "layers", "kv_heads", "head_dim"), (0, 33, 2**31 - 1, 2**32 - 1)),
        *itertools.product(("dtype", "layout"), (2, 255)),
    ],
)
def test_any_shape_in_a_header(codec: Codec, field: str, value: int) -> None:
    """A header with an impossible or huge shape is refused by name, at once."""
    with pytest.raises((CorruptRecord, Unsupported)):
        decode(crafted(codec, **{field: value}), BY_NUMBER)


@each_codec
def test_one_token_and_both_layouts(codec: Codec) -> None:
    """Blocks of one token, and the same values in another order of bytes, give the same values."""
    check(codec, noise(shape_of(tokens=1)), shape_of(tokens=1))
    plain, turned = shape_of(tokens=19), shape_of(tokens=19, layout="HND")
    block = noise(plain)
    other = np.ascontiguousarray(raw_of(block, plain).transpose(0, 1, 3, 2, 4)).tobytes()
    first, second = (decode(encode(codec, b, s), BY_NUMBER).block for b, s in ((block, plain), (other, turned)))
    assert np.array_equal(raw_of(first, plain), raw_of(second, turned))


@each_codec
def test_damage_is_refused(codec: Codec) -> None:
    """Each truncation, each flipped bit of the header, and flips in the payload raise CorruptRecord."""
    shape = shape_of(layers=1, tokens=3)
    good = encode(codec, noise(shape), shape)
    chance = np.random.default_rng(1)
    for length in (0, 1, HEADER.itemsize - 1, HEADER.itemsize, len(good) - 1):
        with pytest.raises(CorruptRecord):
            decode(good[:length], BY_NUMBER)
    with pytest.raises(CorruptRecord):
        decode(np.append(good, np.uint8(0)), BY_NUMBER)
    for bit in (*range(8 * HEADER.itemsize), *chance.integers(8 * HEADER.itemsize, 8 * len(good), 200)):
        bad = good.copy()
        bad[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CorruptRecord):
            decode(bad, BY_NUMBER)


@each_codec
def test_the_length_is_known_before(codec: Codec) -> None:
    """A payload's length is within what its shape says, and below the block's own."""
    for tokens in (1, 15, 16, 17, 100):
        shape = shape_of(tokens=tokens)
        coded = encode(codec, noise(shape), shape)
        least, most = codec.lengths(shape)
        if coded[: HEADER.itemsize].view(HEADER)["codec"][0] == IDENTITY:
            assert most >= shape.block_bytes == len(coded) - HEADER.itemsize
        else:
            assert least <= len(coded) - HEADER.itemsize <= min(most, shape.block_bytes - 1)


@pytest.mark.parametrize(
    ("name", "bits"), [("int8", 8.1), ("rot-8-8", 8.3), ("rot-8-4", 6.3), ("rot-4-4", 4.3), ("int3", 3.3)]
)
def test_bits_of_a_value(name: str, bits: float) -> None:
    """A block of 256 tokens, header included, has at most the promised bits per value."""
    shape = shape_of(layers=6, tokens=256)
    assert 8 * len(encode(codec_named(name), noise(shape), shape)) / shape.values <= bits


@pytest.mark.parametrize(("name", "limit"), [("int8", 0.01), ("rot-8-8", 0.02), ("rot-4-4", 0.11), ("int3", 0.21)])
def test_noise_comes_back_well(name: str, limit: float) -> None:
    """The root mean square error of normal values is near the best of a uniform code (Max, 1960)."""
    shape = shape_of(tokens=64)
    block = noise(shape)
    off = floats(decode(encode(codec_named(name), block, shape), BY_NUMBER).block, shape) - floats(block, shape)
    assert np.sqrt(np.mean(off**2)) < limit


@pytest.mark.parametrize("name", ["rot-8-8", "rot-4-4", "int3"])
def test_vectors_keep_their_length(name: str) -> None:
    """A decoded vector's product with the original is the original's square: recall needs no bias."""
    shape = shape_of(tokens=64)
    block = noise(shape, scale=2.0)
    was = floats(block, shape)
    now = floats(decode(encode(codec_named(name), block, shape), BY_NUMBER).block, shape)
    assert np.allclose((was * now).sum(-1) / (was * was).sum(-1), 1.0, atol=0.01)


@pytest.mark.parametrize("name", ["rot-8-8", "rot-8-4", "rot-4-4", "int3"])
def test_outliers_spread(name: str) -> None:
    """One channel a hundred times as large costs the others less than a code without rotation."""
    shape = shape_of(tokens=64)
    values = np.random.default_rng(2).standard_normal(shape.sizes)
    values[..., 5] *= 100
    block = block_of(values, shape)
    off = floats(decode(encode(codec_named(name), block, shape), BY_NUMBER).block, shape) - floats(block, shape)
    largest = np.abs(values).max(-1).mean()
    assert np.sqrt(np.mean(np.delete(off, 5, axis=-1) ** 2)) < largest / 4


@each_codec
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [1.0, np.inf])
def test_results_in_given_memory(codec: Codec, layout: str, value: float) -> None:
    """encode and decode write the same bytes to given memory as to new memory, also of exact blocks."""
    shape = shape_of(tokens=40, layout=layout)
    raw = np.frombuffer(noise(shape), np.uint16).copy()
    raw[7] = rounded(np.full(1, 1, np.float32), "bfloat16")[0] if value == 1 else 0x7F80
    whole, back = (np.full(n, 0xA5, np.uint8) for n in (HEADER.itemsize + shape.block_bytes + 9, shape.block_bytes))
    want = encode(codec, raw, shape)
    found = encode(codec, raw, shape, out=whole)
    assert np.shares_memory(found, whole) and found.tobytes() == whole[: len(found)].tobytes() == want.tobytes()
    decoded = decode(found, BY_NUMBER, out=back).block
    assert np.shares_memory(decoded, back)
    assert decoded.tobytes() == back.tobytes() == decode(want, BY_NUMBER).block.tobytes()


def test_memory_of_another_length_is_refused() -> None:
    """encode needs room for a header and a whole block, decode exactly a block's bytes."""
    shape, codec = shape_of(), codec_named("int8")
    coded = encode(codec, noise(shape), shape)
    with pytest.raises(InvalidArgument, match="out has"):
        encode(codec, noise(shape), shape, out=np.empty(HEADER.itemsize + shape.block_bytes - 1, np.uint8))
    for length in (shape.block_bytes - 1, shape.block_bytes + 1):
        with pytest.raises(InvalidArgument, match="has"):
            decode(coded, BY_NUMBER, out=np.empty(length, np.uint8))


def test_refusals_name_the_fault() -> None:
    """An unknown codec, an opaque geometry, a wrong length and an impossible head_dim are refused."""
    shape = shape_of()
    with pytest.raises(InvalidArgument, match="'zip' is unknown; use one of int8, rot-8-8"):
        codec_named("zip")
    with pytest.raises(InvalidArgument, match="dtype 'float32'"):
        shape_of(dtype="float32")
    with pytest.raises(InvalidArgument, match="has 100 bytes"):
        encode(codec_named("int8"), bytes(100), shape)
    with pytest.raises(Unsupported, match="head_dim 80 is not one of"):
        encode(codec_named("rot-4-4"), noise(shape_of(dim=80)), shape_of(dim=80))
    with pytest.raises(TierdError, match="codec 5 in version 1 is unknown here"):
        decode(encode(codec_named("int3"), noise(shape), shape), {})


@lossy_codec
@pytest.mark.parametrize("error", [np.nan, np.inf, -1.0])
def test_an_impossible_error_bound(codec: Codec, error: float) -> None:
    """A header whose error is no bound is refused, though its checksum holds."""
    with pytest.raises(CorruptRecord, match="error .* is impossible"):
        decode(crafted(codec, error=error), BY_NUMBER)  # type: ignore[arg-type]


def test_another_block_is_refused_before_it_is_decoded() -> None:
    """A block of another shape or codec than the wanted one costs no decoding."""

    class Costly(Int8):
        def decode(self, payload: np.ndarray, shape: KVShape, context: Context) -> np.ndarray:
            raise AssertionError("it was decoded")

    shape = shape_of()
    coded, costly = encode(codec_named("int8"), noise(shape), shape), {1: Costly(1)}
    for wanted in (Wanted(shape_of(tokens=17)), Wanted(codec=4)):
        with pytest.raises(CorruptRecord, match="it has codec 1 and .*wanted are"):
            block_module.decode(coded, costly, wanted=wanted)


def test_a_position_beyond_the_header() -> None:
    """A position that the header cannot hold is refused by name."""
    shape = shape_of()
    with pytest.raises(InvalidArgument, match="position 4294967296 is outside"):
        encode(codec_named("int8"), noise(shape), shape, Context(1 << 32))


def test_a_weight_that_is_no_share() -> None:
    """int3 refuses a chain's weight of 16 sixteenths, from which decoded values could grow."""
    shape = shape_of(layers=1)
    coded = encode(codec_named("int3"), noise(shape), shape)
    coded[HEADER.itemsize + 3] = 16
    header = coded[: HEADER.itemsize].view(HEADER)
    header["checksum"] = block_module._checksum(header.tobytes(), coded[HEADER.itemsize :])
    with pytest.raises(CorruptRecord, match="a weight of 16 sixteenths is impossible"):
        decode(coded, BY_NUMBER)


def test_int3_predicts_tokens_from_their_predecessors() -> None:
    """Keys that resemble their predecessors come back with less than half of the error's square."""
    shape = shape_of(tokens=64)
    values = np.random.default_rng(3).standard_normal(shape.sizes)
    slow = values.copy()
    for token in range(1, 64):
        slow[:, :, token] = 0.9 * slow[:, :, token - 1] + 0.19**0.5 * values[:, :, token]

    def off(kind: np.ndarray) -> float:
        block = block_of(kind, shape)
        back = decode(encode(codec_named("int3"), block, shape), BY_NUMBER).block
        return float(((floats(back, shape) - floats(block, shape)) ** 2).mean())

    assert off(slow) < 0.5 * off(values)


def test_int3_forgets_outliers() -> None:
    """A vector after two of 1,000 times its length stands alone: their errors do not reach it."""
    shape, chance = shape_of(layers=1, tokens=64, heads=1), np.random.default_rng(3)
    values = np.cumsum(chance.standard_normal(shape.sizes) * 0.3, axis=2)
    values[:, :, 34:36] *= 1000  # in no pair that the weight follows from
    block = block_of(values, shape)
    back = decode(encode(codec_named("int3"), block, shape), BY_NUMBER).block
    off = np.sqrt(((floats(back, shape) - floats(block, shape)) ** 2).mean(axis=(0, 1, 3, 4)))
    assert off[36:].max() < off[34] / 500


@pytest.mark.parametrize("name", ["rot-8-8", "rot-4-4", "int3"])
@pytest.mark.parametrize("scale", [0x7C00, 0x7E00, 0xFC00])
def test_a_scale_that_is_not_finite(name: str, scale: int) -> None:
    """Rotated codes whose scale is NaN or infinite are refused, natively and in numpy."""
    shape = shape_of(layers=1)
    coded = encode(codec_named(name), noise(shape), shape)
    at = HEADER.itemsize + (4 if name == "int3" else codec_named(name).lengths(shape).most // 2 - 2)
    coded[at : at + 2] = np.array([scale], "<u2").view(np.uint8)
    header = coded[: HEADER.itemsize].view(HEADER)
    header["checksum"] = block_module._checksum(header.tobytes(), coded[HEADER.itemsize :])
    with pytest.raises(CorruptRecord, match="a scale of rotated codes is not finite"):
        decode(coded, BY_NUMBER)
