"""Reading config.json."""

from __future__ import annotations

from typing import Any

import pytest

from tierd.errors import ConfigError
from tierd.worker.spec import RopeScaling, spec_from_config

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_what_is_left_out_has_its_usual_value() -> None:
    """Without GQA, head_dim and rope settings a config means plain multi-head attention with theta 10000."""
    spec = spec_from_config(PLAIN)
    assert (spec.kv_heads, spec.head_dim, spec.rope_theta, spec.rope_scaling) == (4, 16, 10000.0, None)
    assert not spec.tied


@pytest.mark.parametrize(
    "extra",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALED}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALED}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **SCALED}},
    ],
    ids=["older", "oldest", "newer"],
)
def test_rope_is_read_from_every_generation_of_files(extra: dict[str, Any]) -> None:
    """rope_scaling and rope_parameters mean the same."""
    spec = spec_from_config(PLAIN | extra)
    assert (spec.rope_theta, spec.rope_scaling) == (5e5, RopeScaling(8.0, 1.0, 4.0, 64))


@pytest.mark.parametrize(
    "extra",
    [
        {"model_type": "qwen2"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"num_key_value_heads": 3},
        {"hidden_size": None},
        {"vocab_size": 0},
    ],
)
def test_what_cannot_be_computed_exactly_is_refused(extra: dict[str, Any]) -> None:
    """A model outside the implementation, or a damaged config, raises ConfigError."""
    with pytest.raises(ConfigError):
        spec_from_config(PLAIN | extra)
