"""A model's runs for a measurement: a prefix to KV, and continuations over given KV.

KV is bfloat16 as an engine stores it: keys after RoPE. Weights and attention are float32, on numpy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.values import Floats, Raw, floats_of, rounded
from tierd.quality.windows import Tokens
from tierd.worker.model import Llama

DTYPE = "bfloat16"
CHUNK = 256
"""Queries attended at a time: later keys are then not computed in vain."""

LEAST_SCORE = np.float32(-60)
"""Below the greatest score of a query. Its weight of e^-60 changes no sum, and it is a normal number:
subnormal ones take ten times as long."""


def prefill(model: Llama, tokens: Tokens) -> Raw:
    """The KV of a sequence from its first token on: uint16 [layers, 2, tokens, kv_heads, head_dim]."""
    spec, count = model.spec, len(tokens)
    raw = np.empty((spec.layers, 2, count, spec.kv_heads, spec.head_dim), np.uint16)

    def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        raw[layer] = rounded(np.stack((k, v)), DTYPE)
        keys, values = floats_of(raw[layer], DTYPE)
        chunks = range(0, count, CHUNK)
        return np.concatenate([attended(q[at : at + CHUNK], keys[: at + CHUNK], values[: at + CHUNK]) for at in chunks])

    model.hidden(tokens, np.arange(count), attend)
    return raw


def predictions(model: Llama, raw: Raw, ways: NDArray[np.int64]) -> Floats:
    """Log-probabilities of each next token over the KV of a prefix. ways: int64 [ways, tokens], continuations of
    the same prefix that do not see each other. Returns float32 [ways, tokens, vocab]."""
    count, tokens = ways.shape
    start = raw.shape[2]

    def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        own = floats_of(rounded(np.stack((k, v)), DTYPE), DTYPE)
        stored = floats_of(raw[layer], DTYPE)
        outs = []
        for way in range(count):
            rows = slice(way * tokens, (way + 1) * tokens)
            keys, values = np.concatenate((stored, own[:, rows]), axis=1)
            outs.append(attended(q[rows], keys, values))
        return np.concatenate(outs)

    positions = np.tile(np.arange(start, start + tokens), count)
    scores = model.logits(model.hidden(ways.reshape(-1), positions, attend))
    scores -= scores.max(axis=-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return scores.reshape(count, tokens, -1)


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
