"""Merges of attention parts by log-sum-exps: keys in two tiers, and shards on a ring of ranks.

RingAttention (arXiv 2310.01889): each rank has a shard of the tokens and keeps its queries. It
sees one shard a hop, and merges each hop's result into its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import (
    OUT_LIMIT,
    Case,
    Shape,
    allocate,
    decoded,
    expected,
    made,
)
from tierd.kernels import Attended, PagedBatch, merge_attention, paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.library import Emulated
from tierd.kernels.paged import merge_parts

Array = np.ndarray[Any, Any]
Attend = Callable[[Array, Array, PagedBatch], Attended]
Merge = Callable[[Array, Array], Attended]
SHARDS = (40, 7, 33)
"""Tokens of each rank."""
PAGE_TOKENS, KV_HEADS, GROUP, DIM = 16, 2, 2, 64
LSE_LIMIT = 2e-5


def joined(merge: Merge, *parts: Attended) -> Attended:
    """The merge in f32 or f64, so that only the parts are rounded."""
    wide = np.float64 if parts[0].out.dtype == np.float64 else np.float32
    return merge(np.stack([part.out for part in parts]).astype(wide), np.stack([part.lse for part in parts]))


def by_kernel(library: Emulated) -> Merge:
    def merged(outs: Array, lses: Array) -> Attended:
        return merge_parts(library, outs, lses, Attended(np.empty_like(outs[0]), allocate(lses.shape[1:], "float32")))

    return merged


def distance(got: Attended, want: Attended) -> float:
    """Relative L2."""
    return float(np.linalg.norm(got.out.astype(np.float64) - want.out) / np.linalg.norm(want.out))


# -- tiers


def whole_of(parts: list[Case]) -> Attended:
    """Attention over all keys of two cases of one token a request, written out; float64."""
    outs, lses = [], []
    for i in range(len(parts[0].q)):
        keys, values = np.concatenate([tokens_of(case, i) for case in parts], axis=1)
        scores = np.einsum("hd,thd->ht", parts[0].q[i].astype(np.float64), keys) / np.sqrt(keys.shape[2])
        lses.append(np.logaddexp.reduce(scores, axis=1))
        outs.append(np.einsum("ht,thd->hd", np.exp(scores - lses[-1][:, None]), values))
    return Attended(np.stack(outs), np.stack(lses))


def tokens_of(case: Case, request: int) -> Array:
    """[2, tokens, q_heads, dim] of a request, with scales."""
    pool = case.pool[case.batch.tables[request]].astype(np.float64).swapaxes(0, 1)
    flat = pool.reshape(2, -1, *pool.shape[3:])[:, : case.batch.kv_lens[request]]
    if case.pages.k_scales is not None:
        flat = flat * np.stack([case.pages.k_scales, case.pages.v_scales])[:, None, :, None]
    return flat.repeat(case.shape.group, axis=2)


def test_parts_in_two_tiers(library: Emulated) -> None:
    """e4m3 long pages and f16 short ones of a request merge rightly, also if either tier has none."""
    far = made(Shape(((1, 200), (1, 0), (1, 70)), types=("f16", "e4m3"), page_tokens=64, seed=1))
    near = made(Shape(((1, 40), (1, 33), (1, 0)), types=("f16", "f16"), seed=2))
    near.q = far.q
    want = whole_of([far, near])
    plain = joined(merge_attention, *(expected(case) for case in (far, near)))
    np.testing.assert_allclose(plain.out, want.out, atol=1e-12)
    got = joined(by_kernel(library), *(decoded(library, case) for case in (far, near)))
    assert distance(got, want) <= OUT_LIMIT["f16"]
    np.testing.assert_allclose(got.lse, want.lse, atol=LSE_LIMIT)


# -- a ring


class Ring:
    """Queries, keys and values of a text; a pool for each rank, with its shard alone."""

    def __init__(self) -> None:
        rng, count = np.random.default_rng(3), sum(SHARDS)
        self.q = rng.standard_normal((count, KV_HEADS * GROUP, DIM)).astype(np.float16)
        self.kv = rng.standard_normal((2, count, KV_HEADS, DIM)).astype(np.float16)
        self.ends = np.cumsum(SHARDS).tolist()
        self.pools, self.tables = zip(
            *(paged(self.kv[:, end - n : end]) for n, end in zip(SHARDS, self.ends, strict=True)), strict=True
        )

    def whole(self) -> Attended:
        """The whole text in one call, by the reference in float64."""
        pool, table = paged(self.kv)
        batch = PagedBatch([0, len(self.q)], [len(self.q)], [table])
        return paged_attention(self.q.astype(np.float64), pool.astype(np.float64), batch)

    def gone_round(self, attend: Attend, merge: Merge) -> Attended:
        """The results of all ranks after as many hops as there are ranks."""
        found = [self._rank(rank, attend, merge) for rank in range(len(SHARDS))]
        return Attended(np.concatenate([each.out for each in found]), np.concatenate([each.lse for each in found]))

    def _rank(self, rank: int, attend: Attend, merge: Merge) -> Attended:
        q = self.q[self.ends[rank] - SHARDS[rank] : self.ends[rank]]
        so_far = attend(q, self.pools[rank], PagedBatch([0, len(q)], [len(q)], [self.tables[rank]]))
        for hop in range(1, len(SHARDS)):
            of = (rank - hop) % len(SHARDS)
            # Each query sees an earlier shard whole, so each is its own sequence; it sees nothing
            # of a later one.
            seen = SHARDS[of] if of < rank else 0
            batch = PagedBatch(range(len(q) + 1), [seen] * len(q), [self.tables[of]] * len(q))
            so_far = joined(merge, so_far, attend(q, self.pools[of], batch))
        return so_far


def paged(kv: Array) -> tuple[Array, list[int]]:
    """Tokens [2, tokens, heads, dim] as pages in some order, with NaN behind them, and their table."""
    count = -(-kv.shape[1] // PAGE_TOKENS)
    pool = np.full((count, 2, PAGE_TOKENS, *kv.shape[2:]), np.nan, kv.dtype)
    table = np.random.default_rng(count).permutation(count).tolist()
    for i, page in enumerate(table):
        some = kv[:, i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
        pool[page, :, : some.shape[1]] = some
    return pool, table


def test_a_ring_by_the_reference() -> None:
    """Hops merged one by one give the whole, to the last bits."""

    def attend(q: Array, pool: Array, batch: PagedBatch) -> Attended:
        return paged_attention(q.astype(np.float64), pool.astype(np.float64), batch)

    ring = Ring()
    got, want = ring.gone_round(attend, merge_attention), ring.whole()
    np.testing.assert_allclose(got.out, want.out, atol=1e-12)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-12)


@pytest.mark.usefixtures("order")
def test_a_ring_by_the_kernels(library: Emulated) -> None:
    """The same by prefill, decode and merge, up to the rounding of the parts."""
    kernels, ring = KernelAttention(library), Ring()
    got, want = ring.gone_round(kernels, by_kernel(library)), ring.whole()
    assert distance(got, want) <= OUT_LIMIT["f16"]
    np.testing.assert_allclose(got.lse, want.lse, atol=LSE_LIMIT)
