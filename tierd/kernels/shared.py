"""Shared prefixes by kernels: a group's queries attend to its pages as a chunk, and are merged.

The decode kernel attends to each sequence's own pages before. The prefill kernel reads a shared
page once for as many queries as fit a thread block. It does not split keys, so each prefix is cut
into parts, enough to occupy a GPU. Sources: `prefixes.py`; FlashInfer (Ye et al., arXiv 2501.01005,
section 3.1.2) for cascades over pages.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from tierd.kernels.fitting import prefill_rows
from tierd.kernels.library import Library
from tierd.kernels.paged import Chunks, merge_parts, paged_prefill
from tierd.kernels.pages import KvPages
from tierd.kernels.pool import Pool, placed
from tierd.kernels.reference import Attended, PagedBatch

Array = Any
"""A numpy array or a torch tensor."""
PART_TOKENS = 256
"""A part has at least so many tokens, else its queries and outputs are more bytes than its keys."""
THREAD_BLOCKS = 256
"""Parts are made until so many thread blocks share the work: about two for each multiprocessor."""


class SharedParts:
    """The shared prefixes of one batch, placed once for all layers."""

    def __init__(self, library: Library, pool: Pool, batch: PagedBatch, q: Array) -> None:
        """batch: with shared pages. q: queries of it, of a library with `take`."""
        kv_heads = pool.first.shape[3]
        self._parts = count_parts(batch, pool.page_tokens, q_heads=q.shape[1], kv_heads=kv_heads, head_dim=q.shape[2])
        cut = cut_prefixes(batch, pool.page_tokens, parts=self._parts, kv_heads=kv_heads)
        rows = [batch.query_starts[i] for prefix in batch.shared for i in prefix.sequences]
        self._library, self._batch = library, pool.batch(cut, q)
        self._longest = max(len(prefix.sequences) for prefix in batch.shared)
        self._starts = placed(np.asarray(cut.query_starts, np.int32), q)
        self._rows, self._repeated = (placed(np.array(some, np.int64), q) for some in (rows, rows * self._parts))

    def merge(self, q: Array, kv: KvPages, scale: float | None, to: Attended) -> None:
        """Adds the shared pages to attention over each sequence's own pages. q: dense, of a type
        beside these pages."""
        xp, count, each = array_namespace(q), self._parts, (self._rows.shape[0], *q.shape[1:])
        outs = xp.empty((count + 1, *each), dtype=q.dtype, device=device(q))
        lses = xp.empty((count + 1, *each[:2]), dtype=xp.float32, device=device(q))
        parts = Attended(xp.reshape(outs[:count], (-1, *each[1:])), xp.reshape(lses[:count], (-1, each[1])))
        chunks = Chunks(xp.take(q, self._repeated, axis=0), self._starts, self._longest)
        paged_prefill(self._library, chunks, kv, replace(self._batch, scale=scale), parts)
        outs[count], lses[count] = to.out[self._rows], to.lse[self._rows]
        whole = Attended(xp.empty_like(outs[count]), xp.empty_like(lses[count]))
        merge_parts(self._library, outs, lses, whole)
        to.out[self._rows], to.lse[self._rows] = whole.out, whole.lse


def count_parts(batch: PagedBatch, page_tokens: int, *, q_heads: int, kv_heads: int, head_dim: int) -> int:
    """How many parts each shared prefix is cut into."""
    rows = [len(prefix.sequences) * q_heads // kv_heads for prefix in batch.shared]
    blocks = kv_heads * sum(-(-count // prefill_rows(head_dim)) for count in rows)
    tokens = max(prefix.pages for prefix in batch.shared) * page_tokens
    return max(1, min(tokens // PART_TOKENS, THREAD_BLOCKS // blocks))


def cut_prefixes(batch: PagedBatch, page_tokens: int, *, parts: int, kv_heads: int) -> PagedBatch:
    """A group's queries over each part of its shared pages, as sequences of a prefill.

    There queries are the last tokens of their sequence. So any page is named for them behind a
    part, and subsets hide it: each query sees the part alone, and all of it.
    """
    cut = [
        (len(prefix.sequences), pages.tolist())
        for groups in zip(
            *(np.array_split(list(batch.tables[p.sequences[0]][: p.pages]), parts) for p in batch.shared), strict=True
        )
        for prefix, pages in zip(batch.shared, groups, strict=True)
    ]
    return PagedBatch(
        [0, *accumulate(count for count, _ in cut)],
        [len(pages) * page_tokens + count for count, pages in cut],
        [pages + [batch.tables[batch.shared[0].sequences[0]][0]] * -(-count // page_tokens) for count, pages in cut],
        subsets=[[range(len(pages))] * kv_heads for _, pages in cut],
    )
