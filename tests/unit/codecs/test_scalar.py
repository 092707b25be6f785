"""KIVI, KVQuant and CacheGen: what each of them promises beyond the contract of all codecs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.unit.codecs.calibrated import samples
from tests.unit.codecs.test_blocks import block_of, floats, noise, shape_of
from tierd.codecs import block, kvquant_fit, loops
from tierd.codecs.block import HEADER, IDENTITY, Context, Decoded, Payload, encode
from tierd.codecs.calibration import FREQUENCIES, Calibration, Samples
from tierd.codecs.kvquant import beyond
from tierd.codecs.named import BY_NUMBER, codec_named
from tierd.codecs.rope import rotate
from tierd.codecs.values import KVShape, raw_of
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord, Unsupported

NAMES = ("kvquant-4", "kvquant-3", "kvquant-2", "kivi-4", "kivi-2", "cachegen")
POSITION = 500


@cache
def _made(layers: int, kv_heads: int, head_dim: int) -> Calibration:
    drawn = samples(KVGeometry(layers, kv_heads, head_dim, "bfloat16"))
    return Calibration(drawn.geometry, {FREQUENCIES: drawn.frequencies, **kvquant_fit.fit(drawn)})


def calibration_for(shape: KVShape) -> Calibration:
    """KVQuant's tables alone, one calibration per number of layers, heads and channels."""
    g = shape.geometry
    return _made(g.layers, g.kv_heads, g.head_dim)


def decode(data: np.ndarray, shape: KVShape) -> Decoded:
    made = calibration_for(shape)
    return block.decode(data, BY_NUMBER, {made.hash: made})


def like_samples(shape: KVShape, seed: int = 0) -> bytes:
    """A block whose keys, before RoPE, have means and deviations of the calibration's samples."""
    made, g = calibration_for(shape), shape.geometry
    values = np.random.default_rng(seed).standard_normal(shape.sizes).astype(np.float32)
    middles, halves = made.tensors["kvquant.limits"].reshape(g.layers, 2, 1, g.kv_heads, g.head_dim).swapaxes(0, 1)
    values[:, 0] = values[:, 0] * (halves / np.float32(2.576)) + middles
    values[:, 0] = rotate(values[:, 0], POSITION, made.frequencies)
    return block_of(values, shape)


def encoded(name: str, data: bytes, shape: KVShape) -> np.ndarray:
    codec = codec_named(name)
    context = Context(POSITION, calibration_for(shape) if codec.is_calibrated else None)
    return encode(codec, data, shape, context)


@pytest.mark.parametrize(
    ("name", "bits", "limit"),
    [
        *(("kvquant-4", 4.5, 0.07), ("kvquant-3", 3.5, 0.13), ("kvquant-2", 2.5, 0.25)),
        *(("kivi-4", 5.01, 0.07), ("kivi-2", 3.01, 0.33), ("cachegen", 3.9, 0.18)),
    ],
)
def test_bits_and_error(name: str, bits: float, limit: float) -> None:
    """A block of 256 tokens has at most these bits per value, and this error relative to its deviation."""
    shape = shape_of(layers=6, tokens=256)
    data = like_samples(shape)
    coded = encoded(name, data, shape)
    off = floats(decode(coded, shape).block, shape) - floats(data, shape)
    assert 8 * len(coded) / shape.values <= bits
    assert np.sqrt(np.mean(off**2)) / floats(data, shape).std() <= limit


@pytest.mark.parametrize("name", NAMES)
def test_a_large_value_does_not_turn_a_block_into_identity(name: str) -> None:
    """A block with outliers of 10,000 is encoded, and what is far from them keeps its error."""
    shape = shape_of(layers=2, tokens=64)
    values = floats(like_samples(shape), shape)
    values[0, 1, 40, 0, 3] = values[1, 0, 7, 1, 60] = 1e4
    data = block_of(values, shape)
    found = decode(encoded(name, data, shape), shape)
    assert found.codec == codec_named(name).number
    off = np.abs(floats(found.block, shape) - floats(data, shape))
    assert off.max() <= found.error
    assert off[0, 0].max() < np.abs(floats(data, shape)[0, 0]).max()


