"""`attn_implementation="tierd_paged"`: attention that reads K and V where they lie, in pages.

Purpose: transformers' attention interface over tierd's paged kernel. Non-purpose: which pages (paged.py hands them over, a layer at a time). Invariants: with a
cache that has no pages the same kernel reads the K and V that it gives, so any call of the model is right; what the kernel cannot mask is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from threading import get_ident
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from tierd.core.formats.block import KVGeometry
from tierd.errors import ConfigError, Unsupported
from tierd.kernels import PagedAttention, PagedBatch, paged_attention
from tierd.kernels.fitting import TILE_TOKENS
from tierd.kernels.library import REFERENCE, asked_kernels
from tierd.worker.attention import attention_over
from tierd.worker.backend import Backend
from tierd.worker.pages import PageShape

logger = logging.getLogger(__name__)
NAME = "tierd_paged"
UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some models ask of attention and the kernel does not do."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a cache has just written of one layer. pages: of all rows, [2, page_tokens, kv_heads, head_dim] each; tables: per row, which; lengths: tokens of each
    row."""

    layer: int
    pages: Sequence[Any]
    tables: Sequence[Sequence[int]]
    lengths: Sequence[int]


WRITTEN: ContextVar[Written | None] = ContextVar("tierd_written", default=None)
"""From a paged cache's update() to the attention of the same layer, which follows it: transformers does not give the cache to attention."""
PADDING: ContextVar[Any] = ContextVar("tierd_padding", default=None)
"""From the mask of a call of the model to the caches that are filled in it: bool [rows, columns], or None."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the choice of a kernel depends on. thread: of the caller, since a kernel is of one; kernels: what the environment asks for; place: where pages lie;
    shape: of pages, with what computes the queries."""

    thread: int
    kernels: str
    shape: PageShape
    place: str
    q_heads: int


def kernel_for(query: torch.Tensor, pages: Sequence[torch.Tensor]) -> PagedAttention:
    """What attends to pages, [2, page_tokens, kv_heads, head_dim] each, for queries [rows, heads, head_dim]: by TIERD_KERNELS, as in a worker.

    Raises ConfigError and Unsupported for emulated kernels that cannot attend. Where a GPU's cannot the reference does, which is said once.
    """
    kernels = asked_kernels()
    if kernels == REFERENCE or not len(pages):
        return paged_attention
    page = pages[0]
    _, page_tokens, kv_heads, head_dim = page.shape
    geometry = KVGeometry(1, kv_heads, head_dim, str(page.dtype).removeprefix("torch."))
    # To kernels all multiples are alike; K and V without pages have another length each step.
    shape = PageShape(
        geometry, page_tokens if page_tokens % TILE_TOKENS else TILE_TOKENS, Backend("torch", device=str(query.device))
    )
    return _chosen(Asked(get_ident(), kernels, shape, str(page.device), query.shape[1]))


@lru_cache(maxsize=64)
def _chosen(asked: Asked) -> PagedAttention:
    try:
        _check_place(asked)
        return attention_over(asked.shape, q_heads=asked.q_heads, backend=asked.shape.backend)
    except (ConfigError, Unsupported) as fault:
        if asked.kernels:
            raise
        _say(f"{NAME}: the reference attends, which is slow: {fault}")
        return paged_attention


def _check_place(asked: Asked) -> None:
    backend = asked.shape.backend
    if backend.has_kernels and asked.place != backend.device:
        raise Unsupported(f"kernels: pages lie on {asked.place}, queries on {backend.device}")


@lru_cache(maxsize=64)
def _say(text: str) -> None:
    logger.warning(text)


def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> tuple[Any, None]:
    """transformers' attention function. query: [rows, heads, tokens, head_dim]; gives [rows, tokens, heads, head_dim]. more: scaling, and what the
    kernel may not know. Raises Unsupported."""
    written = WRITTEN.get()
    WRITTEN.set(None)
    _check(module, attention_mask, more)
    if written is None or written.layer != module.layer_idx:
        written = _loose(key, value, attention_mask)
    new = query.shape[2]
    counts = [min(new, length) for length in written.lengths]  # the others are padding
    rows = torch.cat([row[:, new - count :].transpose(0, 1) for row, count in zip(query, counts, strict=True)])
    batch = PagedBatch([0, *accumulate(counts)], written.lengths, written.tables)
    attended = kernel_for(rows, written.pages)(rows, written.pages, batch, scale=more.get("scaling")).out
    out = query.new_zeros((len(query), new, *attended.shape[1:]))
    for row, count, part in zip(out, counts, attended.split(counts), strict=True):
        row[new - count :] = part
    return out, None


def pass_padding(*, mask_function: Any, attention_mask: Any = None, **_: Any) -> Any:
    """transformers' mask function: which columns are padding on the left is all that the kernel need be told. Raises Unsupported for any other mask.

    It is asked for where a call of the model begins: what a call has written that did not end is forgotten.
    """
    WRITTEN.set(None)
    if mask_function is not causal_mask_function:
        raise Unsupported(
            f"{NAME}: the model masks more than what comes later (windows, chunks, packed sequences); the kernel does causal attention over a whole"
            " sequence: use attn_implementation='sdpa'"
        )
    if attention_mask is not None and _has_gaps(attention_mask.bool()):
        raise Unsupported(
            f"{NAME}: attention_mask has zeros after a one; pad on the left, or use attn_implementation='sdpa'"
        )
    PADDING.set(attention_mask)
    return attention_mask


def padding_of(mask: Any, rows: int) -> list[int]:
    """Columns of padding on the left of each row."""
    return [0] * rows if mask is None else (~mask.bool()).sum(dim=1).tolist()


def _has_gaps(mask: Any) -> bool:
    return bool((mask[:, :-1] & ~mask[:, 1:]).any())


def _loose(key: Any, value: Any, mask: Any) -> Written:
    """All K and V of a cache that has no pages, one page a row, as long as kernels take them; padding is moved behind the row's tokens."""
    starts = padding_of(mask, len(key))
    both = torch.nn.functional.pad(torch.stack((key, value), dim=1), (0, 0, 0, -key.shape[2] % TILE_TOKENS))
    # In one tensor, since one call of a kernel reaches no pages that lie far apart.
    pages = torch.stack([row.roll(-start, dims=1) for row, start in zip(both.transpose(2, 3), starts, strict=True)])
    return Written(-1, list(pages), [[i] for i in range(len(pages))], [key.shape[2] - start for start in starts])


def _check(module: Any, mask: Any, more: dict[str, Any]) -> None:
    asked = [name for name in UNKNOWN if more.get(name) is not None]
    if not getattr(module, "is_causal", True):
        asked.append("is_causal=False")
    if mask is not None and mask.ndim != 2:
        asked.append(f"an attention_mask of {mask.ndim} dimensions")
    if asked:
        raise Unsupported(
            f"{NAME}: {type(module).__name__} asks for {', '.join(asked)}; the kernel does causal attention over a whole sequence: use attn_implementation='sdpa'"
        )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, pass_padding)
