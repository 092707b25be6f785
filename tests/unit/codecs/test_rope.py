"""RoPE of the codecs is that of the models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.codecs.rope import Frequencies, rotate
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.model import Llama, rope_frequencies
from tierd.worker.spec import LlamaSpec, RopeScaling

SPEC = LlamaSpec(vocab_size=64, hidden_size=32, intermediate_size=48, layers=1, q_heads=4, kv_heads=2, head_dim=8)
STRETCHED = LlamaSpec(
    **{**{name: getattr(SPEC, name) for name in SPEC.__slots__}, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)}
)


def keys_of(model: Llama, tokens: list[int], positions: list[int]) -> np.ndarray:
    """Keys of the first layer as the model stores them: [tokens, kv_heads, head_dim]."""
    kept = []

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        kept.append(k)
        return q

    model.hidden(np.array(tokens), np.array(positions), attend)
    return np.asarray(kept[0])


@pytest.mark.parametrize("spec", [SPEC, STRETCHED], ids=["plain", "stretched"])
@pytest.mark.parametrize("position", [0, 5, 900])
def test_keys_are_those_of_the_worker(spec: LlamaSpec, position: int) -> None:
    """Keys at position 0, turned to their positions, are the keys that the worker stores there."""
    model, tokens = Llama(random_checkpoint(spec, scale=0.5)), [3, 1, 4, 1, 5]
    there = keys_of(model, tokens, list(range(position, position + 5)))
    plain = keys_of(model, tokens, [0] * 5)
    frequencies: Frequencies = np.array(rope_frequencies(spec), dtype=np.float64)
    assert np.allclose(rotate(plain, position, frequencies), there, atol=2e-4 * np.abs(plain).max())
    assert np.allclose(rotate(there, position, frequencies, undo=True), plain, atol=2e-4 * np.abs(plain).max())


@given(position=st.integers(0, 1 << 20), seed=st.integers(0, 99), pairs=st.integers(1, 4))
def test_a_turn_is_undone(position: int, seed: int, pairs: int) -> None:
    """Undone, keys are as before; lengths stay, and channels beyond the pairs are not touched."""
    keys = np.random.default_rng(seed).standard_normal((2, 3, 2, 8)).astype(np.float32)
    frequencies: Frequencies = 10.0 ** -np.arange(pairs, dtype=np.float64)
    turned = rotate(keys, position, frequencies)
    assert np.allclose(rotate(turned, position, frequencies, undo=True), keys, atol=1e-5)
    assert np.allclose((turned**2).sum(-1), (keys**2).sum(-1), rtol=1e-5)
    assert np.array_equal(turned[..., 2 * pairs :], keys[..., 2 * pairs :])
