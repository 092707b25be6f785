"""A Llama-type transformer, once, for numpy and torch alike.

It maps token ids and positions to hidden states and logits. The caller passes the attention, which
stores keys and values; it is called once per layer. Rows are independent except in that function,
so one call may contain several sequences. Norms, rotation angles and logits are float32 at any
precision of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from tierd.worker.backend import Backend
from tierd.worker.checkpoint import Checkpoint
from tierd.worker.spec import LlamaSpec

Array = Any
"""A numpy array or a torch tensor."""

Attend = Callable[[int, Array, Array, Array], Array]
"""(layer, q [rows, q_heads, head_dim], k and v [rows, kv_heads, head_dim]) -> out, shaped like q.

The model rotates q and k. The caller first stores k and v, then attends over all that a row may
see.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; each matrix is [out, in]. q, k and v are one product, gate and up another."""

    norm: Array
    qkv: Array
    out: Array
    mlp_norm: Array
    gate_up: Array
    down: Array


class Llama:
    """The model: `hidden` then `logits`."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend | None = None) -> None:
        """Loads every weight. Raises ConfigError or Unsupported (see Backend)."""
        self.spec: LlamaSpec = checkpoint.spec
        self.backend = backend or Backend()
        self.digest = checkpoint.digest
        self._embedding = self._weight(checkpoint, "model.embed_tokens")
        self._norm = self._weight(checkpoint, "model.norm")
        self._head = self._embedding if self.spec.tied else self._weight(checkpoint, "lm_head")
        self.layers = [self._layer(checkpoint, i) for i in range(self.spec.layers)]
        self._frequencies = self.backend.floats(rope_frequencies(self.spec))

    def hidden(self, tokens: Array, positions: Array, attend: Attend) -> Array:
        """int64 [rows] each -> hidden states [rows, hidden_size] after the last layer, before the last norm."""
        xp = array_namespace(tokens)
        x = xp.take(self._embedding, tokens, axis=0)
        angles = xp.astype(positions, xp.float32)[:, None] * self._frequencies[None, :]
        cos, sin = xp.cos(angles)[:, None, :], xp.sin(angles)[:, None, :]
        for index, layer in enumerate(self.layers):
            heads, v = self._heads(self._normed(x, layer.norm) @ layer.qkv.T)
            turned = _rotate(heads, cos, sin)
            mixed = attend(index, turned[:, : self.spec.q_heads], turned[:, self.spec.q_heads :], v)
            x = x + xp.reshape(mixed, (x.shape[0], -1)) @ layer.out.T
            wide = self._normed(x, layer.mlp_norm) @ layer.gate_up.T
            half = self.spec.intermediate_size
            x = x + (self._silu(wide[:, :half]) * wide[:, half:]) @ layer.down.T
        return x

    def logits(self, hidden: Array) -> NDArray[np.float32]:
        """[rows, hidden_size] -> float32 [rows, vocab_size] on the host."""
        return self.backend.to_numpy(self.scores(hidden))

    def scores(self, hidden: Array) -> Array:
        """The logits where the model computes."""
        return self._normed(hidden, self._norm) @ self._head.T

    def kv_bounds(self) -> NDArray[np.float32]:
        """Bounds of each head's keys and values for any tokens: float32 [layers, 2, kv_heads], keys
        first.

        Before its gains a normed row is at most sqrt(hidden_size) long. Its product with a row of
        weights is at most that times the row's length (Cauchy and Schwarz). A rotation of two
        channels gives at most the length of both.
        """
        spec = self.spec
        bounds = []
        for layer in self.layers:
            rows = layer.qkv[spec.q_heads * spec.head_dim :] * layer.norm
            xp = array_namespace(rows)
            rows = xp.astype(rows, xp.float32, copy=False)
            lengths = self.backend.to_numpy(xp.sqrt(xp.sum(rows * rows, axis=-1)))
            keys, values = lengths.reshape(2, spec.kv_heads, spec.head_dim)
            half = spec.head_dim // 2
            bounds.append([np.hypot(keys[:, :half], keys[:, half:]).max(-1), values.max(-1)])
        return np.asarray(bounds, np.float32) * np.float32(math.sqrt(spec.hidden_size))

    def _normed(self, x: Array, weight: Array) -> Array:
        """torch has one kernel for it."""
        torch, eps = self.backend.torch, self.spec.rms_eps
        return (
            _rms_norm(x, weight, eps) if torch is None else torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
        )

    def _silu(self, x: Array) -> Array:
        torch = self.backend.torch
        return _silu(x) if torch is None else torch.nn.functional.silu(x)

    def _heads(self, qkv: Array) -> tuple[Array, Array]:
        """Splits [rows, (q_heads + 2 kv_heads) * head_dim] into heads of q and k, and those of v."""
        spec = self.spec
        heads = array_namespace(qkv).reshape(qkv, (qkv.shape[0], spec.q_heads + 2 * spec.kv_heads, spec.head_dim))
        return heads[:, : spec.q_heads + spec.kv_heads], heads[:, spec.q_heads + spec.kv_heads :]

    def _weight(self, checkpoint: Checkpoint, name: str) -> Array:
        return self.backend.weight(checkpoint.tensors[f"{name}.weight"])

    def _layer(self, checkpoint: Checkpoint, index: int) -> Layer:
        def joined(*names: str) -> Array:
            parts = [self._weight(checkpoint, f"model.layers.{index}.{name}") for name in names]
            return parts[0] if len(parts) == 1 else array_namespace(*parts).concat(parts, axis=0)

        return Layer(
            norm=joined("input_layernorm"),
            qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out=joined("self_attn.o_proj"),
            mlp_norm=joined("post_attention_layernorm"),
            gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
            down=joined("mlp.down_proj"),
        )


def rope_frequencies(spec: LlamaSpec) -> NDArray[np.float32]:
    """Radians per position of each pair of channels: float32 [head_dim / 2], as in training."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    plain: NDArray[np.float32] = (np.float32(1.0) / np.float32(spec.rope_theta) ** exponents).astype(np.float32)
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    # Llama 3.1: waves longer than original / low are slowed by factor; those under original / high
    # stay.
    turns = scaling.original_max_positions * plain / np.float32(2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    mixed: NDArray[np.float32] = ((1 - kept) * plain / scaling.factor + kept * plain).astype(np.float32)
    return mixed


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    xp = array_namespace(x)
    wide = xp.astype(x, xp.float32, copy=False)
    scale = 1.0 / xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return xp.astype(wide * scale, x.dtype, copy=False) * weight


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates channels i and i + head_dim / 2 of [rows, heads, head_dim]; cos, sin: float32 [rows,
    1, head_dim / 2]."""
    xp = array_namespace(x)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return xp.astype(xp.concat([a * cos - b * sin, b * cos + a * sin], axis=-1), x.dtype, copy=False)


def _silu(x: Array) -> Array:
    """x * sigmoid(x); by tanh, which never overflows."""
    xp = array_namespace(x)
    return x * (0.5 * xp.tanh(0.5 * x) + 0.5)
