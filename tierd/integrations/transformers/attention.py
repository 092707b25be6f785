"""`attn_implementation="tierd_paged"`: attention that reads K and V where they lie, in pages.

Purpose: transformers' attention interface over tierd's paged kernel. Non-purpose: which pages (paged.py hands them over, a layer at a time). Invariants: with a
cache that has no pages the same kernel reads the K and V that it gives, so any call of the model is right; what the kernel cannot mask is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from tierd.errors import Unsupported
from tierd.kernels import Attended, PagedBatch, paged_attention

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


def kernel_for(_: torch.device) -> Callable[..., Attended]:
    """The seam: which kernel attends to pages for queries on that device. Only the reference so far."""
    return paged_attention


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
    attended = kernel_for(query.device)(rows, written.pages, batch, scale=more.get("scaling")).out
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
    """All K and V of a cache that has no pages, one page a row; padding is moved behind the row's tokens."""
    starts = padding_of(mask, len(key))
    both = torch.stack((key, value), dim=1).transpose(2, 3)
    pages = [row.roll(-start, dims=1) for row, start in zip(both, starts, strict=True)]
    return Written(-1, pages, [[i] for i in range(len(pages))], [key.shape[2] - start for start in starts])


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
