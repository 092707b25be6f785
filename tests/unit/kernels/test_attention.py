"""The kernels behind the reference's signature: pages where they lie, tables as lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import DECODES, PREFILLS, Shape, check, made
from tierd.errors import InvalidArgument
from tierd.kernels.attention import KernelAttention
from tierd.kernels.library import Emulated

SCATTERED = Shape(((1, 133), (1, 1), (1, 300)), types=("f16", "f16"))
PLAIN = [shape for shape in (*DECODES, *PREFILLS) if shape.types[1] != "e4m3"]
"""A list of pages has no scales."""


@pytest.mark.parametrize("with_mass", [False, True])
@pytest.mark.parametrize("shape", PLAIN, ids=str)
def test_it_is_the_reference(library: Emulated, shape: Shape, with_mass: bool) -> None:
    """Decodes and prompts, windows with sinks and subsets, with page masses too: what the reference gives."""
    case = made(shape)
    check(case, KernelAttention(library)(case.q, case.pool, case.batch, with_mass=with_mass))


def test_pages_lie_anywhere(library: Emulated) -> None:
    """Pages that are parts of larger ones, at odd distances and in any order, are read where they are."""
    case = made(SCATTERED)
    room = np.full((4 * case.pool.nbytes,), 0xFF, np.uint8)
    place, pages = -room.ctypes.data % 16, []
    for page in case.pool:
        view = room[place : place + page.nbytes].view(page.dtype).reshape(page.shape)
        view[:] = page
        view.flags.writeable = False
        pages.append(view)
        place += page.nbytes + 16 * (1 + len(pages) % 3)
    check(case, KernelAttention(library)(case.q, pages, case.batch))


def test_queries_of_another_type_are_rounded(library: Emulated) -> None:
    """float32 queries attend to f16 pages, and the answer is float32."""
    case = made(SCATTERED)
    got = KernelAttention(library)(case.q.astype(np.float32), case.pool, case.batch)
    assert got.out.dtype == np.float32
    check(case, got)


def test_a_row_sees_what_lies_before_it(library: Emulated) -> None:
    """Rows of a prompt as decodes give what they give as a prefill."""
    case = made(Shape(((7, 40), (3, 3)), types=("f16", "f16")))
    attention = KernelAttention(library)
    whole, rows = (attention(case.q, case.pool, case.batch, with_mass=each) for each in (False, True))
    np.testing.assert_allclose(rows.lse, whole.lse, atol=1e-5)
    np.testing.assert_allclose(rows.out, whole.out, atol=2e-3)


def test_what_no_kernel_takes_is_named(library: Emulated) -> None:
    """Pages of two layouts, of float32, none at all, and lengths beyond a table are refused by the argument's name."""
    case, attention = made(SCATTERED), KernelAttention(library)
    with pytest.raises(InvalidArgument, match=r"pages\[1\]: f16 .* unlike the others"):
        attention(case.q, [case.pool[0], case.pool[1][:, :8], *case.pool[2:]], case.batch)
    with pytest.raises(InvalidArgument, match=r"float32.*|f32; the kernel takes bf16 or f16"):
        attention(case.q, case.pool.astype(np.float32), case.batch)
    with pytest.raises(InvalidArgument, match="pages: there are none"):
        attention(case.q, [], case.batch)
    with pytest.raises(InvalidArgument, match=r"kv_lens\[0\]: 999"):
        attention(case.q, case.pool, replace(case.batch, kv_lens=[999, 1, 300]))
