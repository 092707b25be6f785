"""Products with a basis, rows and multiples: the same in numpy, in C++ and on tiles, within the bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled import NEEDS_LIBRARY, check_library
from tests.depth import count
from tests.unit.codecs.calibrated import POSITION, calibration_for, samples
from tests.unit.codecs.test_loops import LEVELS, at_each_level
from tierd.codecs import loops
from tierd.codecs.block import Context, decode, encode
from tierd.codecs.multiples import CENTRE, ESCAPE, MOST_SHIFT, SYMBOLS, Coding, Split, join, split
from tierd.codecs.named import BY_NUMBER, TRANSFORMS
from tierd.codecs.product import FARTHEST, Basis, floats_of_patterns, patterns_of
from tierd.codecs.rope import rotate
from tierd.codecs.rows import Origin, raw_of_rows, rows_of
from tierd.codecs.values import DTYPES, LAYOUTS, KVShape, bytes_of, floats_of, raw_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord, Unsupported

pytestmark = NEEDS_LIBRARY
SIZES = st.sampled_from((1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100))


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """The library, at its best level again after each test."""
    check_library()
    assert loops.library is not None
    yield
    loops.library.tierd_use(LEVELS[-1])


class Case(NamedTuple):
    """basis: [rank or more, n]. rows: float32 [tokens, n]."""

    basis: Basis
    rows: np.ndarray
    rank: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Bases and rows of any sizes."""
    coefficients, n, tokens = (draw(SIZES) for _ in range(3))
    chance = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    forward, inverse = (
        patterns_of(chance.standard_normal((coefficients, n), dtype=np.float32) * draw(st.sampled_from((1e-3, 1.0))))
        for _ in range(2)
    )
    rows = chance.standard_normal((tokens, n), dtype=np.float32) * draw(st.sampled_from((1.0, 1e-20, 1e-39, 1e4)))
    return Case(Basis(forward, inverse), rows, draw(st.integers(1, coefficients)))


