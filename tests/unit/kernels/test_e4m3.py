"""Pages of e4m3 with scales: the meaning of their bytes, for the reference and the kernels alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import DECODES, PREFILLS, Case, Shape, check, made
from tierd.errors import InvalidArgument
from tierd.kernels import PagedBatch, paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.e4m3 import E4M3_MOST, NAN, VALUES, ScaledPages, decoded, encoded
from tierd.kernels.library import Emulated

Array = np.ndarray[Any, Any]
SHAPES = [shape for shape in (*DECODES, *PREFILLS) if shape.types[1] == "e4m3"]
SCATTERED = Shape(((1, 133), (1, 1), (1, 300)), types=("f16", "e4m3"))
ONE = np.ones(1, np.float32)


def every_value() -> Array:
    """Float32 [n, 1, 1]: each e4m3 value and each midpoint, one float32 step around both, and far values."""
    known = VALUES[: NAN - 1]
    middles = (known + VALUES[1:NAN]) / 2
    near = np.concatenate([known, middles, [448, 463.9, 464, 1e4, 3e38, np.inf]]).astype(np.float32)
    around = [near, *(np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf))]
    positive = np.concatenate(around)
    return np.concatenate([positive, -positive])[:, None, None].astype(np.float32)


def scaled(case: Case) -> ScaledPages:
    """The pages as the worker has them in numpy: as bytes."""
    return ScaledPages(list(case.pool.view(np.uint8)), np.stack([case.pages.k_scales, case.pages.v_scales]))


def test_bytes_mean_what_the_format_says() -> None:
    """All 256 bytes equal ml_dtypes; 0x7F and 0xFF are NaN."""
    stored = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(VALUES, stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert np.flatnonzero(np.isnan(VALUES)).tolist() == [0x7F, 0xFF]


def test_values_are_rounded_to_the_nearest_and_kept_in_range() -> None:
    """Around each value and tie the byte equals ml_dtypes's; beyond the range it saturates; NaN stays NaN."""
    values = every_value()
    stored = encoded(values, ONE)
    want = np.clip(values, -E4M3_MOST, E4M3_MOST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(stored, want)
    assert not np.isnan(decoded(stored, ONE)).any()
    assert decoded(encoded(np.array([[[1e9], [-np.inf], [np.nan]]], np.float32), ONE[None]), ONE[None])[
        0, :2
    ].tolist() == [[448.0], [-448.0]]
    assert np.isnan(decoded(encoded(np.full((1, 1, 1), np.nan, np.float32), ONE), ONE)).all()


def test_what_was_read_is_written_as_it_was() -> None:
    """Each byte, decoded and encoded with one scale, is unchanged, so a copy through values is exact."""
    stored = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)[:, None, None]
    for scale in (2.0**-9, 1.0, 0.3):
        scales = np.array([scale], np.float32)
        np.testing.assert_array_equal(encoded(decoded(stored, scales), scales), stored)


def test_torch_has_the_same_bytes() -> None:
    """torch's own type, and numpy without one, agree on every value, also beyond the range."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    values = every_value()
    stored = encoded(torch.from_numpy(values), ONE)
    np.testing.assert_array_equal(stored.view(torch.uint8).numpy(), encoded(values, ONE))
    np.testing.assert_array_equal(decoded(stored, ONE).numpy(), decoded(encoded(values, ONE), ONE))


def test_the_store_kernel_writes_the_same_bytes(library: Emulated) -> None:
    """The kernel stores two layers' tokens through slots exactly as `encoded` gives, and nothing beside."""
    rng = np.random.default_rng(2)
    pages = [np.full((2, 2, 16, 3, 64), 0x55, np.uint8) for _ in range(3)]
    scales = np.exp2(rng.integers(-9, 3, (2, 2, 3))).astype(np.float32)
    new = (100 * rng.standard_normal((2, 2, 5, 3, 64))).astype(np.float16)
    new[0, 0, 0, 0, :4] = [np.inf, -np.inf, 6e4, -6e4]
    slots = np.array([0, 17, -1, 47, 33])
    want = [page.copy() for page in pages]
    over = KernelAttention(library).over(ScaledPages(pages, scales), PagedBatch([0, 5], [48], [[0, 1, 2]]), slots=slots)
    for layer in range(2):
        over.store(layer, *new[layer])
        for token in (0, 1, 3, 4):
            page, at = divmod(slots[token], 16)
            want[page][layer, :, at] = encoded(new[layer, :, token], scales[layer])
    np.testing.assert_array_equal(np.stack(pages), np.stack(want))


@pytest.mark.parametrize("with_mass", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_give_what_the_reference_gives(library: Emulated, shape: Shape, with_mass: bool) -> None:
    """Decodes and prompts over a list of pages and their scales, also with page masses."""
    case = made(shape)
    check(case, KernelAttention(library)(case.q, scaled(case), case.batch, with_mass=with_mass))


def test_the_reference_takes_them_too() -> None:
    """With plain array operations the answer is that of the decoded values."""
    case = made(SHAPES[0])
    got = paged_attention(case.q.astype(np.float32), scaled(case), case.batch, with_mass=True)
    check(case, got)


def test_each_layer_has_its_scales(library: Emulated) -> None:
    """Each layer of a pass uses its own scales, and another pass uses other scales."""
    case, attention = made(SCATTERED), KernelAttention(library)
    one = scaled(case)
    both = [np.stack([page, page]) for page in one.stored]
    for more in (3.0, 5.0):
        scales = np.stack([one.scales * np.float32(more), one.scales])
        over = attention.over(ScaledPages(both, scales), case.batch, slots=np.full(3, -1))
        check(case, over.attend(1, case.q))
        np.testing.assert_allclose(
            over.attend(0, case.q).out.astype(np.float32),
            paged_attention(case.q.astype(np.float32), ScaledPages(one.stored, scales[0]), case.batch).out,
            atol=2e-2,
        )


def test_wide_queries_are_rounded_to_16_bits(library: Emulated) -> None:
    """float32 queries attend to e4m3 pages, and the answer is float32."""
    case = made(SCATTERED)
    got = KernelAttention(library)(case.q.astype(np.float32), scaled(case), case.batch)
    assert got.out.dtype == np.float32
    check(case, got)


def test_what_has_no_such_scales_is_named(library: Emulated) -> None:
    """Pages of wider values, and scales of other heads or another type, are refused before any launch."""
    case, attention = made(SCATTERED), KernelAttention(library)
    pages = scaled(case)
    with pytest.raises(InvalidArgument, match=r"pages\[0\]: has type f16; pages with scales are of e4m3"):
        attention(case.q, replace(pages, stored=[page.astype(np.float16) for page in pages.stored]), case.batch)
    for scales in (pages.scales[:, :1], pages.scales.astype(np.float64), np.stack([pages.scales] * 2)):
        with pytest.raises(InvalidArgument, match=r"pages\.scales: float.*take float32 \[1, 2, 2\]"):
            attention(case.q, replace(pages, scales=scales), case.batch)
