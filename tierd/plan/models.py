"""Shapes of models: what a token keeps in each layer.

Well-known models are a table. Others come from the `config.json` of Hugging Face's transformers.

A layer keeps keys and values of all tokens (multi-head, grouped-query and multi-query attention),
one latent vector a token (multi-head latent attention: DeepSeek-AI, arXiv 2405.04434, section 2.1),
those of the last tokens alone (a window), or a state whose size does not grow.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierd.errors import InvalidArgument

STATE_BYTES = 4
"""Of a value of a recurrent state; engines keep it in float32."""
CONFIG_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of one kind. values: of a token in one layer. window: tokens that are kept, 0: all.
    state_bytes: of a request in one layer, whatever its length."""

    count: int
    values: int = 0
    window: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """parameters: all of them. active: those that compute one token. heads x head_dim: of queries.
    context: tokens at most. parameters: 0 if unknown."""

    name: str
    layers: tuple[Layers, ...]
    heads: int
    head_dim: int
    context: int
    parameters: float = 0.0
    active: float = 0.0

    @property
    def token_values(self) -> int:
        """Values of a token in all layers, before any window."""
        return sum(layer.count * layer.values for layer in self.layers)

    def request_values(self, tokens: int) -> int:
        """Values that a request of so many tokens keeps, states aside."""
        return sum(
            layer.count * layer.values * (min(tokens, layer.window) if layer.window else tokens)
            for layer in self.layers
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's states."""
        return sum(layer.count * layer.state_bytes for layer in self.layers)

    @property
    def attended_layers(self) -> int:
        """Layers whose cost of a token grows with the context."""
        return sum(layer.count for layer in self.layers if layer.values and not layer.window)


def model_of(name: str) -> Model:
    """A well-known model, or the one of a config.json or of its folder. Raises InvalidArgument."""
    if name in KNOWN:
        return KNOWN[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise InvalidArgument(
            f"--model: {name!r} is neither a file nor known; give a config.json, or one of {', '.join(KNOWN)}"
        )
    try:
        config = json.loads(path.read_bytes()[:CONFIG_LIMIT_BYTES])
    except ValueError as error:
        raise InvalidArgument(f"--model: {path} is not JSON ({error}); give a model's config.json") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"--model: {path} holds no object; give a model's config.json")
    try:
        return of_config(config, name=path.resolve().parent.name)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise InvalidArgument(
            f"--model: {path} lacks a number that KV depends on ({error}); give the config.json of a decoder"
        ) from error


def of_config(config: Mapping[str, Any], *, name: str) -> Model:
    """The model of a `config.json`. Raises KeyError, TypeError for one without the numbers."""
    if "num_hidden_layers" not in config and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if config.get("kv_lora_rank"):
        values = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        head_dim = config["kv_lora_rank"]
    else:
        values = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    kinds = Counter(_kinds(config))
    found = {
        "full": Layers(kinds["full"], values),
        "window": Layers(kinds["window"], values, window=config.get("sliding_window") or 0),
        "state": Layers(kinds["state"], state_bytes=_state_bytes(config) if kinds["state"] else 0),
    }
    layers = tuple(layer for layer in found.values() if layer.count)
    parameters, active = _parameters(config, heads * (config.get("head_dim") or head_dim))
    return Model(name, layers, heads, head_dim, config.get("max_position_embeddings") or 0, parameters, active)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Of each layer: full, window or state."""
    count, kind = config["num_hidden_layers"], str(config.get("model_type", ""))
    types = config.get("layer_types") or config.get("layers_block_type")
    if types:
        return [
            "full" if "full" in one or one in ("attention", "hybrid") else "window" if "sliding" in one else "state"
            for one in types
        ]
    if interval := config.get("full_attention_interval"):
        return ["state" if (i + 1) % interval else "full" for i in range(count)]
    if period := config.get("attn_layer_period"):
        return ["full" if i % period == config.get("attn_layer_offset", 0) else "state" for i in range(count)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full"] * count
    if pattern := config.get("sliding_window_pattern") or (2 if kind == "gemma2" else 0):
        return ["window" if (i + 1) % pattern else "full" for i in range(count)]
    first = config.get("max_window_layers", 0) if kind.startswith("qwen") else 0
    return ["full" if i < first else "window" for i in range(count)]


def _state_bytes(config: Mapping[str, Any]) -> int:
    """Of one layer of linear attention, or of a state space model, with its convolution's inputs."""
    if "linear_num_value_heads" in config:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        taps = config.get("linear_conv_kernel_dim", 4) - 1
        return int(STATE_BYTES * values * config["linear_key_head_dim"] + 2 * taps * (2 * keys + values))
    inner = config.get("mamba_expand", 2) * config["hidden_size"]
    return int(inner * (STATE_BYTES * config["mamba_d_state"] + 2 * config["mamba_d_conv"]))


def _parameters(config: Mapping[str, Any], attended: int) -> tuple[float, float]:
    """All parameters and those active for a token, by the matrices; 0 twice if they are not of the
    usual form. attended: query heads times their width."""
    try:
        hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        vocabulary = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    except KeyError:
        return 0.0, 0.0
    shared = (config.get("num_key_value_heads") or config["num_attention_heads"]) / config["num_attention_heads"]
    attention = 2 * hidden * attended * (1 + (0.0 if config.get("kv_lora_rank") else shared))
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
    chosen = config.get("num_experts_per_tok") or 0
    width = 3 * hidden * (config.get("moe_intermediate_size") or inner)
    dense = 3 * hidden * inner
    mixed = (experts * width, chosen * width) if experts else (dense, dense)
    whole, some = (vocabulary + count * (attention + one) for one in mixed)
    return float(whole), float(some)


def _plain(name: str, count: int, kv_heads: int, heads: int, *, billions: float, **other: Any) -> Model:
    """A model of full layers. width: of a head."""
    width = other.get("width", 128)
    full = Layers(count, 2 * kv_heads * width)
    active = other.get("active", billions)
    return Model(name, (full,), heads, width, other.get("context", 131_072), billions * 1e9, active * 1e9)


def _windowed(model: Model, *, windowed: int, window: int) -> Model:
    """The same with so many of its layers windowed."""
    full = model.layers[0]
    some = replace(full, count=windowed, window=window)
    return replace(
        model, layers=(*([replace(full, count=full.count - windowed)] if full.count > windowed else []), some)
    )


_MODELS = (
    _plain("llama-2-7b", 32, 32, 32, billions=6.74, context=4096),
    _plain("llama-2-13b", 40, 40, 40, billions=13.0, context=4096),
    _plain("llama-2-70b", 80, 8, 64, billions=69.0, context=4096),
    _plain("llama-3-8b", 32, 8, 32, billions=8.03),
    _plain("llama-3-70b", 80, 8, 64, billions=70.6),
    _plain("llama-3.1-405b", 126, 8, 128, billions=405.9),
    _windowed(_plain("mistral-7b-v0.1", 32, 8, 32, billions=7.24, context=32_768), windowed=32, window=4096),
    _plain("mixtral-8x7b", 32, 8, 32, billions=46.7, active=12.9, context=32_768),
    _plain("qwen2.5-7b", 28, 4, 28, billions=7.62),
    _plain("qwen2.5-72b", 80, 8, 64, billions=72.7),
    _plain("qwen3-8b", 36, 8, 32, billions=8.19, context=40_960),
    _plain("qwen3-32b", 64, 8, 64, billions=32.8, context=40_960),
    _plain("qwen3-235b-a22b", 94, 4, 64, billions=235.0, active=22.0, context=40_960),
    _windowed(_plain("gemma-2-9b", 42, 8, 16, billions=9.24, width=256, context=8192), windowed=21, window=4096),
    _windowed(_plain("gemma-3-27b", 62, 16, 32, billions=27.4), windowed=52, window=1024),
    _windowed(_plain("gpt-oss-120b", 36, 8, 64, billions=116.8, active=5.1, width=64), windowed=18, window=128),
    Model("deepseek-v3", (Layers(61, 512 + 64),), 128, 512, 163_840, 671e9, 37e9),
    Model(
        "qwen3-next-80b-a3b",
        (Layers(12, 2 * 2 * 256), Layers(36, state_bytes=4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128))),
        16,
        256,
        262_144,
        80e9,
        3e9,
    ),
)
KNOWN = {model.name: model for model in _MODELS}
"""By the names that people use."""
