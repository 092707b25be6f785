"""Stores, copies and bounds by the kernels' own source equal the plain reference to the bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import Nothing
from tests.unit.kernels.nan_cases import ODD_SUMMARIES, check_odd_summary
from tests.unit.kernels.page_cases import (
    LAYOUTS,
    LONG_COPIES,
    Copy,
    Memory,
    Runs,
    Store,
    Summary,
    check_copy,
    check_long_copy,
    check_runs,
    check_store,
    check_summary,
)
from tests.unit.kernels.small_cases import UNITS
from tierd.errors import InvalidArgument
from tierd.kernels.library import Emulated
from tierd.kernels.pages import KvPages, Place, copy_pages, layer_addresses, store_tokens, summarize_pages

TYPES = [("bf16", "bf16"), ("f16", "f16"), ("bf16", "e4m3"), ("f16", "e4m3")]
STORED = ["bf16", "f16", "e4m3"]


# -- store


@pytest.mark.parametrize("is_hnd", [False, True], ids=["nhd", "hnd"])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_store_of_every_type(library: Emulated, types: tuple[str, str], is_hnd: bool) -> None:
    """Tokens are stored in their slots, rounded once; tokens without a slot are not; other bytes stay."""
    check_store(library, Store(types=types, is_hnd=is_hnd))


@pytest.mark.parametrize("tokens", [0, 1, 2, 100])
@pytest.mark.parametrize(("page_tokens", "heads", "dim"), [(16, 1, 128), (64, 8, 96), (256, 3, 256)])
def test_store_of_any_shape(library: Emulated, tokens: int, page_tokens: int, heads: int, dim: int) -> None:
    """Stores of 0, 1 and many tokens are right, with head and channel counts that are no powers of two."""
    check_store(library, Store(tokens, page_tokens=page_tokens, heads=heads, dim=dim))


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_store_of_tokens_at_any_address(library: Emulated, types: tuple[str, str]) -> None:
    """New tokens off multiples of 16 bytes, as in a slice of a wider array, are stored rightly."""
    check_store(library, Store(types=types, gap=1))


# -- copy


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_copy_between_layouts(library: Emulated, source: str, target: str) -> None:
    """Copies are right from every layout to every other, with scattered pages on both sides."""
    check_copy(library, Copy(source, target))


@pytest.mark.parametrize("kind", [*STORED, "f32"])
def test_copy_of_every_type(library: Emulated, kind: str) -> None:
    """Bits of any type are copied, including NaN of all kinds."""
    check_copy(library, Copy("pages-hnd", "layers-nhd", kind=kind))


@pytest.mark.parametrize("of_target", [None, (2, 0, 4)], ids=["in-order", "scatter"])
@pytest.mark.parametrize("of_source", [None, (4, 4, 1)], ids=["in-order", "gather"])
@pytest.mark.parametrize("layout", ["pages-hnd", "tensors-nhd"])
def test_pages_in_order_or_named(library: Emulated, layout: str, of_source: Any, of_target: Any) -> None:
    """A gather may read a page twice; without named pages a copy takes all in order."""
    check_copy(library, Copy("layers-hnd", layout, of_source, of_target))


@pytest.mark.parametrize("count", [0, 1])
def test_copy_of_no_page_or_one(library: Emulated, count: int) -> None:
    """A copy of no page changes nothing, and one of a single page is right."""
    check_copy(library, Copy("pages-hnd", "tensors-hnd", (3,)[:count], (1,)[:count]))


@pytest.mark.parametrize("blocks", [1, 7, 1000])
def test_any_number_of_blocks_copies_the_same(library: Emulated, blocks: int) -> None:
    """The copy is right with few blocks and with more than there is work."""
    check_copy(library, Copy("pages-nhd", "layers-hnd", blocks=blocks))


@pytest.mark.parametrize("blocks", LONG_COPIES)
def test_copy_of_long_rows(library: Emulated, blocks: int) -> None:
    """Long rows are right with few blocks and with more than there are shares."""
    check_long_copy(library, blocks)


def test_copy_of_some_tokens(library: Emulated) -> None:
    """A view of fewer tokens, heads or layers can be copied, and the bytes beside it stay."""
    source, got, want = (Memory(layout, "f16") for layout in ("pages-hnd", "layers-nhd", "layers-nhd"))
    source.fill(np.random.default_rng(3))
    part = np.s_[:, 1:, :, 2:7, ::-1]
    copy_pages(library, Place(source.views[0][part]), Place(got.views[0][part]))
    want.views[0].view(np.uint8)[part] = source.views[0].view(np.uint8)[part]
    np.testing.assert_array_equal(got.lies[0].view(np.uint8), want.lies[0].view(np.uint8))


def test_copy_of_tensors_for_k_and_v(library: Emulated) -> None:
    """An engine's separate K and V tensors count as layers, and the pool's pages are viewed the same way."""
    pool = Memory("pages-hnd", "bf16")
    pool.fill(np.random.default_rng(4))
    flat = pool.lies[0].reshape(len(pool.lies[0]), -1, 1, *pool.lies[0].shape[3:]).swapaxes(3, 4)
    tensors = [np.zeros(flat[:, 0].shape, flat.dtype) for _ in range(flat.shape[1])]
    copy_pages(library, Place(flat), Place(tensors, addresses=np.array(layer_addresses(tensors), np.int64)))
    for layer, tensor in enumerate(tensors):
        np.testing.assert_array_equal(tensor.view(np.uint16), flat[:, layer].view(np.uint16))


# -- runs


@pytest.mark.parametrize("blocks", [1, 7, 1000])
def test_runs_of_any_length_at_any_alignment(library: Emulated, blocks: int) -> None:
    """Runs of all lengths to 48 bytes and all pairs of shifts are right, by few blocks or many."""
    of_sources = tuple((i + i // 16) % 16 for i in range(256))
    check_runs(library, Runs((*range(49),) * 16, of_targets=(*range(16),), of_sources=of_sources, blocks=blocks))


def test_runs_longer_than_a_turn_of_their_block(library: Emulated) -> None:
    """Runs longer than one step of a block's threads are right, aligned or not."""
    check_runs(library, Runs((70_001, 65_536, 4096, 20_000), of_targets=(0, 0, 3), of_sources=(0, 0, 3, 1)))


