"""Models that share blocks, models that must not, and models that tierd refuses."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-engines has environments for it")
pytest.importorskip("torch", reason="torch is not installed: make test-engines has environments for it")

import torch
import transformers

from tests.engines.hf.models import SHAPE, llama, prompt
from tests.engines.hf.said import say
from tierd.errors import ConfigError, InvalidArgument, Unsupported
from tierd.integrations.transformers import TierdCache, TierdStore, weights_digest
from tierd.integrations.versions import WINDOWS, Window

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"dtype": "bfloat16"},
        {"attention": "eager"},
        {"rms_norm_eps": 1e-3},
        {"salt": "b"},
        {"adapter": "b"},
    ],
    ids=str,
)
def test_what_divides(change: dict[str, Any], model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Other weights, dtype, attention, configuration, salt or adapter restore nothing; an equal
    model restores all."""
    one, ids = model(), prompt(1)
    cache = TierdCache(store(one))
    say(one, ids, cache=cache)
    assert cache.save(ids) == 96
    given = {name: value for name, value in change.items() if name in ("salt", "adapter")}
    rest = {name: value for name, value in change.items() if name not in given}
    assert TierdCache.restore(store(llama(**rest), **given), ids).restored == 0
    assert TierdCache.restore(store(llama()), ids).restored == 96


def test_weights_that_change() -> None:
    """One bit of a weight, or a buffer, changes the digest; an equal model has the same digest."""
    one, other = llama(), llama()
    digest = weights_digest(one)
    assert digest == weights_digest(other)
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight.view(torch.int32)[3, 4] ^= 1
    assert weights_digest(other) != digest
    one.model.rotary_emb.inv_freq *= 2
    assert weights_digest(one) != digest


def test_a_digest_of_ones_own(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """tierd uses a given weights_digest and computes nothing; weights on device 'meta' need one."""
    assert store(model(), weights_digest="revision 7").spec.weights_digest == "revision 7"
    with torch.device("meta"):
        absent = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    with pytest.raises(InvalidArgument, match="is on device 'meta'.*weights_digest of your own"):
        weights_digest(absent)


def test_models_that_are_refused() -> None:
    """Linear attention, encoders, length-dependent rotations and unknown options are errors with a remedy."""
    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    linear = transformers.Qwen3NextConfig(
        **small,
        intermediate_size=32,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
    )
    with pytest.raises(Unsupported, match="layers of kind linear_attention.*use DynamicCache"):
        TierdStore(transformers.Qwen3NextForCausalLM(linear))
    both = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(Unsupported, match="t5 reads more than tokens"):
        TierdStore(transformers.T5ForConditionalGeneration(both))
    by_length = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(Unsupported, match="rope_type dynamic.*use DynamicCache"):
        TierdStore(llama(rope_parameters=by_length))
    with pytest.raises(ConfigError, match="TierdStore.blocksize"):
        TierdStore(llama(), blocksize=16)


def test_a_version_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers version outside the window is refused, with a sentence, when a name is imported."""
    monkeypatch.setitem(WINDOWS, "transformers", Window((6, 0), (7, 0), ran=("6.0",)))
    with pytest.raises(
        Unsupported, match=rf"transformers {transformers.__version__}: tierd supports transformers>=6.0,<7.0"
    ):
        importlib.import_module("tierd.integrations.transformers").__getattr__("TierdCache")
