"""The kernels behind the reference's signature: pages at any place, tables as lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import DECODES, PREFILLS, Shape, check, made
from tierd.errors import InvalidArgument
from tierd.kernels import attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.library import Emulated
from tierd.kernels.reference import paged_attention

SCATTERED = Shape(((1, 133), (1, 1), (1, 300)), types=("f16", "f16"))
PLAIN = [shape for shape in (*DECODES, *PREFILLS) if shape.types[1] != "e4m3"]
"""A list of pages has no scales."""


@pytest.mark.parametrize("with_mass", [False, True])
@pytest.mark.parametrize("shape", PLAIN, ids=str)
def test_it_is_the_reference(library: Emulated, shape: Shape, with_mass: bool) -> None:
    """Decodes and prompts, windows with sinks, subsets and page masses equal the reference."""
    case = made(shape)
    check(case, KernelAttention(library)(case.q, case.pool, case.batch, with_mass=with_mass))


def test_pages_lie_anywhere(library: Emulated) -> None:
    """Pages within larger arrays, at odd distances and in any order, are read in place."""
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


@pytest.mark.parametrize("ones", range(4))
def test_decodes_go_beside_a_prompt(library: Emulated, ones: int) -> None:
    """Sequences of one row before, and behind, a chunk of a prompt attend as the reference does."""
    shape = Shape((*[(1, 133)] * ones, (9, 40), (1, 5), (3, 70)), types=("f16", "f16"))
    case = made(shape)
    check(case, KernelAttention(library)(case.q, case.pool, case.batch))


def test_a_row_sees_what_lies_before_it(library: Emulated) -> None:
    """A prompt's rows give the same as decodes and as a prefill."""
    case = made(Shape(((7, 40), (3, 3)), types=("f16", "f16")))
    attention = KernelAttention(library)
    whole, rows = (attention(case.q, case.pool, case.batch, with_mass=each) for each in (False, True))
    np.testing.assert_allclose(rows.lse, whole.lse, atol=1e-5)
    np.testing.assert_allclose(rows.out, whole.out, atol=2e-3)