@pytest.mark.skipif(
    loops.library is None, reason="no C++ compiler built the codecs' loops; install g++ and tierd again"
)
@pytest.mark.parametrize("name", NAMES[:5])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_native_loops_give_the_same_bytes(name: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of every instruction set encode and decode like the plain forms, whatever the values."""
    assert loops.library is not None
    monkeypatch.setattr(loops, "library", loops.library)
    chance = np.random.default_rng(level)
    for tokens, dim, dtype, layout in (
        *((70, 64, "bfloat16", "NHD"), (33, 96, "float16", "HND")),
        *((1, 128, "bfloat16", "HND"), (64, 32, "float16", "NHD")),
    ):
        shape = shape_of(tokens=tokens, heads=3, dim=dim, dtype=dtype, layout=layout)
        for scale in (1.0, 1e-4, 1e-40, 1e5, 0.0):
            values = scale * chance.standard_normal(shape.sizes)
            values.reshape(-1)[chance.integers(0, values.size, 6)] = [0.0, -0.0, 1e4, -6e4, 1e-8, 1e6]
            data, library = block_of(values, shape), loops.library
            native = encoded(name, data, shape) if library.tierd_use(level) >= 0 else None
            assert native is not None
            back = decode(native, shape).block
            monkeypatch.setattr(loops, "library", None)
            assert native.tobytes() == encoded(name, data, shape).tobytes()
            assert back.tobytes() == decode(native, shape).block.tobytes()
            monkeypatch.setattr(loops, "library", library)
    loops.library.tierd_use(3)


@pytest.mark.parametrize("name", ["kivi-4", "kivi-2"])
def test_the_last_tokens_of_kivi_stay_exact(name: str) -> None:
    """Tokens beyond the last whole group of 32 come back bit by bit."""
    shape = shape_of(tokens=77)
    data = noise(shape)
    back = raw_of(decode(encoded(name, data, shape), shape).block, shape)
    assert np.array_equal(back[:, :, 64:], raw_of(data, shape)[:, :, 64:])
    assert not np.array_equal(back[:, :, :64], raw_of(data, shape)[:, :, :64])


@pytest.mark.parametrize("name", ["kivi-4", "kivi-2"])
def test_groups_of_kivi(name: str) -> None:
    """A large key costs its channel for 32 tokens alone, a large value 32 channels of its token alone."""
    shape = shape_of(layers=1, tokens=64)
    values = floats(noise(shape), shape)
    values[0, 0, 3, 0, 5] = values[0, 1, 3, 0, 5] = 1000.0
    data = block_of(values, shape)
    off = np.abs(floats(decode(encoded(name, data, shape), shape).block, shape) - floats(data, shape))
    is_near = np.zeros(shape.sizes, bool)
    is_near[0, 0, :32, 0, 5] = is_near[0, 1, 3, 0, :32] = True
    assert off[~is_near].max() < 2
    assert np.median(off[0, 0, :32, 0, 5]) > 0 and off.max() > 2


def test_outliers_of_kvquant_keep_eleven_bits() -> None:
    """A value beyond its token's limits comes back as float16 has it."""
    shape = shape_of(layers=1, tokens=16)
    values = floats(like_samples(shape), shape)
    values[0, 1, :, 0, 9] = 1234.0
    data = block_of(values, shape)
    back = floats(decode(encoded("kvquant-2", data, shape), shape).block, shape)
    assert np.array_equal(back[0, 1, :, 0, 9], floats(data, shape)[0, 1, :, 0, 9])


def test_kvquant_knows_its_position() -> None:
    """Keys encoded at another position than theirs take more bits: RoPE is undone by the position."""
    shape = shape_of(layers=2, tokens=64)
    right, made = like_samples(shape), calibration_for(shape)
    here, there = (len(encode(codec_named("kvquant-3"), right, shape, Context(at, made))) for at in (POSITION, 7))
    assert here < 0.8 * there


def test_the_fit_weighs_by_gradients() -> None:
    """Levels are dense where gradients are large; without gradients all samples count alike."""
    shape = shape_of(layers=1, tokens=512, heads=1)
    values = np.random.default_rng(0).standard_normal(shape.sizes).astype(np.float32)
    frequencies = np.ones(4)
    plain = kvquant_fit.fit(Samples(shape.geometry, frequencies, values))
    weighed = kvquant_fit.fit(
        Samples(shape.geometry, frequencies, values, np.where(values > 0, 10.0, 0.1).astype(np.float32))
    )
    for pair in (0, 1):
        assert np.sum(plain["kvquant.edges4"][0, pair] > 0) in range(6, 10)
        assert np.sum(weighed["kvquant.edges4"][0, pair] > 0) > 10
    assert [beyond(n) for n in (8, 128, 1024)] == [1, 1, 6]


def test_levels_keep_the_deviation() -> None:
    """Q-Norm: decoded keys have the deviation of the original ones, though there are 4 levels alone."""
    shape = shape_of(layers=1, tokens=256)
    data = like_samples(shape)
    was, now = floats(data, shape), floats(decode(encoded("kvquant-2", data, shape), shape).block, shape)
    assert np.isclose(now[0, 0].std(), was[0, 0].std(), rtol=0.02)


def test_a_calibration_without_tables() -> None:
    """A calibration of another codec is refused by name."""
    shape = shape_of()
    bare = Calibration(shape.geometry, {"rope.frequencies": np.ones(2)})
    with pytest.raises(Unsupported, match="has no tensors of it"):
        encode(codec_named("kvquant-4"), noise(shape), shape, Context(0, bare))


@pytest.mark.parametrize("name", NAMES)
def test_impossible_payloads(name: str) -> None:
    """A payload with random bytes behind a header that fits is refused or gives finite values."""
    shape, codec = shape_of(layers=1, tokens=64), codec_named(name)
    data = like_samples(shape)
    good = encoded(name, data, shape)
    assert good[: HEADER.itemsize].view(HEADER)["codec"][0] != IDENTITY
    chance, context = np.random.default_rng(3), Context(POSITION, calibration_for(shape))
    refused = 0
    for _ in range(200):
        payload = good[HEADER.itemsize :].copy()
        where = chance.integers(0, len(payload), 20)
        payload[where] = chance.integers(0, 256, 20)
        try:
            found = decode(block._framed(codec, shape, Payload(payload, 1.0), context), shape)
            assert np.isfinite(floats(found.block, shape)).all()
        except CorruptRecord:
            refused += 1
    assert refused > 0


def test_heads_that_kivi_and_kvquant_refuse() -> None:
    """Channels that do not fill groups or bytes are refused with another codec's name."""
    with pytest.raises(Unsupported, match="head_dim 48 is not a multiple of 32; use int8"):
        encode(codec_named("kivi-2"), noise(shape_of(dim=48)), shape_of(dim=48))
    odd = shape_of(heads=1, dim=12)
    with pytest.raises(Unsupported, match="12 channels are not a multiple of 8"):
        encode(codec_named("kvquant-2"), noise(odd), odd)