# -- summary


@pytest.mark.parametrize("is_hnd", [False, True], ids=["nhd", "hnd"])
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("dim", [64, 256])
def test_summary_of_every_type(library: Emulated, kind: str, dim: int, is_hnd: bool) -> None:
    """The least and greatest of each channel are right for full, partial and empty pages."""
    check_summary(library, Summary(kind=kind, dim=dim, is_hnd=is_hnd))


@pytest.mark.parametrize("tokens", [(), (1,), (16,) * 9])
def test_summary_of_any_number_of_pages(library: Emulated, tokens: tuple[int, ...]) -> None:
    """Summaries of no page, one and many are right."""
    check_summary(library, Summary(tokens))


@pytest.mark.parametrize("kind", ODD_SUMMARIES)
def test_a_summary_of_what_is_no_number(library: Emulated, kind: str) -> None:
    """A channel with one NaN token has NaN bounds."""
    check_odd_summary(library, kind)


# -- orders of threads


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("case", UNITS["pages"], ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_in_any_order_of_threads(library: Emulated, case: tuple[Any, Any]) -> None:
    """The result is right whichever thread of a block runs first."""
    check, shape = case
    check(library, shape)


# -- arguments that do not fit


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    """An array."""
    return np.zeros(shape, dtype)


K, POOL, SLOTS = zeros(5, 2, 64), zeros(3, 16, 2, 64), zeros(5, dtype=np.int64)
STORE = {"k": K, "v": K, "slots": SLOTS, "pages": KvPages(POOL, POOL)}
WRONG_STORES = {
    "k": {"k": K.astype(np.float64)},
    "v": {"v": K[:4]},
    "slots": {"slots": SLOTS.astype(np.int32)},
    "pages.k": {"pages": KvPages(POOL[:, :, :1], POOL)},
    "pages.v": {"pages": KvPages(POOL, POOL[:, :8])},
    "pages.k_scales": {"pages": KvPages(POOL, POOL, zeros(3, dtype=np.float32))},
}


@pytest.mark.parametrize("argument", WRONG_STORES)
def test_an_argument_of_a_store_that_does_not_fit_is_named(argument: str) -> None:
    """A wrong argument of a store is refused before a kernel sees an address."""
    with pytest.raises(InvalidArgument, match=f"^{argument}: "):
        store_tokens(Nothing(), **(STORE | WRONG_STORES[argument]))


PAGES = zeros(4, 3, 2, 16, 2, 64)
TENSORS = [zeros(4, 2, 16, 2, 64) for _ in range(3)]
ADDRESSES = np.array(layer_addresses(TENSORS), np.int64)
IDS = zeros(2, dtype=np.int32)
WRONG_COPIES = {
    "source.array": (Place(PAGES[..., ::2]), Place(PAGES)),
    "source.array: 40 bytes": (Place(PAGES[..., :20]), Place(PAGES[..., :20])),
    "source.array[1]": (Place([TENSORS[0], PAGES[:, 0]], addresses=ADDRESSES[:2]), Place(PAGES)),
    "source.array: no tensors": (Place([], addresses=ADDRESSES[:0]), Place(PAGES)),
    "source.addresses": (Place(TENSORS), Place(PAGES)),
    "source.addresses: has shape": (Place(TENSORS, addresses=ADDRESSES[:2]), Place(PAGES)),
    "target.addresses": (Place(PAGES), Place(PAGES, addresses=ADDRESSES)),
    "source.pages": (Place(PAGES, IDS.astype(np.int64)), Place(PAGES, IDS)),
    "target.pages": (Place(PAGES, IDS), Place(PAGES)),
    "target.array": (Place(PAGES), Place(PAGES[:, :2])),
    "target.array: has type": (Place(PAGES), Place(PAGES.view(ml_dtypes.bfloat16))),
}


@pytest.mark.parametrize("argument", WRONG_COPIES)
def test_a_side_of_a_copy_that_does_not_fit_is_named(argument: str) -> None:
    """Wrong shapes, types, page counts and unequal layer tensors are refused by name."""
    with pytest.raises(InvalidArgument) as caught:
        copy_pages(Nothing(), *WRONG_COPIES[argument])
    assert str(caught.value).startswith(argument if ":" in argument else f"{argument}:")


def test_mapped_host_memory_is_a_side_of_its_own(library: Emulated) -> None:
    """A GPU kernel takes host memory only if marked as mapped, and device memory only if not."""

    class Elsewhere(Nothing):
        device = "cuda:0"

    with pytest.raises(InvalidArgument, match=r"^source\.array: is on cpu"):
        copy_pages(Elsewhere(), Place(PAGES), Place(PAGES, is_mapped=True))
    with pytest.raises(InvalidArgument, match=r"^target\.array: is on cpu"):
        copy_pages(Elsewhere(), Place(PAGES, is_mapped=True), Place(PAGES))
    copy_pages(library, Place(PAGES, is_mapped=True), Place(PAGES.copy()))


SUMMARY = {
    "keys": POOL,
    "pages": IDS,
    "tokens": IDS,
    "to": zeros(2, 2, 2, 64, dtype=np.float32),
}


@pytest.mark.parametrize("argument", SUMMARY)
def test_an_argument_of_a_summary_that_does_not_fit_is_named(argument: str) -> None:
    """An argument with another type or one axis less is refused by name."""
    given: dict[str, Any] = SUMMARY | {argument: SUMMARY[argument][0]}
    with pytest.raises(InvalidArgument, match=f"^{argument}: "):
        summarize_pages(Nothing(), **given)


def test_a_summary_writes_where_it_was_told(library: Emulated) -> None:
    """The result is the array that the caller gave."""
    to = SUMMARY["to"].copy()
    assert summarize_pages(library, POOL, IDS, tokens=IDS, to=to) is to
    assert np.isinf(to).all()