def multiples(chance: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Small ones, and some as large as they may be."""
    q = chance.integers(-300, 300, shape)
    far = chance.random(shape) < 0.05
    q[far] = chance.integers(-FARTHEST, FARTHEST + 1, int(far.sum()))
    return q.astype(np.int16)


@settings(max_examples=count(test=60, nightly=3_000, weekly=30_000), deadline=None)
@given(case=cases())
def test_multiples_are_the_nearest(case: Case) -> None:
    """Every form finds the multiples next to the exact coefficients, but for rounding of rows and sums."""
    basis, rows, rank = case
    forward = floats_of_patterns(basis.forward)[:rank].astype(np.float64)
    exact, sizes = forward @ rows.T.astype(np.float64), np.abs(forward) @ np.abs(rows.T)
    step = np.float32(max(np.abs(exact).max() / 1000, 1e-30))
    for found in at_each_level(lambda: basis.multiples(rows, rank, step)):
        assert isinstance(found, np.ndarray) and found.dtype == np.int16 and found.shape == exact.shape
        off = np.abs(found - exact / step)
        assert (off <= 0.501 + (sizes * (2.0**-8 + 1e-4) + len(rows[0]) * 2.0**-126) / step).all()


@settings(max_examples=count(test=60, nightly=3_000, weekly=30_000), deadline=None)
@given(case=cases(), seed=st.integers(0, 1 << 30), step=st.sampled_from((1e-3, 1.0, 1e-30)))
def test_values_are_within_the_slack(case: Case, seed: int, step: float) -> None:
    """Values of given multiples, large ones too, are the exact sums within the declared slack, and the
    declared error is a bound for all forms."""
    basis, rows, rank = case
    q = multiples(np.random.default_rng(seed), (rank, len(rows)))
    size = np.float32(step)
    exact = q.T.astype(np.float64) @ floats_of_patterns(basis.inverse)[:rank] * float(size)
    values = list(at_each_level(lambda: basis.values(q, size)))
    offs = list(at_each_level(lambda: basis.off(q, size, rows)))
    for found in values:
        assert isinstance(found, np.ndarray)
        for off in offs:
            assert np.abs(found - exact).max() <= off.slack  # type: ignore[attr-defined]
            assert np.abs(found - rows).max() <= off.largest + off.slack  # type: ignore[attr-defined]
            assert off.top == np.abs(rows).max()  # type: ignore[attr-defined]


def test_far_coefficients_are_refused() -> None:
    """Coefficients beyond the farthest multiple, or that are not finite, give no multiples in any form."""
    basis = Basis(patterns_of(np.eye(3, 40, dtype=np.float32)), patterns_of(np.eye(3, 40, dtype=np.float32)))
    rows = np.zeros((5, 40), np.float32)
    for value, fits in ((32767.0, True), (-32767.0, True), (32800.0, False), (-3e38, False), (np.nan, False)):
        rows[4, 2] = np.float32(value)
        with np.errstate(all="ignore"):
            step = np.float32(1) if abs(value) > 32767 or np.isnan(value) else np.float32(1.01)
            assert [found is not None for found in at_each_level(lambda s=step: basis.multiples(rows, 3, s))] == [
                fits
            ] * (1 + len(LEVELS))


@st.composite
def codings(draw: st.DrawFn) -> tuple[np.ndarray, Coding]:
    """Multiples, and how they are coded."""
    coefficients, tokens = draw(st.integers(1, 40)), draw(st.sampled_from((1, 7, 8, 31, 32, 33, 64, 70)))
    chance = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    known = np.where(chance.random((3, SYMBOLS)) < 0.9, np.uint8(255), np.uint8(0))
    known[:, ESCAPE] = 255
    shifts = chance.integers(0, draw(st.integers(1, MOST_SHIFT + 1)), coefficients).astype(np.uint8)
    coding = Coding(chance.integers(0, 3, coefficients).astype(np.uint8), shifts, known)
    near = np.rint(chance.standard_normal((coefficients, tokens)) * 20 * 2.0 ** shifts[:, None])
    q = np.clip(near, -FARTHEST, FARTHEST).astype(np.int16)
    q[chance.random(q.shape) < 0.02] = draw(st.sampled_from((FARTHEST, -FARTHEST, 0)))
    return q, coding


@settings(max_examples=count(test=80, nightly=5_000, weekly=50_000), deadline=None)
@given(case=codings())
def test_multiples_come_back(case: tuple[np.ndarray, Coding]) -> None:
    """Symbols, low bits and escapes are the same in every form, and give the multiples again."""
    q, coding = case
    parts = list(at_each_level(lambda: tuple(part.tobytes() for part in split(q, coding))))
    assert parts == [parts[0]] * len(parts)
    found = split(q, coding)
    near = np.abs(q >> coding.shifts[:, None]) <= CENTRE
    assert (found.symbols[~near] == ESCAPE).all() and (coding.known[coding.tables[:, None], found.symbols] > 0).all()
    for again in at_each_level(lambda: join(found, coding)):
        assert isinstance(again, np.ndarray) and np.array_equal(again, q)


@settings(max_examples=count(test=80, nightly=5_000, weekly=50_000), deadline=None)
@given(case=codings(), data=st.data())
def test_any_parts_give_multiples_or_a_refusal(case: tuple[np.ndarray, Coding], data: st.DataObject) -> None:
    """Damaged symbols, bits and escapes give the same multiples, or the same refusal, in every form."""
    q, coding = case
    found = split(q, coding)
    symbols, low, escapes = found.symbols.copy(), found.low, found.escapes.copy()
    chance = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    for place in data.draw(st.lists(st.integers(0, 1 << 30), max_size=3)):
        symbols.reshape(-1)[place % symbols.size] = chance.integers(0, SYMBOLS)
        if len(escapes):
            escapes[place % len(escapes)] = chance.integers(-32768, 32768)
    if data.draw(st.booleans()):
        escapes = np.append(escapes, np.int16(5)) if data.draw(st.booleans()) else escapes[:-1]

    def joined() -> bytes | str:
        try:
            return join(Split(symbols, low, escapes), coding).tobytes()
        except CorruptRecord:
            return "refused"

    results = list(at_each_level(joined))
    assert results == [results[0]] * len(results)


@st.composite
def shapes(draw: st.DrawFn) -> KVShape:
    """Shapes whose groups are narrow and few."""
    sizes = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from((16, 32, 48, 24))))
    geometry = KVGeometry(*sizes, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS)))
    return KVShape(geometry, draw(st.sampled_from((1, 5, 16, 33, 128))))


@settings(max_examples=count(test=40, nightly=2_000, weekly=20_000), deadline=None)
@given(shape=shapes(), pairs=st.integers(0, 12), seed=st.integers(0, 1 << 30))
def test_rows_are_the_same(shape: KVShape, pairs: int, seed: int) -> None:
    """Rows of a block, and a block of rows, have the same bits in every form, however many channels RoPE
    turns; and they come back."""
    chance = np.random.default_rng(seed)
    data = rounded(chance.standard_normal(shape.values, dtype=np.float32), shape.geometry.dtype).tobytes()
    raw, width = raw_of(data, shape), shape.geometry.head_dim * 2
    mean = chance.standard_normal((shape.values // shape.tokens // width, width), dtype=np.float32)
    origin = Origin(mean, 77, 10.0 ** -np.arange(min(pairs, shape.geometry.head_dim // 2), dtype=np.float64))
    rows = [np.copy(each) for each in at_each_level(lambda: rows_of(raw, shape, origin))]  # type: ignore[call-overload]
    assert all(each.tobytes() == rows[0].tobytes() for each in rows)
    blocks = list(at_each_level(lambda: bytes_of(raw_of_rows(rows[0].copy(), shape, origin), shape).tobytes()))
    assert blocks == [blocks[0]] * len(blocks)
    again = floats_of(np.frombuffer(blocks[0], np.uint16), shape.geometry.dtype)  # type: ignore[call-overload]
    assert np.allclose(again, floats_of(np.frombuffer(data, np.uint16), shape.geometry.dtype), rtol=0.01, atol=0.01)


@settings(max_examples=count(test=12, nightly=500, weekly=5_000), deadline=None)
@given(shape=shapes(), seed=st.integers(0, 1 << 30), size=st.sampled_from((1.0, 30.0, 1e-3, 1e-39)))
def test_blocks_of_other_machines(shape: KVShape, seed: int, size: float) -> None:
    """A block that one form encoded is decoded within its declared error by every other form."""
    chance = np.random.default_rng(seed)
    made = calibration_for(shape)
    values = chance.standard_normal(shape.sizes, dtype=np.float32) * np.float32(size)
    if size == 1.0:
        first = samples(KVGeometry(*shape.sizes[:1], *shape.sizes[3:], "bfloat16")).values[:, :, : shape.tokens]
        values = np.concatenate((first, values[:, :, first.shape[2] :]), axis=2)
        values[:, 0] = rotate(values[:, 0], POSITION, made.frequencies)
    raw = rounded(np.ascontiguousarray(values), shape.geometry.dtype)
    data = bytes_of(raw, shape).tobytes()
    for codec in (TRANSFORMS[0], TRANSFORMS[2]):
        for coded in list(at_each_level(lambda c=codec: encode(c, data, shape, Context(POSITION, made)))):
            for found in at_each_level(lambda d=coded: decode(d, BY_NUMBER, {made.hash: made})):
                back = floats_of(found.block.view(np.uint16), shape.geometry.dtype)  # type: ignore[attr-defined]
                off = np.abs(back - floats_of(np.frombuffer(data, np.uint16), shape.geometry.dtype)).max()
                assert off <= found.error  # type: ignore[attr-defined]


def test_tensors_of_other_sizes_are_refused() -> None:
    """Tensors whose types or sizes do not fit each other are refused by name, before a loop reads them."""
    shape = KVShape(KVGeometry(1, 2, 32, "bfloat16"), 16)
    made = calibration_for(shape)
    tensors = made.tensors
    for name, other in (
        ("forward", floats_of_patterns(tensors["transform.forward"])),
        ("inverse", tensors["transform.inverse"][:, :-1]),
        ("shifts", tensors["transform.shifts"] + np.uint8(13)),
        ("choices", tensors["transform.choices"] | np.uint8(64)),
        ("ranks", tensors["transform.ranks"] + np.uint16(500)),
        ("frequencies", tensors["transform.frequencies"][:, :-1]),
        ("frequencies", np.concatenate([tensors["transform.frequencies"]] * 2)),
    ):
        bad = replace(made, tensors={**tensors, f"transform.{name}": other})
        with pytest.raises(Unsupported, match=f"calibration {bad.hash.hex()} has tensors of other sizes or types"):
            encode(TRANSFORMS[0], bytes(shape.block_bytes), shape, Context(0, bad))
