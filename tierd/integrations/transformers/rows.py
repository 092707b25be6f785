"""The sequences of a batch without their padding.

They come from input_ids and attention_mask, each with its start. A sequence has no gaps; padding
not on the left is refused. Without a mask, padding is the one that generate() would assume; if that
is ambiguous, a mask is required. A row ends if generate() would mask a token amid it: tokens alone
do not determine the rest.
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


@dataclass(frozen=True, slots=True)
class Padding:
    """token: of padding, -1 if the model has none. is_only_padding: no other use, so generate()
    masks it."""

    token: int = -1
    is_only_padding: bool = False


def padding_of(model: Any) -> Padding:
    """The padding that generate() assumes."""
    config = getattr(model, "generation_config", None) or model.config
    pad, eos = config.pad_token_id, config.eos_token_id
    return Padding() if pad is None else Padding(pad, pad not in (eos if isinstance(eos, list) else [eos]))


def rows_of(input_ids: Any, attention_mask: Any, padding: Padding) -> list[Row]:
    """Rows of a list of tokens, or a tensor or list [n] or [rows, n], and its mask.

    Raises InvalidArgument for gaps, and for padding on the right or ambiguous padding.
    """
    ids = _matrix(input_ids, "input_ids")
    starts = (
        _guessed(ids, padding) if attention_mask is None else _starts_of(ids, _matrix(attention_mask, "attention_mask"))
    )
    ends = _ends(ids, starts, padding) if attention_mask is None else np.full(len(ids), ids.shape[1])
    return [Row(tokens[i:j], i) for tokens, i, j in zip(ids, starts.tolist(), ends.tolist(), strict=True)]


def _guessed(ids: NDArray[np.int64], padding: Padding) -> NDArray[np.int64]:
    leading = (ids == padding.token).cumprod(axis=1).sum(axis=1)
    if padding.is_only_padding:
        return np.asarray(leading)
    if leading.max(initial=0) > 1 or len(set(leading.tolist())) > 1:
        raise InvalidArgument(
            f"attention_mask: missing, and rows begin with token {padding.token}, for padding and end alike; pass it"
        )
    return np.zeros_like(leading)


def _ends(ids: NDArray[np.int64], starts: NDArray[np.int64], padding: Padding) -> NDArray[np.int64]:
    """Each row's end: the next padding after its start, which generate() would mask, or the row's end."""
    again = (ids == padding.token) & (np.arange(ids.shape[1]) >= starts[:, None]) & padding.is_only_padding
    return np.asarray(np.where(again.any(axis=1), again.argmax(axis=1), ids.shape[1]))


def _starts_of(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.int64]:
    if mask.shape[0] != ids.shape[0] or mask.shape[1] > ids.shape[1]:
        raise InvalidArgument(
            f"attention_mask: {mask.shape} for input_ids {ids.shape}; give the one that generate() is given"
        )
    starts = (mask == 0).sum(axis=1)
    if (mask != (np.arange(mask.shape[1]) >= starts[:, None])).any():
        raise InvalidArgument("attention_mask: zeros after a one; pad on the left (tokenizer.padding_side = 'left')")
    return np.asarray(starts)


def _matrix(given: Any, name: str) -> NDArray[np.int64]:
    array = np.asarray(given.cpu() if hasattr(given, "cpu") else given, dtype=np.int64)
    if array.ndim not in (1, 2):
        raise InvalidArgument(f"{name}: {array.ndim} dimensions instead of 1 or 2; give one sequence, or one a row")
    return array.reshape(-1, array.shape[-1])
