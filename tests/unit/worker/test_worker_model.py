"""The model's mathematics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tierd.errors import ConfigError, Unsupported
from tierd.kernels import PagedBatch, paged_attention
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import RawTensor, random_checkpoint
from tierd.worker.model import Llama, rope_frequencies
from tierd.worker.spec import LlamaSpec, RopeScaling

SPEC = LlamaSpec(vocab_size=64, hidden_size=32, intermediate_size=48, layers=2, q_heads=4, kv_heads=2, head_dim=8)


def attend_whole(layer: int, q: Any, k: Any, v: Any) -> Any:
    """Attention over the rows of the pass alone."""
    page = np.stack([k, v]) if isinstance(k, np.ndarray) else __import__("torch").stack([k, v])
    return paged_attention(q, [page], PagedBatch([0, len(q)], [len(q)], [[0]])).out


def logits_of(model: Llama, tokens: list[int], first_position: int = 0) -> Any:
    """Logits after every token."""
    positions = list(range(first_position, first_position + len(tokens)))
    return model.logits(model.hidden(model.backend.ints(tokens), model.backend.ints(positions), attend_whole))


def test_attention_depends_on_distances_only() -> None:
    """Rotation makes attention depend only on distances: shifting all positions changes no logit."""
    model = Llama(random_checkpoint(SPEC, scale=0.2))
    np.testing.assert_allclose(logits_of(model, [1, 2, 3], 0), logits_of(model, [1, 2, 3], 40), rtol=0, atol=1e-4)


def test_order_matters() -> None:
    """The same tokens in another order give other logits at the end."""
    model = Llama(random_checkpoint(SPEC, scale=0.2))
    assert np.abs(logits_of(model, [1, 2, 3])[-1] - logits_of(model, [2, 1, 3])[-1]).max() > 1e-2


def test_later_tokens_do_not_change_earlier_logits() -> None:
    """The model is causal."""
    model = Llama(random_checkpoint(SPEC, scale=0.2))
    np.testing.assert_allclose(
        logits_of(model, [5, 6, 7, 8])[:2], logits_of(model, [5, 6, 9, 1])[:2], rtol=0, atol=1e-5
    )


def test_llama3_rope_slows_long_waves_only() -> None:
    """Waves up to original / high stay, those above original / low shrink by factor, the rest are between."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    wide = replace(SPEC, head_dim=128, rope_theta=5e5)
    plain, scaled = rope_frequencies(wide), rope_frequencies(replace(wide, rope_scaling=scaling))
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.any() and np.all((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8))


def test_a_tied_head_is_the_embedding() -> None:
    """Tied and untied models agree when the untied head holds the embedding's values."""
    untied = random_checkpoint(SPEC, scale=0.2)
    tensors = dict(untied.tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tied = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    a = Llama(replace(untied, tensors=tensors))
    b = Llama(replace(untied, spec=replace(SPEC, tied=True), tensors=tied))
    np.testing.assert_array_equal(logits_of(a, [1, 2]), logits_of(b, [1, 2]))


def test_torch_computes_what_numpy_computes() -> None:
    """One implementation, two libraries: equal logits to float32 rounding."""
    pytest.importorskip("torch", reason="torch is not installed")
    checkpoint = random_checkpoint(SPEC, scale=0.2)
    numpy_logits = logits_of(Llama(checkpoint), [1, 2, 3, 4])
    torch_logits = logits_of(Llama(checkpoint, Backend("torch")), [1, 2, 3, 4])
    np.testing.assert_allclose(torch_logits, numpy_logits, rtol=0, atol=1e-4)


def test_torch_loads_bf16_bit_for_bit() -> None:
    """A stored bfloat16 weight reaches torch unchanged, with the same value that numpy reads."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    raw = RawTensor("BF16", (3,), np.array([0x3F80, 0xC049, 0x4012], dtype="<u2").view(np.uint8))
    got = Backend("torch", "bfloat16").weight(raw)
    assert got.dtype == torch.bfloat16
    np.testing.assert_array_equal(got.to(torch.float32).numpy(), raw.float32())


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("writable", [True, False])
def test_a_page_is_its_buffer(library: str, writable: bool) -> None:
    """A page's array shows later changes of its buffer: it is no copy."""
    if library == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    geometry = SPEC.geometry("float32")
    memory = bytearray(4096)
    page = Backend(library).page(memory if writable else memoryview(memory).toreadonly(), geometry=geometry, tokens=4)
    assert tuple(page.shape) == (2, 2, 4, 2, 8)
    np.frombuffer(memory, dtype=np.float32)[2 * 8 + 3] = 7.0
    assert float(page[0, 0, 1, 0, 3]) == 7.0


def test_what_a_backend_cannot_do_is_said() -> None:
    """Unknown libraries, types and devices raise ConfigError; bfloat16 pages on numpy Unsupported."""
    for wrong in (("jax",), ("numpy", "bfloat16"), ("numpy", "float32", "meta")):
        with pytest.raises(ConfigError):
            Backend(*wrong)
    with pytest.raises(Unsupported):
        Backend().page(bytearray(4096), geometry=SPEC.geometry("bfloat16"), tokens=4)
    with pytest.raises(ConfigError):
        Backend().page(bytearray(4096), geometry=SPEC.geometry("int3"), tokens=4)
