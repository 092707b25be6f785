"""Coding: which blocks of a namespace are encoded, and what counts as one of its blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs import USABLE
from tierd.codecs import block
from tierd.codecs.block import HEADER, Context
from tierd.codecs.calibration import FREQUENCIES, Calibration
from tierd.codecs.coding import Coding, coded_spec, coding_of
from tierd.codecs.int8 import Int8
from tierd.codecs.named import BY_NUMBER
from tierd.codecs.values import KVShape
from tierd.core.formats.block import KVGeometry, NamespaceSpec
from tierd.errors import ConfigError, CorruptRecord, Unsupported

GEOMETRY, TOKENS = KVGeometry(2, 2, 64, "float16"), 16
PLAIN = [codec.name for codec in USABLE]


def coding(name: str, geometry: KVGeometry = GEOMETRY) -> Coding:
    return coding_of(name, "", geometry=geometry, tokens_per_block=TOKENS)


def some(tokens: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(KVShape(GEOMETRY, tokens).values).astype(np.float16)
    return values.view(np.uint8)


@given(st.sampled_from(PLAIN), st.integers(1, TOKENS), st.integers(0, 5), st.integers(0, 99))
def test_every_block_comes_back(name: str, tokens: int, number: int, seed: int) -> None:
    """First and short blocks are exact; others have the codec's number, the block's position, and the
    length that `stored_bytes` says, none above most_bytes."""
    held, data = coding(name), some(tokens, seed)
    coded = held.encode(data, tokens=tokens, number=number)
    header, back = coded[: HEADER.itemsize].view(HEADER)[0], held.decode(coded, tokens=tokens)
    is_exact = number == 0 or tokens < TOKENS
    assert header["codec"] == (0 if is_exact else held.codec.number)
    assert is_exact or header["position"] == number * TOKENS
    off = np.abs(back.view(np.float16).astype(np.float32) - data.view(np.float16).astype(np.float32))
    assert off.max() <= header["error"] and (back == data).all() >= is_exact
    assert len(coded) <= held.stored_bytes(tokens, number=number) <= held.most_bytes
    least, most = held.codec.lengths(held.full)
    assert len(coded) == held.stored_bytes(tokens, number=number) or least < most


def test_a_block_that_is_not_finite_has_the_greatest_length() -> None:
    """Any block may be stored as it is: most_bytes holds it."""
    data = np.full(coding("int8").full.values, np.inf, np.float16).view(np.uint8)
    held = coding("int8")
    assert len(held.encode(data, tokens=TOKENS, number=1)) == held.most_bytes


@pytest.mark.parametrize(
    "other",
    [
        coding("rot-8-8"),
        coding("int8", KVGeometry(2, 2, 64, "bfloat16")),
        coding("int8", KVGeometry(2, 2, 64, "float16", "HND")),
        coding("int8", KVGeometry(4, 1, 64, "float16")),
    ],
    ids=["codec", "dtype", "layout", "shape"],
)
def test_blocks_of_another_coding_are_refused(other: Coding) -> None:
    """A valid block of another codec or shape is not decoded, even if it has as many bytes."""
    coded = other.encode(some(TOKENS, 1), tokens=TOKENS, number=1)
    with pytest.raises(CorruptRecord, match="wanted are codec 1"):
        coding("int8").decode(coded, tokens=TOKENS)
    with pytest.raises(CorruptRecord):
        coding("int8").decode(coding("int8").encode(some(8, 1), tokens=8, number=1), tokens=TOKENS)


CALIBRATED = Int8(1, is_calibrated=True)
"""int8, calibrated: only its blocks' headers differ."""


def test_blocks_of_another_calibration_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is decoded with the calibration that it names, or not at all."""
    one, other = (Calibration(GEOMETRY, {FREQUENCIES: np.array([x])}) for x in (1.0, 2.0))
    codec = CALIBRATED
    monkeypatch.setitem(BY_NUMBER, 1, codec)
    full = KVShape(GEOMETRY, TOKENS)
    held = Coding(codec, full, one)
    coded = held.encode(some(TOKENS, 1), tokens=TOKENS, number=3)
    assert len(held.decode(coded, tokens=TOKENS)) == full.block_bytes
    assert held.text == f"int8@{one.hash.hex()}" and coded_spec(SPEC, held).checked().codec == held.text
    with pytest.raises(Unsupported, match=one.hash.hex()):
        Coding(codec, full, other).decode(coded, tokens=TOKENS)
    foreign = block.encode(codec, some(TOKENS, 1), full, Context(0, other))
    with pytest.raises(Unsupported):
        held.decode(foreign, tokens=TOKENS)


SPEC = NamespaceSpec(model="m", tokens_per_block=TOKENS, block_bytes=1)


def test_the_namespace_of_a_coding() -> None:
    """It has the codec's name, the geometry, and room for a block with any values."""
    spec = coded_spec(SPEC, coding("rot-4-4"))
    assert (spec.codec, spec.geometry, spec.block_bytes) == ("rot-4-4", GEOMETRY, 64 + 2 * 2 * 16 * 2 * 64 * 2)


def test_calibrations_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing, superfluous or foreign calibration is an error that names the remedy."""
    mine, foreign = tmp_path / "mine", tmp_path / "foreign"
    Calibration(GEOMETRY, {FREQUENCIES: np.ones(1)}).save(mine)
    Calibration(KVGeometry(9, 2, 64, "float16"), {FREQUENCIES: np.ones(1)}).save(foreign)
    how = {"geometry": GEOMETRY, "tokens_per_block": TOKENS}
    with pytest.raises(ConfigError, match="leave out `calibration`"):
        coding_of("int8", str(mine), **how)
    monkeypatch.setattr("tierd.codecs.coding.codec_named", lambda _: CALIBRATED)
    assert coding_of("int8", str(mine), **how).calibration is not None
    with pytest.raises(ConfigError, match="give its file"):
        coding_of("int8", "", **how)
    with pytest.raises(ConfigError, match=r"\(9, 2, 64\).*make one for this model"):
        coding_of("int8", str(foreign), **how)
