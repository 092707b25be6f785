"""A model's answer to a prompt, and the distance between two answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NEW_TOKENS = 12
TOUCH = 1e-4
"""Of the largest logit; smaller differences count as equal. A prefill in other pieces sums in
another order."""


@dataclass(frozen=True)
class Answer:
    """tokens: int64 [rows, prompt and answer]; logits: float32 [steps, rows, vocab]."""

    tokens: Any
    logits: Any


def say(model: Any, ids: Any, *, cache: Any = None, mask: Any = None, **how: Any) -> Answer:
    """Runs generate() greedily for NEW_TOKENS tokens. how: more of its arguments."""
    import torch

    given = {"past_key_values": cache} if cache is not None else {}
    mask = torch.ones_like(ids) if mask is None else mask
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | how
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **given, **how)
    return Answer(out.sequences, torch.stack(list(out.logits)).float())


def far_from(one: Answer, other: Answer) -> float:
    """The largest difference between their logits, as a share of the largest logit."""
    return float((one.logits - other.logits).abs().max() / one.logits.abs().max())


def assert_same(one: Answer, other: Answer) -> None:
    """Both have the same tokens, and logits within TOUCH."""
    assert one.tokens.tolist() == other.tokens.tolist()
    assert far_from(one, other) <= TOUCH
