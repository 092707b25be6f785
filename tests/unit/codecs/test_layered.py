"""Codec layered-2: the values of transform-2, and a prefix that is decoded alone within its own bound."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import count
from tests.unit.codecs import calibrated
from tests.unit.codecs.calibrated import POSITION, TOKENS, decode, samples
from tests.unit.codecs.test_blocks import block_of, floats, narrow_groups, noise, shape_of
from tests.unit.codecs.test_crafted import framed
from tierd.codecs import block as block_module
from tierd.codecs import prefix, rans
from tierd.codecs.block import FRONT, FRONT_CHECKSUM, HEADER, IDENTITY, Codec, Context, Decoded, Wanted
from tierd.codecs.calibration import Calibration, Samples
from tierd.codecs.fit import make
from tierd.codecs.layered import CELL, CELLS, COARSE, FARTHEST, LAYERED, _coarse_of, _middles, layers_of
from tierd.codecs.multiples import CENTRE, ESCAPE, SYMBOLS, Coding
from tierd.codecs.named import BY_NUMBER, codec_named
from tierd.codecs.prefix import HEAD_BYTES, coarse_block, prefix_bytes
from tierd.codecs.product import floats_of_patterns
from tierd.codecs.rope import rotate
from tierd.codecs.transform import Plan, _plan, _tensors
from tierd.codecs.values import DTYPES, Bytes, KVShape, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord, Unsupported

__all__ = ["narrow_groups"]  # a fixture for this module too
FINE = codec_named("transform-2")
UNCHECKED = range(HEADER.itemsize - 8, HEADER.itemsize)
"""Bytes of a prefix that its checksum does not cover: the checksum of the whole."""


def decode_prefix(data: object, **wanted: object) -> Decoded:
    """With all calibrations that `encode` used."""
    return prefix.decode_prefix(data, BY_NUMBER, calibrated._MADE, **wanted)  # type: ignore[arg-type]


@cache
def unequal(layers: int, kv_heads: int) -> Samples:
    """Samples with some channels so wide that their coefficients have low bits."""
    made = samples(KVGeometry(layers, kv_heads, 64, "bfloat16"))
    made.values[..., ::7] *= 40
    return made


@cache
def unequally(layers: int, kv_heads: int) -> Calibration:
    found = make(unequal(layers, kv_heads))
    calibrated._MADE[found.hash] = found
    return found


def encode(codec: Codec, block: bytes, shape: KVShape) -> Bytes:
    calibration = unequally(shape.geometry.layers, shape.geometry.kv_heads)
    return calibrated.encode(codec, block, shape, Context(POSITION, calibration if codec.is_calibrated else None))


def tensors(shape: KVShape) -> dict[str, Any]:
    return _tensors(unequally(shape.geometry.layers, shape.geometry.kv_heads), shape, "layered-2")


def like_the_samples(shape: KVShape) -> bytes:
    """A block of the calibration's own values, keys at their positions."""
    own, tokens = unequal(shape.geometry.layers, shape.geometry.kv_heads), shape.tokens
    values = own.values.copy()
    values[:, 0] = rotate(values[:, 0], POSITION, own.frequencies)
    return rounded(values[:, :, :tokens], shape.geometry.dtype).tobytes()


def off(found: Decoded, block: bytes, shape: KVShape) -> float:
    return float(np.abs(floats(found.block, shape) - floats(block, shape)).max())


@st.composite
def blocks(draw: st.DrawFn) -> tuple[KVShape, bytes]:
    """Blocks of several groups, some with values far from the calibration's, some like them."""
    shape = shape_of(
        draw(st.integers(1, 2)), draw(st.integers(1, 40)), draw(st.integers(1, 2)), dtype=draw(st.sampled_from(DTYPES))
    )
    if draw(st.booleans()):
        values = floats(like_the_samples(shape), shape)
    else:
        scale = draw(st.sampled_from([0.0, 1e-4, 1.0, 30.0]))
        values = scale * np.random.default_rng(draw(st.integers(0, 1 << 30))).standard_normal(shape.sizes)
    for place, value in draw(
        st.lists(st.tuples(st.integers(0, 1 << 30), st.sampled_from([0.0, 1e3, -9e3])), max_size=6)
    ):
        values.reshape(-1)[place % values.size] = value
    return shape, block_of(values, shape)


