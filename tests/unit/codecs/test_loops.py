"""The codecs' loops in C++ give the same bytes as their plain forms, and touch nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled import NEEDS_LIBRARY, check_library
from tests.depth import count
from tierd.codecs import loops, rans
from tierd.codecs.block import NO_CONTEXT, Codec, decode, encode
from tierd.codecs.named import BY_NUMBER, codec_named
from tierd.codecs.values import DTYPES, LAYOUTS, KVShape, Raw, raw_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord, Unsupported

pytestmark = NEEDS_LIBRARY
LEVELS = (0, 1, 2, 3)
"""Instruction sets; a machine that lacks one uses the best one below."""
NAMES = ("int8", "rot-8-8", "rot-8-4", "rot-4-4", "int3", "lossless")
ODD = (0.0, -0.0, 1e4, -6e4, 1e-40, 3e38, -3e38, 1e-8, np.inf, np.nan)
each_codec = pytest.mark.parametrize("codec", [codec_named(name) for name in NAMES], ids=NAMES)


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """The library, at its best level again after each test."""
    check_library()
    assert loops.library is not None
    yield
    loops.library.tierd_use(LEVELS[-1])


@st.composite
def blocks(draw: st.DrawFn) -> tuple[bytes, KVShape]:
    """Blocks of any shape, with ordinary or odd values."""
    geometry = KVGeometry(
        *(draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.sampled_from((16, 32, 48, 64, 128, 256)))),
        *(draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))),
    )
    shape = KVShape(geometry, draw(st.sampled_from((1, 2, 15, 16, 17, 40, 127, 128, 130, 257))))
    chance = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    values = chance.standard_normal(shape.values) * draw(st.sampled_from((1.0, 0.0, 1e-4, 1e-20, 1e-39, 300.0)))
    for place, value in draw(st.lists(st.tuples(st.integers(0, 1 << 30), st.sampled_from(ODD)), max_size=6)):
        values[place % len(values)] = value
    with np.errstate(over="ignore"):
        return rounded(values.astype(np.float32), geometry.dtype).tobytes(), shape


def at_each_level(work: object) -> Iterator[object]:
    """Results of work in numpy, and then at each level."""
    library, loops.library = loops.library, None
    assert library is not None and callable(work)
    try:
        yield work()
    finally:
        loops.library = library
    for level in LEVELS:
        library.tierd_use(level)
        yield work()


@each_codec
@settings(max_examples=count(test=25, nightly=3_000, weekly=30_000), deadline=None)
@given(case=blocks())
def test_loops_give_the_bytes_of_the_plain_forms(codec: Codec, case: tuple[bytes, KVShape]) -> None:
    """Encoded and decoded blocks are the same at each level as plainly."""
    block, shape = case
    try:
        codec.check(shape)
    except Unsupported:
        return
    plain, *others = at_each_level(lambda: encode(codec, block, shape).tobytes())
    assert others == [plain] * len(LEVELS)
    plain, *others = at_each_level(lambda coded=plain: decode(coded, BY_NUMBER).block.tobytes())
    assert others == [plain] * len(LEVELS)


def decoded(codec: Codec, payload: np.ndarray, shape: KVShape) -> bytes | str:
    """The values, or the refusal."""
    try:
        raw: Raw = codec.decode(payload, shape, NO_CONTEXT)
    except CorruptRecord:
        return "refused"
    return np.ascontiguousarray(raw).tobytes()


@each_codec
@settings(max_examples=count(test=25, nightly=5_000, weekly=50_000), deadline=None)
@given(case=blocks(), data=st.data())
def test_no_payload_leads_outside(codec: Codec, case: tuple[bytes, KVShape], data: st.DataObject) -> None:
    """Payloads of a possible length with any bytes give some values, or are refused in every form alike."""
    block, shape = case
    try:
        codec.check(shape)
    except Unsupported:
        return
    good = codec.encode(raw_of(block, shape), shape, NO_CONTEXT).data if codec.is_exact else None
    payload = np.random.default_rng(len(block)).integers(0, 256, codec.lengths(shape).most, dtype=np.uint8)
    if good is not None:
        payload = good[: data.draw(st.integers(codec.lengths(shape).least, len(good)))].copy()
    for place in data.draw(st.lists(st.integers(0, 1 << 30), max_size=4)):
        payload[place % len(payload)] ^= 1 << place % 8
    with np.errstate(all="ignore"):
        found = list(at_each_level(lambda: decoded(codec, payload, shape)))
    assert len({"refused" if result == "refused" else "values" for result in found}) == 1
    if codec.is_exact:
        assert found == [found[0]] * len(found)


@settings(max_examples=count(test=60, nightly=5_000, weekly=50_000), deadline=None)
@given(data=st.data())
def test_streams_of_rans(data: st.DataObject) -> None:
    """Streams are the same in every form, and so is what becomes of any damaged one."""
    size, run = (
        data.draw(st.sampled_from((1, 5, 4096, 5000, 32_768, 40_003))),
        data.draw(st.sampled_from((1, 16, 48, 256))),
    )
    chance = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    tables, most = data.draw(st.integers(1, 4)), data.draw(st.sampled_from((1, 2, 3, 30, 256)))
    symbols = np.minimum(chance.geometric(data.draw(st.sampled_from((0.03, 0.4, 0.999))), size) - 1, most - 1).astype(
        np.uint8
    )
    which = chance.integers(0, tables, -(-size // run)).astype(np.uint8)
    counts = np.zeros((tables, most), np.int64)
    np.add.at(counts, (np.repeat(which, run)[:size], symbols), 1)
    frequencies = rans.frequencies_of(counts)
    plain, *others = at_each_level(lambda: rans.encode(symbols, frequencies, which, run).tobytes())
    assert others == [plain] * len(LEVELS) and isinstance(plain, bytes)
    bad = np.frombuffer(plain, np.uint8)[: data.draw(st.integers(0, len(plain)))].copy()
    for place in data.draw(st.lists(st.integers(0, 1 << 30), max_size=3)):
        if len(bad):
            bad[place % len(bad)] ^= 1 << place % 8

    def again() -> bytes | str:
        try:
            return rans.decode(bad, np.empty(size, np.uint8), frequencies, which, run).tobytes()
        except CorruptRecord:
            return "refused"

    found = list(at_each_level(again))
    assert found == [found[0]] * len(found)


def test_the_largest_value() -> None:
    """The scan finds the largest pattern without its sign wherever it lies."""
    for size in (1, 7, 64, 65, 1000):
        for place in {0, size // 2, size - 1}:
            values = np.random.default_rng(size).integers(0, 0x4000, size, dtype=np.uint16) | 0x8000
            values[place] = 0xFF80
            assert list(at_each_level(lambda values=values: loops.largest(values))) == [0x7F80] * (1 + len(LEVELS))
