"""Keys and values of calibration text, with what the model's loss says of their errors.

With torch each key and value has its gradient of the loss. Without torch come queries and output
weights. Codecs fit their tables to these samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.calibration import Samples
from tierd.codecs.rope import rotate
from tierd.codecs.values import Floats
from tierd.errors import InvalidArgument, Unsupported
from tierd.worker.backend import Array, Backend
from tierd.worker.checkpoint import open_checkpoint
from tierd.worker.model import Llama, rope_frequencies

QUERIES_PER_WINDOW = 64
"""Queries kept of each window and layer."""


def samples(
    model_dir: str | Path, windows: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None
) -> Samples:
    """Runs the model over each window of token ids, from position 0. progress: called with windows done.

    Raises ConfigError for a damaged checkpoint, InvalidArgument for windows below 2 tokens or none.
    """
    if not windows or min(map(len, windows)) < 2:
        raise InvalidArgument("calibration: a window has fewer than 2 tokens, or there is none; give longer text")
    try:
        backend = Backend("torch")
    except Unsupported:
        backend = Backend()
    model = Llama(open_checkpoint(model_dir), backend)
    with_torch = backend.torch is not None
    frequencies = rope_frequencies(model.spec).astype(np.float64)
    values, beside = [], []
    for done, window in enumerate(windows, 1):
        found = _gradients(model, window) if with_torch else _queries(model, window)
        values.append(_before_rope(found[0], frequencies))
        beside.append(_before_rope(found[1], frequencies) if with_torch else _few(found[1], frequencies))
        if progress is not None:
            progress(done)
    geometry = model.spec.geometry("bfloat16")
    if with_torch:
        return Samples(geometry, frequencies, np.concatenate(values, 2), gradients=np.concatenate(beside, 2))
    outputs = np.stack([backend.to_numpy(layer.out) for layer in model.layers])
    queries = np.concatenate(beside, 1)
    return Samples(geometry, frequencies, np.concatenate(values, 2), queries=queries, outputs=outputs)


def _gradients(model: Llama, window: Sequence[int]) -> tuple[Floats, Floats]:
    """Rotated keys and values, and gradients of the loss by them: float32 [layers, 2, tokens, heads, dim]."""
    torch, spec, count = model.backend.torch, model.spec, len(window)
    zeros = torch.zeros((spec.layers, 2, count, spec.kv_heads, spec.head_dim), device=model.backend.device)
    change = zeros.requires_grad_()
    kept: list[Array] = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        k, v = k + change[layer, 0], v + change[layer, 1]
        kept.append(torch.stack((k, v)).detach())
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    tokens = model.backend.ints(window)
    scores = model.scores(model.hidden(tokens, model.backend.ints(range(count)), attend))
    torch.nn.functional.cross_entropy(scores[:-1].float(), tokens[1:], reduction="sum").backward()
    return model.backend.to_numpy(torch.stack(kept)), model.backend.to_numpy(change.grad)


def _queries(model: Llama, window: Sequence[int]) -> tuple[Floats, Floats]:
    """Rotated keys and values as above, and rotated queries: float32 [layers, tokens, q_heads, dim]."""
    kept, queries = [], []

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        kept.append(np.stack((k, v)))
        queries.append(q)
        return _causal(q, k, v)

    model.hidden(model.backend.ints(window), model.backend.ints(range(len(window))), attend)
    return np.stack(kept), np.stack(queries)


def _causal(q: Floats, k: Floats, v: Floats) -> Floats:
    """Attention of one sequence over itself: q [tokens, q_heads, dim], k and v [tokens, kv_heads, dim]."""
    count, heads, dim = q.shape
    grouped = q.reshape(count, k.shape[1], -1, dim).transpose(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * np.float32(1 / math.sqrt(dim))
    scores[..., np.triu(np.ones((count, count), bool), k=1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: Floats = (weights / weights.sum(axis=-1, keepdims=True)) @ v.transpose(1, 0, 2)[:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(count, heads, dim)


def _before_rope(pairs: Floats, frequencies: NDArray[np.float64]) -> Floats:
    """The same with keys, or gradients by them, turned back."""
    return np.stack((rotate(pairs[:, 0], 0, frequencies, undo=True), pairs[:, 1]), axis=1)


def _few(queries: Floats, frequencies: NDArray[np.float64]) -> Floats:
    """Queries of evenly spaced tokens, turned back."""
    return rotate(queries, 0, frequencies, undo=True)[:, :: -(-queries.shape[1] // QUERIES_PER_WINDOW)]
