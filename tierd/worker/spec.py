"""The shape of a Llama-type model, from its config.json.

Everything else derives from this one value, except weights. A model that this code cannot compute
exactly (another activation, biases, another rope) is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierd.core.formats.block import KVGeometry
from tierd.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The `llama3` rope stretching: long waves slowed by factor, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LlamaSpec:
    """Sizes and constants of a Llama-type model. tied: the head is the embedding."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    max_positions: int = 2048

    def checked(self) -> LlamaSpec:
        """The spec itself. Raises ConfigError for sizes that do not fit each other."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "q_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model.{name}: {getattr(self, name)} is below 1; the checkpoint's config.json is damaged"
                )
        if self.q_heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"model: {self.q_heads} query heads on {self.kv_heads} kv heads of {self.head_dim} channels; "
                "query heads must be a multiple of kv heads and channels even"
            )
        return self

    def geometry(self, dtype: str) -> KVGeometry:
        """The KV geometry of this model for a dtype."""
        return KVGeometry(self.layers, self.kv_heads, self.head_dim, dtype)

    def tensor_shapes(self) -> dict[str, Shape]:
        """Name and shape of every tensor that a checkpoint of this model must hold."""
        hidden = self.hidden_size
        shapes: dict[str, Shape] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in self._layer_shapes().items()}
        return shapes

    def _layer_shapes(self) -> dict[str, Shape]:
        hidden, wide = self.hidden_size, self.intermediate_size
        q, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }


def spec_from_config(config: Mapping[str, Any]) -> LlamaSpec:
    """The spec of a Hugging Face config.json. Raises ConfigError for a model that this worker does
    not compute."""
    _refuse_foreign(config)
    try:
        heads = int(config["num_attention_heads"])
        rope = _rope(config)
        return LlamaSpec(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            q_heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=int(config.get("max_position_embeddings", 2048)),
        ).checked()
    except (KeyError, TypeError, ValueError) as fault:
        raise ConfigError(
            f"config.json: {fault!r} while reading the model's shape; it is no complete Llama config"
        ) from fault


def _refuse_foreign(config: Mapping[str, Any]) -> None:
    wanted: dict[str, tuple[Any, ...]] = {
        "model_type": ("llama",),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
    }
    for key, values in wanted.items():
        if config.get(key) not in values:
            raise ConfigError(
                f"config.json {key}: {config.get(key)!r} is not computed by this worker, only {values[0]!r}"
            )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rope settings: `rope_parameters` of newer files, `rope_scaling` of older ones."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return dict(rope)


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(
            f"config.json rope type: {kind!r} is not computed by this worker, only 'default' and 'llama3'"
        )
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )
