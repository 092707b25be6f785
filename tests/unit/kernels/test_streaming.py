"""StreamingLLM's positions within the cache (arXiv 2309.17453, section 3.2) by two calls and a merge.

Keys in pages are rotated by their positions in the text, so distances within the window are right.
The sinks must appear just before the window. So each query attends to the window, and again to the
sinks outside it, rotated by its position in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import OUT_LIMIT
from tierd.kernels import Attended, PagedBatch, merge_attention, paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.library import Emulated
from tierd.kernels.paged import merge_parts

Array = np.ndarray[Any, Any]
SINKS, WINDOW, PAGE_TOKENS, KV_HEADS, GROUP, DIM = 6, 40, 16, 2, 2, 64
LENGTHS = (150, 47, 46, 30, 3)
"""Far beyond sinks and window, one token beyond, exactly equal, and less: then the cache is the text."""


def rotated(x: Array, positions: Array) -> Array:
    """Rotary embedding (arXiv 2104.09864) of [n, heads, DIM] by positions [n]."""
    angles = positions[:, None] * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., : DIM // 2], x[..., DIM // 2 :]
    return np.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)


@dataclass
class Texts:
    """Unrotated keys, values and queries, a list of each; float64. rows: last tokens that have queries."""

    rows: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.rows)
        self.k, self.v = ([rng.standard_normal((n, KV_HEADS, DIM)) for n in LENGTHS] for _ in range(2))
        self.q = [rng.standard_normal((min(self.rows, n), KV_HEADS * GROUP, DIM)) for n in LENGTHS]
        self.positions = [np.arange(n - len(q), n) for n, q in zip(LENGTHS, self.q, strict=True)]

    def paged(self) -> tuple[Array, list[list[int]]]:
        """Pages [pages, 2, ...] with keys rotated by their places in the text, the rest NaN, and tables."""
        counts = [-(-n // PAGE_TOKENS) for n in LENGTHS]
        ids = iter(np.random.default_rng(0).permutation(sum(counts) + 1).tolist())
        pool = np.full((sum(counts) + 1, 2, PAGE_TOKENS, KV_HEADS, DIM), np.nan)
        tables = [[next(ids) for _ in range(count)] for count in counts]
        for k, v, table in zip(self.k, self.v, tables, strict=True):
            both = np.stack([rotated(k, np.arange(len(k))), v])
            for token in range(len(k)):
                pool[table[token // PAGE_TOKENS], :, token % PAGE_TOKENS] = both[:, token]
        return pool, tables


def written_out(texts: Texts) -> Array:
    """Each query alone: its cache, rotated by the places within it."""
    rows = []
    for k, v, q, positions in zip(texts.k, texts.v, texts.q, texts.positions, strict=True):
        for i, position in enumerate(positions):
            cached = [token for token in range(position + 1) if token < SINKS or token > position - WINDOW]
            keys = rotated(k[cached], np.arange(len(cached))).repeat(GROUP, axis=1)
            query = rotated(q[i : i + 1], np.array([len(cached) - 1]))[0]
            weights = np.exp(np.einsum("thd,hd->ht", keys, query) / np.sqrt(DIM))
            weights /= weights.sum(axis=1, keepdims=True)
            rows.append(np.einsum("ht,thd->hd", weights, v[cached].repeat(GROUP, axis=1)))
    return np.stack(rows)


Attend = Callable[[Array, PagedBatch], Attended]


def streamed(texts: Texts, attend: Attend, merge: Callable[[Array, Array], Attended]) -> Attended:
    """The two calls. For the sinks each query is a sequence, as long as the sinks outside its window."""
    _, tables = texts.paged()
    starts = np.cumsum([0, *map(len, texts.q)])
    positions = np.concatenate(texts.positions)
    left_behind = np.clip(positions - WINDOW + 1, 0, SINKS)
    of_row = [table for table, q in zip(tables, texts.q, strict=True) for _ in q]
    q = np.concatenate(texts.q)
    parts = (
        attend(
            rotated(q, np.minimum(positions, SINKS + WINDOW - 1)),
            PagedBatch(range(len(q) + 1), left_behind.tolist(), of_row),
        ),
        attend(rotated(q, positions), PagedBatch(starts.tolist(), list(LENGTHS), tables, window=WINDOW)),
    )
    return merge(np.stack([part.out for part in parts]), np.stack([part.lse for part in parts]))


@pytest.mark.parametrize("rows", [1, 50])
def test_two_calls_are_the_positions_within_the_cache(rows: int) -> None:
    """Two calls give the paper's cache to the last bits; one call with the text's positions does not."""
    texts = Texts(rows)
    pool, tables = texts.paged()
    got = streamed(texts, lambda q, batch: paged_attention(q, pool, batch), merge_attention)
    np.testing.assert_allclose(got.out, written_out(texts), atol=1e-12)
    starts = np.cumsum([0, *map(len, texts.q)]).tolist()
    batch = PagedBatch(starts, list(LENGTHS), tables, SINKS, WINDOW)
    q = rotated(np.concatenate(texts.q), np.concatenate(texts.positions))
    assert np.abs(paged_attention(q, pool, batch).out - got.out).max() > 1e-3


@pytest.mark.parametrize("rows", [1, 50])
def test_two_calls_of_the_kernels(library: Emulated, rows: int) -> None:
    """Decode, prefill and merge kernels give the reference's result for the same rounded numbers."""
    texts = Texts(rows)
    pool, kernels = texts.paged()[0].astype(np.float16), KernelAttention(library)

    def merged(outs: Array, lses: Array) -> Attended:
        return merge_parts(library, outs, lses, Attended(np.empty_like(outs[0]), np.empty_like(lses[0])))

    got = streamed(texts, lambda q, batch: kernels(q.astype(np.float16), pool, batch), merged)
    want = streamed(
        texts,
        lambda q, batch: paged_attention(q.astype(np.float16).astype(np.float64), pool.astype(np.float64), batch),
        merge_attention,
    )
    distance = np.linalg.norm(got.out.astype(np.float64) - want.out) / np.linalg.norm(want.out)
    assert distance <= 2 * OUT_LIMIT["f16"], "parts are rounded, and so is what comes of them"
    np.testing.assert_allclose(got.lse, want.lse, atol=2e-5)