@settings(max_examples=count(test=60, nightly=10_000, weekly=100_000), deadline=None)
@given(case=blocks())
def test_both_parts_are_within_their_bounds(case: tuple[KVShape, bytes]) -> None:
    """The whole has transform-2's values. The prefix is within the error that it declares."""
    shape, block = case
    coded = encode(LAYERED, block, shape)
    whole, part = decode(coded, BY_NUMBER), decode_prefix(coded)
    assert off(part, block, shape) <= part.error
    if whole.codec == IDENTITY:
        assert part.block.tobytes() == block
        return
    fine = encode(FINE, block, shape)
    if fine[: HEADER.itemsize].view(HEADER)["codec"][0] == FINE.number:
        assert whole.block.tobytes() == decode(fine, BY_NUMBER).block.tobytes()
    assert off(whole, block, shape) <= whole.error
    assert part.codec == COARSE.number


def test_a_prefix_is_the_coarse_codec() -> None:
    """A prefix becomes the block that codec layered-2-coarse would have made."""
    shape = shape_of()
    block = like_the_samples(shape)
    assert np.array_equal(coarse_block(encode(LAYERED, block, shape)), encode(COARSE, block, shape))


@pytest.mark.parametrize("layers", [1, 4])
def test_sizes_and_errors(layers: int) -> None:
    """Both parts take at most 2 % more than transform-2, the prefix at most two thirds. Its error is near
    that of a step three times as large."""
    shape = shape_of(layers=layers, tokens=TOKENS)
    block = like_the_samples(shape)
    fine, coded = encode(FINE, block, shape), encode(LAYERED, block, shape)
    assert len(coded) <= 1.02 * len(fine)
    assert prefix_bytes(coded) <= len(coded) * 2 / 3
    errors = [
        np.sqrt(np.mean((floats(b.block, shape) - floats(block, shape)) ** 2))
        for b in (decode(fine, BY_NUMBER), decode_prefix(coded))
    ]
    assert 1.5 < errors[1] / errors[0] < 3.2


def test_a_prefix_needs_all_of_its_bytes() -> None:
    """`prefix_bytes` bytes are enough. Each shorter part of the block is refused. More of it, or memory
    of the caller, changes nothing."""
    shape = shape_of(layers=1, tokens=9)
    coded = encode(LAYERED, noise(shape), shape)
    length = prefix_bytes(coded[:HEAD_BYTES])
    assert HEAD_BYTES < length < len(coded)
    found = decode_prefix(coded[:length])
    assert np.array_equal(found.block, decode_prefix(coded).block)
    assert np.array_equal(found.block, decode_prefix(coded[: length + 1].tobytes()).block)
    out = np.empty(shape.block_bytes, np.uint8)
    assert decode_prefix(coded, out=out).block is out and np.array_equal(out, found.block)
    for cut in range(length):
        with pytest.raises(CorruptRecord):
            decode_prefix(coded[:cut])


