"""Paged attention in plain array operations, on numpy and torch alike.

It defines exactly a paged-attention kernel's results, and is fast enough for small models on a CPU.
It reads nothing of a page behind `kv_lens`, so stale tails and unused table entries may hold
anything, NaN too. Sums are in float32 (float64 for float64 queries). A query that sees no key gives
zeros and a log-sum-exp of -inf; so does one whose scores are all -inf, and no other. A visible NaN
makes the result NaN, and so does a query that is not finite. Log-sum-exps are natural logarithms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from array_api_compat import array_namespace, device, to_device

from tierd.errors import InvalidArgument
from tierd.kernels.e4m3 import E4M3_MOST

Array = Any
"""A numpy array or a torch tensor."""
SCORES_AT_ONCE = 1 << 22
TOKENS_AT_ONCE = 8192
"""Most scores and most keys that one step holds: so memory does not grow with a sequence."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which rows of the queries attend to which pages; one entry per sequence.

    query_starts: [n + 1]; sequence i owns query rows query_starts[i] to query_starts[i + 1]. They
    are the last of its kv_lens[i] tokens (decode: one row; prefill or append: several, causal).
    tables: per sequence the ids of its pages, in order; each but the last is full.
    window: a query sees the first `sinks` tokens and the last `window` ones up to its own; 0: all
    (StreamingLLM, arXiv 2309.17453).
    subsets: per sequence and kv head the visible pages' ordinals (Quest, arXiv 2406.10774).
    """

    query_starts: Sequence[int]
    kv_lens: Sequence[int]
    tables: Sequence[Sequence[int]]
    sinks: int = 0
    window: int = 0
    subsets: Sequence[Sequence[Sequence[int]]] | None = None

    def checked(self, rows: int, page_tokens: int) -> PagedBatch:
        """The batch itself. Raises InvalidArgument if query rows or page length do not fit."""
        starts = list(self.query_starts)
        if starts[:1] != [0] or starts[-1] != rows or any(a > b for a, b in itertools.pairwise(starts)):
            raise InvalidArgument(f"query_starts: {starts} must rise from 0 to {rows}, the number of query rows")
        if not len(starts) - 1 == len(self.kv_lens) == len(self.tables):
            raise InvalidArgument(
                f"batch: {len(starts) - 1} query runs, {len(self.kv_lens)} lengths and {len(self.tables)} tables differ"
            )
        for i, (length, table) in enumerate(zip(self.kv_lens, self.tables, strict=True)):
            if length < 0 or length > len(table) * page_tokens:
                raise InvalidArgument(
                    f"kv_lens[{i}]: {length} is outside 0 to {len(table)} pages of {page_tokens} tokens"
                )
        if min(self.sinks, self.window) < 0 or (self.window and self.subsets is not None):
            raise InvalidArgument(
                f"batch: sinks {self.sinks}, window {self.window}, subsets {self.subsets is not None}; give none "
                "that is negative, and a window or subsets"
            )
        self._check_subsets()
        return self

    def _check_subsets(self) -> None:
        """Checks that each names distinct pages of its sequence's table. Raises InvalidArgument."""
        subsets = [[]] * len(self.tables) if self.subsets is None else self.subsets
        if len(subsets) != len(self.tables):
            raise InvalidArgument(f"subsets: given for {len(subsets)} sequences of {len(self.tables)}")
        for i, (heads, table) in enumerate(zip(subsets, self.tables, strict=True)):
            for head, seen in enumerate(heads):
                distinct = set(seen)
                if len(distinct) < len(seen) or (distinct and not 0 <= min(distinct) <= max(distinct) < len(table)):
                    raise InvalidArgument(
                        f"subsets[{i}][{head}]: {list(seen)} are not all of pages 0 to {len(table) - 1}, each once"
                    )

    def hidden(self, sequence: int, rows: int, tokens: range, *, page_tokens: int, kv_heads: int) -> np.ndarray | None:
        """bool [1 or kv_heads, rows, tokens]: tokens hidden from its queries; None: no token."""
        first = self.kv_lens[sequence] - rows
        if tokens.stop <= first + 1 and not self.window and self.subsets is None:
            return None
        positions, each = np.arange(first, first + rows)[:, None], np.arange(tokens.start, tokens.stop)[None, :]
        hidden = (each > positions)[None]
        if self.window:
            hidden = hidden | ((each >= self.sinks) & (each <= positions - self.window))[None]
        if self.subsets is not None:
            seen = [np.isin(each[0] // page_tokens, self.subsets[sequence][head]) for head in range(kv_heads)]
            hidden = hidden | ~np.stack(seen)[:, None, :]
        return hidden


@dataclass(frozen=True, slots=True)
class Attended:
    """The result of attention. out: [rows, q_heads, head_dim] in the dtype of the queries.

    lse: [rows, q_heads], natural log-sum-exp of the scaled scores.
    mass: per sequence [q_heads, its pages], the attention weight on each, summed over query rows.
    """

    out: Array
    lse: Array
    mass: list[Array] | None = None


class PagedAttention(Protocol):
    """Any implementation of `paged_attention`."""

    def __call__(
        self,
        q: Array,
        pages: Sequence[Array],
        batch: PagedBatch,
        *,
        scale: float | None = None,
        with_mass: bool = False,
    ) -> Attended:
        """As `paged_attention`."""
        ...


def paged_attention(
    q: Array,
    pages: Sequence[Array],
    batch: PagedBatch,
    *,
    scale: float | None = None,
    with_mass: bool = False,
) -> Attended:
    """Causal grouped-query attention of one layer over block tables.

    q: [rows, q_heads, head_dim]. pages: page id -> [2, page_tokens, kv_heads, head_dim] (K, V): a
    list, or an array [pages, 2, ...]. scale: of the scores, 1 / sqrt(head_dim) by default. Raises
    InvalidArgument for a batch that does not fit.
    """
    xp = array_namespace(q)
    page_tokens = pages[0].shape[1] if len(pages) else 0
    batch.checked(q.shape[0], page_tokens)
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    parts = []
    for i in range(len(batch.tables)):
        rows = q[batch.query_starts[i] : batch.query_starts[i + 1]]
        parts.append(_attend(rows, _Keys(pages, batch, i, page_tokens), factor, with_mass=with_mass))
    mass = [m for part in parts for m in part.mass or []] if with_mass else None
    return Attended(xp.concat([p.out for p in parts]), xp.concat([p.lse for p in parts]), mass)


@dataclass(frozen=True, slots=True)
class _Keys:
    """K and V of one sequence of a batch, in pages of so many tokens."""

    pages: Sequence[Array]
    batch: PagedBatch
    sequence: int
    page_tokens: int

    @property
    def count(self) -> int:
        return self.batch.kv_lens[self.sequence]

    def tiles(self, scores_each: int) -> list[range]:
        """Tokens in steps of whole pages. scores_each: of a token."""
        most = min(TOKENS_AT_ONCE, SCORES_AT_ONCE // max(1, scores_each))
        step = max(1, most // self.page_tokens) * self.page_tokens
        return [range(at, min(at + step, self.count)) for at in range(0, self.count, step)]

    def read(self, q: Array, tile: range) -> tuple[Array, Array]:
        """K and V of a tile, [tokens, kv_heads, head_dim] each, in the sums' dtype, beside the queries."""
        xp, size = array_namespace(q), self.page_tokens
        table = self.batch.tables[self.sequence]
        used = [self.pages[page] for page in table[tile.start // size : -(-tile.stop // size)]]
        used[-1] = used[-1][:, : len(tile) - (len(used) - 1) * size]
        both = xp.astype(to_device(xp.concat(used, axis=1), device(q)), _sum_dtype(q), copy=False)
        return both[0], both[1]

    def hidden(self, rows: int, tile: range, kv_heads: int) -> np.ndarray | None:
        """As `PagedBatch.hidden`."""
        return self.batch.hidden(self.sequence, rows, tile, page_tokens=self.page_tokens, kv_heads=kv_heads)


@np.errstate(invalid="ignore")  # inf - inf is NaN, as it should be
def _attend(q: Array, keys: _Keys, scale: float, *, with_mass: bool) -> Attended:
    """Attention of the last rows of one sequence over all its keys, tile by tile (online softmax:
    Milakov and Gimelshein, arXiv 1805.02867)."""
    rows, q_heads, head_dim = q.shape
    if rows == 0 or keys.count == 0:
        return _nothing(q, keys)
    xp, kv_heads = array_namespace(q), keys.pages[0].shape[2]
    # One matrix product per kv head over the query heads of its group: [kv_heads, group * rows,
    # dim].
    grouped = xp.permute_dims(xp.reshape(q, (rows, kv_heads, q_heads // kv_heads, head_dim)), (1, 2, 0, 3))
    grouped = xp.astype(xp.reshape(grouped, (kv_heads, -1, head_dim)), _sum_dtype(q), copy=False) * scale
    grouped = xp.where(xp.isfinite(grouped), grouped, math.nan)

    def scores_of(tile: range, k: Array) -> Array:
        scores = xp.reshape(xp.matmul(grouped, xp.permute_dims(k, (1, 2, 0))), (q_heads, rows, len(tile)))
        hidden = keys.hidden(rows, tile, kv_heads)
        return scores if hidden is None else _masked(scores, hidden)

    tiles = keys.tiles(q_heads * rows)
    mixed, total, weights, top = (
        0.0,
        0.0,
        None,
        xp.full((q_heads, rows, 1), -math.inf, dtype=grouped.dtype, device=device(q)),
    )
    for tile in tiles:
        k, v = keys.read(q, tile)
        scores = scores_of(tile, k)
        before, top = top, xp.maximum(top, xp.max(scores, axis=-1, keepdims=True))
        shrink, weights = xp.exp(before - _finite(top)), xp.exp(scores - _finite(top))
        sums = xp.matmul(xp.reshape(weights, (kv_heads, -1, len(tile))), xp.permute_dims(v, (1, 0, 2)))
        mixed = mixed * shrink + xp.reshape(sums, (q_heads, rows, head_dim))
        total = total * shrink + xp.sum(weights, axis=-1, keepdims=True)
    seen = total != 0
    safe = xp.where(seen, total, xp.ones_like(total))
    lse = xp.where(seen, _finite(top) + xp.log(safe), xp.full_like(top, -math.inf))
    mass = None
    if with_mass:
        known = {tiles[-1]: weights}
        each = [
            known[tile] if tile in known else xp.exp(scores_of(tile, keys.read(q, tile)[0]) - _finite(top))
            for tile in tiles
        ]
        mass = [xp.concat([_page_mass(one / safe, keys.page_tokens) for one in each], axis=1)]
    out = xp.astype(xp.permute_dims(mixed / safe, (1, 0, 2)), q.dtype, copy=False)
    return Attended(out, xp.permute_dims(lse[..., 0], (1, 0)), mass)


def _finite(top: Array) -> Array:
    """Greatest scores, 0 for a row that saw nothing."""
    xp = array_namespace(top)
    return xp.where(top == -math.inf, xp.zeros_like(top), top)


def _nothing(q: Array, keys: _Keys) -> Attended:
    """The result for no rows, or for rows without any key."""
    xp = array_namespace(q)
    where = {"dtype": _sum_dtype(q), "device": device(q)}
    mass = xp.zeros((q.shape[1], -(-keys.count // (keys.page_tokens or 1))), **where)
    return Attended(xp.zeros_like(q), xp.full(q.shape[:2], -math.inf, **where), [mass])


def _masked(scores: Array, hidden: np.ndarray) -> Array:
    """Scores [heads, rows, keys], -inf where hidden: bool [1 or kv_heads, rows, keys]."""
    xp = array_namespace(scores)
    columns = np.asarray(hidden.any(axis=(0, 1)))
    first = (
        int(np.argmax(columns)) if columns.any() else len(columns)
    )  # few queries with a long past: only the last keys are hidden
    where = hidden[:, :, first:]
    if len(where) > 1:
        where = np.repeat(where, scores.shape[0] // len(where), axis=0)
    scores[:, :, first:] = xp.where(xp.asarray(where, device=device(scores)), -math.inf, scores[:, :, first:])
    return scores


def _page_mass(weights: Array, page_tokens: int) -> Array:
    """Weights [heads, rows, keys] summed over rows and each page's keys: [heads, pages]."""
    xp = array_namespace(weights)
    per_key = xp.sum(weights, axis=1)
    count = per_key.shape[1]
    pages = -(-count // page_tokens)
    padding = xp.zeros((per_key.shape[0], pages * page_tokens - count), dtype=per_key.dtype, device=device(per_key))
    return xp.sum(xp.reshape(xp.concat([per_key, padding], axis=1), (-1, pages, page_tokens)), axis=2)


@np.errstate(invalid="ignore")
def merge_attention(outs: Array, lses: Array) -> Attended:
    """Attention over a union of keys, from attention over its parts (splits, tiers, ring hops).

    outs: [parts, rows, heads, head_dim]; lses: [parts, rows, heads], natural; or sequences of as
    many arrays. A part that saw nothing (-inf) is ignored. One of NaN or +inf makes the result NaN.
    """
    if isinstance(outs, Sequence):
        stack = array_namespace(*outs, *lses).stack
        outs, lses = stack(outs), stack(lses)
    xp = array_namespace(outs, lses)
    top = xp.max(lses, axis=0)
    top = xp.where(top == -math.inf, xp.zeros_like(top), top)
    shares = xp.exp(lses - top)
    total = xp.sum(shares, axis=0)
    seen = total != 0
    safe = xp.where(seen, total, xp.ones_like(total))
    used = xp.where((shares > 0)[..., None], xp.astype(outs, lses.dtype, copy=False), xp.zeros_like(lses)[..., None])
    out = xp.sum(used * (shares / safe)[..., None], axis=0)
    lse = xp.where(seen, top + xp.log(safe), xp.full_like(top, -math.inf))
    return Attended(xp.astype(out, outs.dtype, copy=False), lse)


def store_tokens(new: Array, slots: Sequence[int], pages: Array, scales: Array = None) -> None:
    """Writes new tokens' keys, or their values, into pages; numpy alone.

    new: [tokens, kv_heads, head_dim]. pages: [pages, page_tokens, kv_heads, head_dim] of one layer.
    slots: per token page * page_tokens + offset; negative: not stored.
    scales: [kv_heads],
    divisors of stored values; None: 1. Values beyond e4m3 become its greatest.
    """
    for token, slot in zip(new, slots, strict=True):
        if slot < 0:
            continue
        stored = token.astype(np.float32) / (1.0 if scales is None else scales[:, None])
        if pages.dtype.itemsize == 1:
            stored = np.clip(stored, -E4M3_MOST, E4M3_MOST)
        pages[slot // pages.shape[1], slot % pages.shape[1]] = stored.astype(pages.dtype)


def copy_pages(source: Array, target: Array, *, of_source: Sequence[int], of_target: Sequence[int]) -> None:
    """Copies page of_source[i] of one array to page of_target[i] of another, bit by bit. Both are
    [pages, ...] in numpy, with the same other axes."""
    target.view(np.uint8)[of_target] = source.view(np.uint8)[of_source]


def summarize_pages(keys: Array, pages: Sequence[int], tokens: Sequence[int]) -> Array:
    """The least and greatest key per channel of pages; numpy alone.

    See Quest, arXiv 2406.10774, section 3.2. keys: [pages, page_tokens, kv_heads, head_dim].
    tokens: how many of each page are there. Returns f32 [len(pages), kv_heads, 2, head_dim]: stored
    values, without scales; inf and -inf for no tokens, NaN if one is.
    """
    bounds = np.empty((len(pages), keys.shape[2], 2, keys.shape[3]), np.float32)
    for i, (page, count) in enumerate(zip(pages, tokens, strict=True)):
        some = keys[page, :count].astype(np.float32)
        bounds[i, :, 0], bounds[i, :, 1] = some.min(axis=0, initial=math.inf), some.max(axis=0, initial=-math.inf)
    return bounds


def _sum_dtype(q: Array) -> Any:
    """float64 stays; all narrower types are summed in float32."""
    xp = array_namespace(q)
    return xp.float64 if q.dtype == xp.float64 else xp.float32
