"""`attn_implementation="tierd_paged"`: attention that reads K and V in place, in pages.

It implements transformers' attention interface with tierd's paged kernel; paged.py passes the
pages, a layer at a time. With a cache without pages, the same kernel reads that cache's K and V, so
any call of the model is right. A mask that the kernel cannot apply is refused.
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
"""Options of some models' attention that the kernel does not support."""


@dataclass(frozen=True, slots=True)
class Written:
    """The latest K and V that a cache wrote for one layer.

    pages: of all rows, [2, page_tokens, kv_heads, head_dim] each. tables: per row, its pages.
    lengths: tokens of each row.
    """

    layer: int
    pages: Sequence[Any]
    tables: Sequence[Sequence[int]]
    lengths: Sequence[int]


WRITTEN: ContextVar[Written | None] = ContextVar("tierd_written", default=None)
"""Passed from a paged cache's update() to the attention of the same layer, which follows.
transformers does not pass the cache to attention."""
PADDING: ContextVar[Any] = ContextVar("tierd_padding", default=None)
"""bool [rows, columns] or None: passed from a model call's mask to the caches filled in it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """thread: of the caller, since a kernel is for one thread. kernels: from the environment.
    place: device of the pages. shape: of pages, with the queries' backend."""

    thread: int
    kernels: str
    shape: PageShape
    place: str
    q_heads: int


def kernel_for(query: torch.Tensor, pages: Sequence[torch.Tensor]) -> PagedAttention:
    """The kernel for pages [2, page_tokens, kv_heads, head_dim] and queries [rows, heads,
    head_dim].

    TIERD_KERNELS chooses it, as in a worker. Raises ConfigError and Unsupported for emulated
    kernels that cannot attend. If a GPU's cannot, the reference attends and one warning says so.
    """
    kernels = asked_kernels()
    if kernels == REFERENCE or not len(pages):
        return paged_attention
    page = pages[0]
    _, page_tokens, kv_heads, head_dim = page.shape
    geometry = KVGeometry(1, kv_heads, head_dim, str(page.dtype).removeprefix("torch."))
    # Kernels treat all multiples alike; K and V without pages change their length each step.
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
        _say(f"{NAME}: the slow reference attention is used: {fault}")
        return paged_attention


def _check_place(asked: Asked) -> None:
    backend = asked.shape.backend
    if backend.has_kernels and asked.place != backend.device:
        raise Unsupported(f"kernels: pages are on {asked.place}, queries on {backend.device}; put both on one device")


@lru_cache(maxsize=64)
def _say(text: str) -> None:
    logger.warning(text)


def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> tuple[Any, None]:
    """transformers' attention function. query: [rows, heads, tokens, head_dim]; returns [rows,
    tokens, heads, head_dim]. more: scaling, and options that the kernel may lack. Raises
    Unsupported."""
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
    """transformers' mask function, called at the start of a model call.

    The kernel only needs the padding on the left. Raises Unsupported for any other mask. Forgets
    the writes of a call that did not end.
    """
    WRITTEN.set(None)
    if mask_function is not causal_mask_function:
        raise Unsupported(
            f"{NAME}: the model masks more than later tokens (windows, chunks, packed sequences); the kernel does"
            " causal attention over a whole sequence: use attn_implementation='sdpa'"
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
    """All K and V of a cache without pages, one page a row. Padding moves behind the row's tokens."""
    starts = padding_of(mask, len(key))
    both = torch.nn.functional.pad(torch.stack((key, value), dim=1), (0, 0, 0, -key.shape[2] % TILE_TOKENS))
    # In one tensor, since one kernel call reaches no pages that lie far apart.
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