def test_masses_of_layers_are_added_before_they_are_read(library: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass adds the page masses of its layers where kernels run, and copies them to the host once."""
    case = made(Shape(((7, 40), (1, 133), (0, 20)), types=("f16", "f16")))
    layers = np.stack([case.pool, case.pool[:, ::-1], case.pool], axis=1)
    over = KernelAttention(library).over(list(layers), case.batch, slots=np.full(8, -1))
    wanted = [
        paged_attention(q, layers[:, layer], case.batch, with_mass=True).mass for layer, q in enumerate([case.q] * 3)
    ]
    reads: list[Any] = []
    monkeypatch.setattr(attention, "to_device", lambda array, place: reads.append(place) or array)
    for layer in range(3):
        assert over.attend(layer, case.q, with_mass=True).mass is None
    assert reads == []
    for i, mass in enumerate(over.masses(case.q)):
        np.testing.assert_allclose(mass, sum(one[i] for one in wanted if one), rtol=2e-3, atol=2e-3)
    assert reads == ["cpu"]


def test_what_no_kernel_takes_is_named(library: Emulated) -> None:
    """Pages of two layouts, of float32, none at all, and lengths beyond a table are refused by name."""
    case, attention = made(SCATTERED), KernelAttention(library)
    with pytest.raises(InvalidArgument, match=r"pages\[1\]: f16 .* unlike the others"):
        attention(case.q, [case.pool[0], case.pool[1][:, :8], *case.pool[2:]], case.batch)
    with pytest.raises(InvalidArgument, match=r"float32.*|f32; the kernel takes bf16 or f16"):
        attention(case.q, case.pool.astype(np.float32), case.batch)
    with pytest.raises(InvalidArgument, match="pages: there are none"):
        attention(case.q, [], case.batch)
    with pytest.raises(InvalidArgument, match=r"kv_lens\[0\]: 999"):
        attention(case.q, case.pool, replace(case.batch, kv_lens=[999, 1, 300]))


def test_entries_behind_a_sequence_may_be_anything(library: Emulated) -> None:
    """Table entries beyond a sequence's length are ignored, as in the reference."""
    case = made(SCATTERED)
    wild = replace(case.batch, tables=[[*table, 10**9, -7] for table in case.batch.tables])
    for with_mass in (False, True):
        check(case, KernelAttention(library)(case.q, case.pool, wild, with_mass=with_mass))


def test_what_sees_all_may_be_as_long_as_it_likes(library: Emulated) -> None:
    """Windows and sinks beyond 32 bits cover all tokens, and do not wrap around."""
    case = made(SCATTERED)
    for sinks, window in ((0, 2**32 + 1), (2, 2**31), (2**31, 2), (2**32, 2)):
        check(case, KernelAttention(library)(case.q, case.pool, replace(case.batch, sinks=sinks, window=window)))


def test_no_rows_give_nothing(library: Emulated) -> None:
    """A batch without queries gives empty arrays, and masses of zero for each sequence's pages."""
    case = made(SCATTERED)
    none = replace(case.batch, query_starts=[0, 0, 0, 0])
    want, got = (
        attend(case.q[:0], case.pool, none, with_mass=True) for attend in (paged_attention, KernelAttention(library))
    )
    assert (got.out.shape, got.lse.shape) == (want.out.shape, want.lse.shape) == ((0, 8, 64), (0, 8))
    for one, other in zip(got.mass or [], want.mass or [], strict=True):
        np.testing.assert_array_equal(one, other)


UNFIT: dict[str, dict[str, Any]] = {
    r"query_starts: \[0, 2, 1, 3\]": {"query_starts": [0, 2, 1, 3]},
    "query_starts: \\[\\]": {"query_starts": []},
    "batch: 3 query runs, 1 lengths": {"kv_lens": [1]},
    r"tables\[1\]: page 99 of 32": {"tables": [[0] * 9, [99], [0] * 19]},
    r"tables\[1\]: page -1 of 32": {"tables": [[0] * 9, [-1], [0] * 19]},
    "subsets: given for 2 sequences of 3": {"subsets": [[[0], [0]]] * 2},
    r"subsets\[2\]\[1\]: \[3, 3\]": {"subsets": [[[0], [0]], [[0], [0]], [[4], [3, 3]]]},
    r"subsets\[1\]\[0\]: \[1\]": {"subsets": [[[0], [0]], [[1], [0]], [[0], [0]]]},
    r"subsets\[0\]\[0\]: \[-1\]": {"subsets": [[[-1], [0]], [[0], [0]], [[0], [0]]]},
}


@pytest.mark.parametrize("said", UNFIT)
def test_a_batch_that_does_not_fit_is_named(library: Emulated, said: str) -> None:
    """Runs, lengths, missing pages and subsets that do not fit are refused, and the error names them."""
    case = made(SCATTERED)
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        KernelAttention(library)(case.q, case.pool, replace(case.batch, **UNFIT[said]))


def test_slots_are_of_pages_that_there_are(library: Emulated) -> None:
    """Negative slots store nothing; slots beyond the last page, and foreign queries, are refused by name."""
    case = made(SCATTERED)
    attention, new = KernelAttention(library), np.ones((3, 2, 64), np.float16)
    before, pages = case.pool.copy(), case.pool[:, None]
    attention.over(pages, case.batch, slots=np.array([-1, -(2**40), -17])).store(0, new, new)
    np.testing.assert_array_equal(case.pool, before)
    with pytest.raises(InvalidArgument, match=r"^slots: page 32 of 32"):
        attention.over(pages, case.batch, slots=np.array([0, 32 * 16, -1])).store(0, new, new)
    for q in (case.q[:2], case.q[:, 0]):
        with pytest.raises(InvalidArgument, match="^q: has shape .* wanted 3 query rows"):
            attention(q, case.pool, case.batch)
