"""Codec transform: rates, profiles, its calibration, and payloads that are damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.codecs.calibrated import POSITION, TOKENS, samples
from tierd.codecs.block import Codec, Context, decode, encode
from tierd.codecs.calibration import Calibration
from tierd.codecs.fit import make
from tierd.codecs.named import BY_NUMBER, codec_named
from tierd.codecs.rope import rotate
from tierd.codecs.transform_fit import group_width
from tierd.codecs.values import KVShape, floats_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord, Unsupported

GEOMETRY = KVGeometry(2, 2, 32, "bfloat16")
SHAPE = KVShape(GEOMETRY, TOKENS)
PROFILES = {"transform-3": 3.0, "transform-2": 2.0, "transform-1": 1.0, "transform-0.5": 0.5}
each_profile = pytest.mark.parametrize("name", PROFILES)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return make(samples(GEOMETRY))


def like_the_samples(position: int = POSITION) -> np.ndarray:
    """A block of the calibration's own values, keys at their positions."""
    values = samples(GEOMETRY).values.copy()
    values[:, 0] = rotate(values[:, 0], position, samples(GEOMETRY).frequencies)
    return rounded(values, "bfloat16")


def come_back(codec: Codec, raw: np.ndarray, context: Context) -> tuple[float, float]:
    """Bits per value, and the root mean square error."""
    assert context.calibration is not None
    coded = encode(codec, raw, SHAPE, context)
    found = decode(coded, BY_NUMBER, {context.calibration.hash: context.calibration})
    off = floats_of(found.block.view(np.uint16), "bfloat16") - floats_of(raw.reshape(-1), "bfloat16")
    assert found.codec == codec.number and np.abs(off).max() <= found.error
    return 8 * len(coded) / SHAPE.values, float(np.sqrt((off**2).mean()))


@each_profile
def test_a_profile_has_its_rate(name: str, calibration: Calibration) -> None:
    """Values like the calibration's take the bits of the profile's name, header included."""
    bits, _ = come_back(codec_named(name), like_the_samples(), Context(POSITION, calibration))
    assert PROFILES[name] - 0.1 < bits < PROFILES[name] + 0.1


def test_more_bits_less_error(calibration: Calibration) -> None:
    """A profile with more bits has less error."""
    errors = [come_back(codec_named(name), like_the_samples(), Context(POSITION, calibration))[1] for name in PROFILES]
    assert errors == sorted(errors)


def test_the_declared_error_is_near(calibration: Calibration) -> None:
    """The declared error is at most twice the largest one."""
    coded = encode(codec_named("transform-2"), like_the_samples(), SHAPE, Context(POSITION, calibration))
    found = decode(coded, BY_NUMBER, {calibration.hash: calibration})
    off = np.abs(
        floats_of(found.block.view(np.uint16), "bfloat16") - floats_of(like_the_samples().reshape(-1), "bfloat16")
    )
    assert found.error <= 2 * off.max()


def test_keys_are_turned_back(calibration: Calibration) -> None:
    """A wrong position gives keys that the calibration does not know: they take more bits."""
    right, wrong = (
        come_back(codec_named("transform-2"), like_the_samples(), Context(p, calibration))[0] for p in (POSITION, 7)
    )
    assert wrong > 1.1 * right


def test_values_that_matter_have_less_error() -> None:
    """A channel whose gradients are large comes back with less error than before."""
    plain, asked = samples(GEOMETRY), samples(GEOMETRY)
    assert asked.gradients is not None
    asked.gradients[0, 1, :, 0, 5] *= 100
    errors = []
    for each in (plain, asked):
        made = make(each)
        coded = encode(codec_named("transform-1"), like_the_samples(), SHAPE, Context(POSITION, made))
        found = floats_of(
            decode(coded, BY_NUMBER, {made.hash: made}).block.view(np.uint16).reshape(SHAPE.sizes), "bfloat16"
        )
        errors.append(np.abs(found - floats_of(like_the_samples(), "bfloat16"))[0, 1, :, 0, 5].mean())
    assert errors[1] < errors[0] / 4