def test_damage_to_a_prefix_is_refused() -> None:
    """Each flipped bit of a prefix raises CorruptRecord, but for the checksum of the whole."""
    shape = shape_of(layers=1, tokens=3)
    coded = encode(LAYERED, noise(shape), shape)
    whole = decode_prefix(coded)
    for bit in range(8 * prefix_bytes(coded)):
        bad = coded.copy()
        bad[bit // 8] ^= 1 << bit % 8
        if bit // 8 in UNCHECKED:
            assert np.array_equal(decode_prefix(bad).block, whole.block)
            continue
        with pytest.raises(CorruptRecord):
            decode_prefix(bad)


def test_a_prefix_of_another_block() -> None:
    """A wanted shape or codec is compared, and the calibration is looked up by name."""
    shape = shape_of(layers=1, tokens=9)
    coded = encode(LAYERED, noise(shape), shape)
    assert decode_prefix(coded, wanted=Wanted(shape, LAYERED.number)).shape == shape
    with pytest.raises(CorruptRecord, match="wanted are"):
        decode_prefix(coded, wanted=Wanted(shape_of(layers=1, tokens=10)))
    with pytest.raises(CorruptRecord, match="wanted are codec 16"):
        decode_prefix(coded, wanted=Wanted(codec=FINE.number))
    with pytest.raises(Unsupported, match="is not here"):
        prefix.decode_prefix(coded, BY_NUMBER)


@pytest.mark.parametrize("name", ["int8", "transform-1", "lossless"])
def test_other_codecs_have_no_prefix(name: str) -> None:
    """The prefix of a block of another codec is the whole block."""
    shape = shape_of()
    coded = encode(codec_named(name), noise(shape), shape)
    assert prefix_bytes(coded[: HEADER.itemsize]) == len(coded)
    found = decode_prefix(np.append(coded, np.uint8(1)))
    assert np.array_equal(found.block, decode(coded, BY_NUMBER).block)
    assert found.codec == codec_named(name).number


def test_no_block_at_all() -> None:
    """Bytes without a header, and a layered block's header alone, have no prefix."""
    shape = shape_of(layers=1)
    with pytest.raises(CorruptRecord, match="have no header"):
        prefix_bytes(bytes(HEAD_BYTES))
    with pytest.raises(CorruptRecord, match="70 bytes are less than 80"):
        prefix_bytes(encode(LAYERED, noise(shape), shape)[:70])


def fronted(coded: Bytes, **fields: float) -> Bytes:
    """The block with other numbers in FRONT, under checksums that hold."""
    payload = coded[HEADER.itemsize :].copy()
    front = payload[: FRONT.itemsize].view(FRONT)
    for field, value in fields.items():
        front[field] = value
    made = framed(coded, payload)
    rest = made[HEADER.itemsize + FRONT_CHECKSUM :][: max(0, int(front["length"][0]) - FRONT_CHECKSUM)]
    made[HEADER.itemsize :][: FRONT.itemsize].view(FRONT)["checksum"] = block_module._checksum(
        made[: HEADER.itemsize].tobytes(), rest
    )
    return made


@pytest.mark.parametrize("length", [0, 7, 16, 27, 1 << 20, (1 << 32) - 1])
def test_an_impossible_prefix(length: int) -> None:
    """A prefix that is too short, or longer than the payload, is refused by name, though checksums
    hold."""
    shape = shape_of(layers=1, tokens=9)
    coded = encode(LAYERED, noise(shape), shape)
    made = fronted(coded, length=length)
    with pytest.raises(CorruptRecord, match="checksum does not match|its shape takes"):
        decode_prefix(made)
    payload = made[HEADER.itemsize :]
    with pytest.raises(CorruptRecord, match="codec layered-2: a prefix of"):
        decode(framed(coded, payload), BY_NUMBER)


def test_an_impossible_error_of_a_prefix() -> None:
    """A prefix whose bound is no number is refused."""
    shape = shape_of(layers=1, tokens=9)
    with pytest.raises(CorruptRecord, match="error nan is impossible"):
        decode_prefix(fronted(encode(LAYERED, noise(shape), shape), error=np.nan))


def test_no_room_for_low_bits() -> None:
    """A payload that ends within its low bits is refused by name."""
    shape = shape_of(layers=1, tokens=TOKENS)
    assert _plan(tensors(shape), int(tensors(shape)["levels"][1])).coding.shifts.any()
    coded = encode(LAYERED, like_the_samples(shape), shape)
    payload = coded[HEADER.itemsize : prefix_bytes(coded)]
    with pytest.raises(CorruptRecord, match="bytes have no room for"):
        decode(framed(coded, payload), BY_NUMBER)


def test_multiples_that_are_never_encoded() -> None:
    """A coarse part with escapes beyond the farthest multiple is refused, alone and in the whole."""
    shape = shape_of(layers=1, tokens=9)
    values = floats(noise(shape), shape)
    values[0, 1, 4, 0, 3] = 1e4
    made = encode(COARSE, block_of(values, shape), shape)
    assert made[HEADER.itemsize + 4] > 0
    payload = made[HEADER.itemsize :].copy()
    payload[-2:] = (0xFF, 0x7F)
    with pytest.raises(CorruptRecord, match="is never encoded"):
        decode(framed(made, payload), BY_NUMBER)


def test_far_values_are_kept() -> None:
    """A block with a multiple beyond the half of transform's range is kept as it is."""
    shape = shape_of(layers=1, tokens=9)
    found = tensors(shape)
    step = float(_plan(found, int(found["levels"][1])).step)
    forward = floats_of_patterns(found["forward"][-1])
    values = np.zeros(shape.sizes)
    values[0, 1, 4, -1] = 1.5 * FARTHEST * step / np.abs(forward[:, -64:].sum(axis=1)).max()
    block = block_of(values, shape)
    assert encode(FINE, block, shape)[: HEADER.itemsize].view(HEADER)["codec"][0] == FINE.number
    coded = encode(LAYERED, block, shape)
    assert coded[: HEADER.itemsize].view(HEADER)["codec"][0] == IDENTITY
    assert prefix_bytes(coded) == len(coded)


def test_coarse_values_are_in_the_middle() -> None:
    """A coarse value is off by one step at most, or by half a step if the lowest bit is left out."""
    q = np.arange(-FARTHEST, FARTHEST + 1, dtype=np.int16)[None].repeat(2, axis=0)
    coding = Coding(np.zeros(2, np.uint8), np.array([0, 1], np.uint8), np.zeros((1, SYMBOLS), np.uint8))
    plan = Plan(np.float32(1), [2], coding)
    away = _middles(_coarse_of(q, plan), plan) - 2 * q.astype(int)
    assert np.unique(away[0]).tolist() == [-2, 0, 2] and np.unique(away[1]).tolist() == [-1, 1]


def test_tables_follow_from_the_calibration() -> None:
    """Each table sums to 4096. A cell has its symbols' frequencies together, and each refinement one
    at least."""
    shape = shape_of(layers=1)
    found = tensors(shape)
    layers, frequencies = layers_of(found), found["frequencies"].astype(int)
    tables = len(frequencies)
    coarse = layers.coarse["frequencies"]
    assert (coarse.sum(axis=1) == rans.TOTAL).all() and np.array_equal(coarse[:tables], frequencies)
    assert np.array_equal(coarse[tables:, ESCAPE], frequencies[:, ESCAPE])
    for c in range(-(CELLS // 2), CELLS // 2 + 1):
        middle = CENTRE + CELL * c
        assert np.array_equal(coarse[tables:, CENTRE + c], frequencies[:, middle - 1 : middle + 2].sum(axis=1))
    assert (layers.refined.sum(axis=1) == rans.TOTAL).all() and layers.refined.min() >= 1
    assert layers.refined[CELLS].tolist() == [1366, 1365, 1365]


def test_known_tables_of_refinements() -> None:
    """Tables of refinements are integers that no machine computes otherwise."""
    frequencies = np.zeros((1, ESCAPE + 1), np.uint16)
    frequencies[0, CENTRE - 1 : CENTRE + 4] = (700, 3000, 300, 2, 1)
    frequencies[0, ESCAPE] = 1
    found = {
        "frequencies": frequencies,
        "shifts": np.zeros((1, 1, 1), np.uint8),
        "choices": np.zeros((1, 1, 1), np.uint8),
    }
    refined = layers_of(found).refined.tolist()
    assert refined[CELLS // 2 : CELLS // 2 + 2] == [[717, 3072, 307], [2710, 1365, 21]]
