"""A model's runs for a measurement: a prefix to KV, and continuations over given KV.

KV is bfloat16 as an engine stores it: keys after RoPE. Weights and attention are float32, on numpy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.values import Floats, Raw, floats_of, rounded
from tierd.quality.windows import Tokens
from tierd.worker.model import Attend, Llama
from tierd.worker.tokens.choice import TokenChoice
from tierd.worker.tokens.forced import Prompt, attention_for

DTYPE = "bfloat16"
CHUNK = 256
"""Queries attended at a time: later keys are then not computed in vain."""

LEAST_SCORE = np.float32(-60)
"""Below the greatest score of a query. Its weight of e^-60 changes no sum, and it is a normal number:
subnormal ones take ten times as long."""


class Prefix(NamedTuple):
    """raw: uint16 [layers, 2, tokens, kv_heads, head_dim]. queries: of each layer, float32 [tokens,
    q_heads, head_dim]."""

    raw: Raw
    queries: list[Floats]


def prefill(model: Llama, tokens: Tokens) -> Prefix:
    """The KV of a sequence from its first token on."""
    spec, count = model.spec, len(tokens)
    raw = np.empty((spec.layers, 2, count, spec.kv_heads, spec.head_dim), np.uint16)
    queries = []

    def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        queries.append(q)
        raw[layer] = rounded(np.stack((k, v)), DTYPE)
        keys, values = floats_of(raw[layer], DTYPE)
        chunks = range(0, count, CHUNK)
        return np.concatenate([attended(q[at : at + CHUNK], keys[: at + CHUNK], values[: at + CHUNK]) for at in chunks])

    model.hidden(tokens, np.arange(count), attend)
    return Prefix(raw, queries)


def predictions(model: Llama, prefix: Prefix, ways: NDArray[np.int64], policy: TokenChoice | None = None) -> Floats:
    """Log-probabilities of each next token over a prefix: float32 [ways, tokens, vocab].

    ways: int64 [ways, tokens], continuations of the prefix that do not see each other. policy: the
    tokens that they attend to; None: all. Raises InvalidArgument for an impossible policy.
    """
    count, tokens = ways.shape
    start = prefix.raw.shape[2]
    attends = [_over(prefix, model, policy) for _ in range(count)]

    def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        own = floats_of(rounded(np.stack((k, v)), DTYPE), DTYPE)
        rows = [slice(way * tokens, (way + 1) * tokens) for way in range(count)]
        return np.concatenate([over(layer, q[r], *own[:, r]) for over, r in zip(attends, rows, strict=True)])

    positions = np.tile(np.arange(start, start + tokens), count)
    scores = model.logits(model.hidden(ways.reshape(-1), positions, attend))
    scores -= scores.max(axis=-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return scores.reshape(count, tokens, -1)


def _over(prefix: Prefix, model: Llama, policy: TokenChoice | None) -> Attend:
    """Attention of one continuation over a prefix and itself."""
    if policy is not None:
        keys, values = (list(floats_of(prefix.raw[:, pair], DTYPE)) for pair in (0, 1))
        return attention_for(policy, Prompt(prefix.queries, keys, values), model.spec)

    def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        keys, values = np.concatenate((floats_of(prefix.raw[layer], DTYPE), np.stack((k, v))), axis=1)
        return attended(q, keys, values)

    return attend


def attended(q: Floats, keys: Floats, values: Floats) -> Floats:
    """Causal attention of the sequence's last tokens. q: float32 [rows, q_heads, head_dim]; keys, values:
    float32 [tokens, kv_heads, head_dim] of the whole sequence. Returns the shape of q."""
    rows, q_heads, dim = q.shape
    tokens, heads, _ = keys.shape
    grouped = (q * np.float32(1 / math.sqrt(dim))).reshape(rows, heads, -1, dim).transpose(1, 2, 0, 3)
    weights = grouped.reshape(heads, -1, dim) @ keys.transpose(1, 2, 0)
    weights = weights.reshape(heads, -1, rows, tokens)
    is_later = np.arange(rows) > np.arange(rows)[:, None]
    weights[..., tokens - rows :] += np.where(is_later, np.float32(-np.inf), np.float32(0))
    weights -= weights.max(axis=-1, keepdims=True)
    np.maximum(weights, LEAST_SCORE, out=weights)
    np.exp(weights, out=weights)
    flat = weights.reshape(heads, -1, tokens)
    out = flat @ values.transpose(1, 0, 2) / flat.sum(axis=-1, keepdims=True)
    return np.ascontiguousarray(out.reshape(heads, -1, rows, dim).transpose(2, 0, 1, 3)).reshape(rows, q_heads, dim)
