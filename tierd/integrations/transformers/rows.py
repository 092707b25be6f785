"""The sequences of a batch, apart from their padding.

Purpose: input_ids and attention_mask as sequences of tokens, each with where it begins. Non-purpose: K and V. Invariant: a sequence is without gaps; what is
not left padding is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Row:
    """tokens: int64 [n], without padding; start: columns of padding before them."""

    tokens: NDArray[np.int64]
    start: int = 0


def rows_of(input_ids: Any, attention_mask: Any = None) -> list[Row]:
    """Of a list of tokens, or a tensor or list [n] or [rows, n], and its mask. Raises InvalidArgument for gaps and padding on the right."""
    ids = _matrix(input_ids, "input_ids")
    mask = np.ones(ids.shape, dtype=np.int64) if attention_mask is None else _matrix(attention_mask, "attention_mask")
    if mask.shape[0] != ids.shape[0] or mask.shape[1] > ids.shape[1]:
        raise InvalidArgument(
            f"attention_mask: {mask.shape} for input_ids {ids.shape}; give the one that generate() is given"
        )
    starts = (mask == 0).sum(axis=1)
    if (mask != (np.arange(mask.shape[1]) >= starts[:, None])).any():
        raise InvalidArgument("attention_mask: zeros after a one; pad on the left (tokenizer.padding_side = 'left')")
    return [Row(tokens[start:], start) for tokens, start in zip(ids, starts.tolist(), strict=True)]


def _matrix(given: Any, name: str) -> NDArray[np.int64]:
    array = np.asarray(given.cpu() if hasattr(given, "cpu") else given, dtype=np.int64)
    if array.ndim not in (1, 2):
        raise InvalidArgument(f"{name}: {array.ndim} dimensions instead of 1 or 2; give one sequence, or one a row")
    return array.reshape(-1, array.shape[-1])