def test_without_gradients() -> None:
    """Queries and output weights stand in for gradients: the head with large ones has less error."""
    some = samples(GEOMETRY, with_gradients=False)
    assert some.outputs is not None
    some.outputs[0, :, :64] *= 100
    made = make(some)
    bits, _ = come_back(codec_named("transform-1"), like_the_samples(), Context(POSITION, made))
    assert 0.9 < bits < 1.1
    coded = encode(codec_named("transform-1"), like_the_samples(), SHAPE, Context(POSITION, made))
    found = floats_of(
        decode(coded, BY_NUMBER, {made.hash: made}).block.view(np.uint16).reshape(SHAPE.sizes), "bfloat16"
    )
    off = ((found - floats_of(like_the_samples(), "bfloat16")) ** 2).mean(axis=(2, 4)) / some.values.var(axis=2).mean(
        axis=-1
    )
    assert off[0, 1, 0] < off[1, 1, 1] / 4 and off[0, 0, 0] < off[1, 0, 1] / 4


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "width"), [(6, 2, 64, 1536), (32, 8, 128, 2048), (1, 1, 2048, 2048), (5, 7, 128, 1792)]
)
def test_groups_divide_a_token(layers: int, heads: int, dim: int, width: int) -> None:
    """A group has whole heads, at most 2,048 values, and all groups are equal."""
    assert group_width(KVGeometry(layers, heads, dim, "bfloat16")) == width


def test_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in several groups come back in their places."""
    monkeypatch.setattr("tierd.codecs.transform_fit.WIDTH", 64)
    made = make(samples(GEOMETRY))
    assert made.tensors["transform.mean"].shape == (4, 64)
    _, off = come_back(codec_named("transform-3"), like_the_samples(), Context(POSITION, made))
    assert off < 0.5 * samples(GEOMETRY).values.std()


def test_a_calibration_that_does_not_fit(calibration: Calibration) -> None:
    """A missing calibration, one of another shape, one without the tensors, and an unknown hash are
    refused by name."""
    codec, raw = codec_named("transform-1"), like_the_samples()
    with pytest.raises(Unsupported, match="codec transform-1: calibration of the namespace is not here"):
        encode(codec, raw, SHAPE)
    other = make(samples(KVGeometry(1, 2, 32, "bfloat16")))
    with pytest.raises(Unsupported, match="is for layers, heads, head_dim 1, 2, 32"):
        encode(codec, raw, SHAPE, Context(0, other))
    less = replace(calibration, tensors={k: v for k, v in calibration.tensors.items() if k != "transform.steps"})
    with pytest.raises(Unsupported, match=f"calibration {less.hash.hex()} has no steps"):
        encode(codec, raw, SHAPE, Context(0, less))
    coded = encode(codec, raw, SHAPE, Context(0, calibration))
    with pytest.raises(Unsupported, match=f"calibration {calibration.hash.hex()} is not here"):
        decode(coded, BY_NUMBER, {other.hash: other})


def test_damaged_payloads(calibration: Calibration) -> None:
    """A payload with any byte changed or cut gives values or CorruptRecord: never another error."""
    codec, shape = codec_named("transform-2"), KVShape(GEOMETRY, 9)
    raw = like_the_samples()[:, :, :9].copy()
    raw[0, 1, 4, 0, 3] = 0x4640  # 12288, an escape
    context = Context(POSITION, calibration)
    good = codec.encode(raw, shape, context).data
    assert good[4] > 0
    chance, refused = np.random.default_rng(0), 0
    for at in (*range(60), *chance.integers(60, len(good), 100)):
        bad = good.copy()
        bad[at] ^= 1 << chance.integers(8)
        for payload in (bad, good[: max(12, at)]):
            try:
                codec.decode(payload, shape, context)
            except CorruptRecord:
                refused += 1
    assert refused > 200


@pytest.mark.parametrize("value", [0x4974, 0x7E00])
def test_far_values_are_kept(calibration: Calibration, value: int) -> None:
    """A block with a value that no code reaches, as 1e6 or 4e37, is kept as it is."""
    raw = like_the_samples()
    raw[0, 0, 0, 0, 0] = value
    found = decode(encode(codec_named("transform-1"), raw, SHAPE, Context(0, calibration)), BY_NUMBER)
    assert (found.codec, found.error, found.block.tobytes()) == (0, 0.0, raw.tobytes())
