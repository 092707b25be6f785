"""The kernels of sparse decode by their own source, against `granules` to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import TYPES, Nothing
from tests.unit.kernels.small_cases import UNITS
from tests.unit.kernels.sparse_cases import (
    BF16,
    HEADS,
    PARTS,
    TIES,
    Bound,
    Choose,
    Far,
    Score,
    Steps,
    check_bound,
    check_choose,
    check_far,
    check_resolve,
    check_score,
    new_resolved,
    new_state,
)
from tierd.errors import InvalidArgument
from tierd.kernels import sparse
from tierd.kernels.granules import GRANULE_TOKENS
from tierd.kernels.library import Emulated
from tierd.kernels.sparse import Chosen, Context, HostGranules, bound_keys, score_granules


@pytest.mark.parametrize("page_tokens", [16, 64, 256])
@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("kind", ["bf16", "f16", "e4m3"])
def test_bounds_of_every_type(library: Emulated, kind: str, dim: int, page_tokens: int) -> None:
    """Bounds are those of the reference for full and partial granules, in pages of any length."""
    check_bound(library, Bound(kind=kind, dim=dim, page_tokens=page_tokens))


@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_scores_of_every_type(library: Emulated, kind: str, dim: int, group: int) -> None:
    """Scores are those of the reference, with all bits of an f16 query."""
    check_score(library, Score(kind=kind, dim=dim, group=group))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_a_score_bounds_every_product(library: Emulated, kind: str) -> None:
    """No product of a query with a key exceeds its granule's score by more than rounding."""
    rng, count, dim = np.random.default_rng(3), 9, 128
    keys = (rng.standard_normal((count * PARTS, 16, HEADS, dim)) * np.exp(rng.uniform(-4, 4, dim))).astype(TYPES[kind])
    q = rng.standard_normal((1, 3 * HEADS, dim)).astype(TYPES[kind])
    keys[7, 3, 1], keys[8, 5, 0] = 40 * np.sign(q[0, 4]), -40 * np.sign(q[0, 1])
    bounds, got = np.zeros((count, HEADS, 2, dim), BF16), np.zeros((1, HEADS, count), np.float32)
    slots = 16 * np.arange(count * PARTS, dtype=np.int64).reshape(count, PARTS)
    bound_keys(library, keys, slots, tokens=np.full(count, GRANULE_TOKENS, np.int32), to=bounds)
    context = Context(np.arange(count, dtype=np.int32)[None], np.array([count], np.int32))
    score_granules(library, q, bounds, context, to=got)
    for head in range(3 * HEADS):
        each = keys[:, :, head // 3].reshape(count, GRANULE_TOKENS, dim).astype(np.float64)
        products, sizes = each @ q[0, head].astype(np.float64), np.abs(each) @ np.abs(q[0, head].astype(np.float64))
        assert (got[0, head // 3] >= (products - 1e-6 * sizes).max(axis=1)).all()


@pytest.mark.parametrize("forced", [(0, 0), (1, 0), (2, 3)])
@pytest.mark.parametrize("k", [5, 31, 1023])
@pytest.mark.parametrize("values", [(), TIES], ids=["any", "ties"])
def test_choices_of_any_size(library: Emulated, values: tuple[float, ...], k: int, forced: tuple[int, int]) -> None:
    """The chosen granules are the exact top-k, also where many scores are equal or k is nearly all."""
    check_choose(library, Choose((1024, 6, k, k + 1, 3 * k), k, forced, values))


def test_hot_slots_over_many_steps(library: Emulated) -> None:
    """Hits, misses, victims and the hand equal the reference's over hundreds of steps."""
    rng = np.random.default_rng(4)
    check_resolve(library, Steps(40, 300, tuple((int(a), int(b)) for a, b in rng.integers(0, 25, (300, 2)))))


@pytest.mark.parametrize("blocks", [1, 1000])
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (128, 4)])
def test_attention_over_granules_in_host_memory(library: Emulated, dim: int, group: int, blocks: int) -> None:
    """Steps with a hot buffer smaller than the context attend to the chosen granules, and to nothing else."""
    check_far(library, Far(dim=dim, group=group, blocks=blocks))


def test_all_granules_chosen_is_dense_attention(library: Emulated) -> None:
    """With room for all granules the result is that of attention to the whole context."""
    check_far(library, Far((6, 2), k=6, slots=6, steps=2))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("case", UNITS["sparse"], ids=range(len(UNITS["sparse"])))
def test_in_any_order_of_threads(library: Emulated, case: tuple[Any, Any]) -> None:
    """The result is right whichever thread of a block runs first."""
    check, shape = case
    check(library, shape)


# -- arguments that do not fit


def zeros(*shape: int, dtype: Any = np.int32) -> Any:
    """An array."""
    return np.zeros(shape, dtype)


N, MOST, K, SLOTS = 2, 7, 3, 4
CONTEXT = Context(zeros(N, MOST), zeros(N))
CHOSEN = Chosen(zeros(N, HEADS, K), zeros(N, HEADS))
STATE, RESOLVED = new_state(N, HEADS, MOST, SLOTS), new_resolved(N, HEADS, K)
HOT = zeros(N, SLOTS, HEADS, 2, 64, 64, dtype=BF16)
SOURCE = HostGranules(zeros(N, MOST, PARTS, dtype=np.uint64), 0, 64)
CALLS: dict[Any, dict[str, Any]] = {
    sparse.bound_keys: {
        "keys": zeros(3, 16, HEADS, 64, dtype=BF16),
        "slots": zeros(5, PARTS, dtype=np.int64),
        "tokens": zeros(5),
        "to": zeros(5, HEADS, 2, 64, dtype=BF16),
    },
    sparse.score_granules: {
        "q": zeros(N, 6, 64, dtype=BF16),
        "bounds": zeros(9, HEADS, 2, 64, dtype=BF16),
        "context": CONTEXT,
        "to": zeros(N, HEADS, MOST, dtype=np.float32),
    },
    sparse.choose_granules: {"scores": zeros(N, HEADS, MOST, dtype=np.float32), "context": CONTEXT, "to": CHOSEN},
    sparse.resolve_granules: {"chosen": CHOSEN, "state": STATE, "to": RESOLVED},
    sparse.fetch_granules: {"resolved": RESOLVED, "state": replace(STATE, pages=HOT), "source": SOURCE},
}
WRONG = [
    (sparse.bound_keys, "keys: pages of 24", {"keys": zeros(3, 24, HEADS, 64, dtype=BF16)}),
    (sparse.bound_keys, "slots: has shape", {"slots": zeros(5, 3, dtype=np.int64)}),
    (sparse.bound_keys, "tokens: has type", {"tokens": zeros(5, dtype=np.int64)}),
    (sparse.bound_keys, "to: has type", {"to": zeros(5, HEADS, 2, 64, dtype=np.float32)}),
    (sparse.score_granules, "q: 5 query heads", {"q": zeros(N, 5, 64, dtype=BF16)}),
    (sparse.score_granules, "q: has shape", {"q": zeros(N, 6, 96, dtype=BF16)}),
    (sparse.score_granules, "bounds: has type", {"bounds": zeros(9, HEADS, 2, 64, dtype=np.float16)}),
    (sparse.score_granules, "context.tables: ", {"context": replace(CONTEXT, tables=zeros(N + 1, MOST))}),
    (sparse.score_granules, "to: has shape", {"to": zeros(N, HEADS, MOST - 1, dtype=np.float32)}),
    (sparse.choose_granules, "scores: has type", {"scores": zeros(N, HEADS, MOST)}),
    (sparse.choose_granules, "context.counts: ", {"context": replace(CONTEXT, counts=zeros(N + 1))}),
    (sparse.choose_granules, "chosen.sizes: ", {"to": replace(CHOSEN, sizes=zeros(N, 1))}),
    (sparse.choose_granules, "k: 3 granules", {"forced": (1, 3)}),
    (sparse.resolve_granules, "chosen.ids: ", {"chosen": replace(CHOSEN, ids=zeros(N, 1, K))}),
    (sparse.resolve_granules, "state.owners: 2 hot slots", {"state": new_state(N, HEADS, MOST, 2)}),
    (sparse.resolve_granules, "state.used: has type", {"state": replace(STATE, used=zeros(N, HEADS, SLOTS))}),
    (sparse.resolve_granules, "to.misses: ", {"to": replace(RESOLVED, misses=zeros(N, HEADS, K + 1))}),
    (sparse.fetch_granules, "blocks: 0", {"blocks": 0}),
    (sparse.fetch_granules, "source.addresses: ", {"source": replace(SOURCE, addresses=zeros(N, MOST, PARTS))}),
    (sparse.fetch_granules, "source: 4 parts", {"source": replace(SOURCE, head_stride=8)}),
    (sparse.fetch_granules, "state.pages: has shape", {"state": replace(STATE, pages=HOT[:, 1:])}),
    (sparse.fetch_granules, "state.pages: NoneType is no array", {"state": STATE}),
    (sparse.fetch_granules, "resolved.miss_sizes: ", {"resolved": replace(RESOLVED, miss_sizes=zeros(N))}),
]


@pytest.mark.parametrize(("call", "told", "change"), WRONG, ids=[told for _, told, _ in WRONG])
def test_an_argument_that_does_not_fit_is_named(call: Any, told: str, change: dict[str, Any]) -> None:
    """A wrong argument is refused by name before a kernel sees an address."""
    with pytest.raises(InvalidArgument) as caught:
        call(Nothing(), **(CALLS[call] | change))
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_arguments_that_others_are_compared_with_fit(library: Emulated, call: Any) -> None:
    """Without a change the arguments are taken."""
    call(library, **CALLS[call])
