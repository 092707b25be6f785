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
MOST_NUMBER, MOST_LAYERS = 1 << 30, 1 << 12
PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Every so many layers, one is without a window, where the file does not say so."""
UNCOUNTED = (
    "hybrid_override_pattern",
    "block_configs",
    "linear_attn_config",
    "num_kv_shared_layers",
    "num_global_key_value_heads",
    "index_head_dim",
)
"""Keys of layers whose KV is not that of `num_hidden_layers` equal ones."""


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
    """parameters: all of them, 0 if unknown. active: those that compute one token.

    heads: of queries. head_dim: the mean width of their keys and values. context: tokens at most.
    weight_bits: of a parameter, as published."""

    name: str
    layers: tuple[Layers, ...]
    heads: int
    head_dim: int
    context: int
    parameters: float = 0.0
    active: float = 0.0
    weight_bits: float = 16.0

    @property
    def weight_bytes(self) -> float:
        """Of all parameters."""
        return self.parameters * self.weight_bits / 8

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
        with path.open("rb") as file:
            text = file.read(CONFIG_LIMIT_BYTES + 1)
        if len(text) > CONFIG_LIMIT_BYTES:
            raise InvalidArgument(f"--model: {path} is above {CONFIG_LIMIT_BYTES} bytes; give a model's config.json")
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"--model: {path} is not JSON ({error}); give a model's config.json") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"--model: {path} holds no object; give a model's config.json")
    try:
        return of_config(config, name=path.resolve().parent.name)
    except ValueError as error:
        raise InvalidArgument(
            f"--model: {path}: {error}; give a decoder's config.json, or a known model of its size"
        ) from error


def of_config(config: Mapping[str, Any], *, name: str) -> Model:
    """The model of a `config.json`. Raises ValueError, which names the key."""
    if "num_hidden_layers" not in config and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    for key in UNCOUNTED:
        if config.get(key):
            raise ValueError(f"{key} changes what layers keep, and this release does not count it")
    heads = _number(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        rank, turned = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
        values = rank + turned
        plain = _number(config, "qk_nope_head_dim", 128)
        head_dim = (plain + turned + _number(config, "v_head_dim", plain)) // 2
    else:
        head_dim = _number(config, "head_dim", 0) or _number(config, "hidden_size") // heads
        values = 2 * _kv_heads(config, heads) * head_dim
    if not head_dim:
        raise ValueError(f"num_attention_heads is {heads}, above hidden_size")
    kinds = Counter(_kinds(config))
    window = _number(config, "sliding_window", 0) or _number(config, "attention_chunk_size", 0)
    found = {
        "full": Layers(kinds["full"], values),
        "window": Layers(kinds["window"], values, window=window),
        "state": Layers(kinds["state"], state_bytes=_state_bytes(config) if kinds["state"] else 0),
    }
    layers = tuple(layer for layer in found.values() if layer.count)
    parameters, active = _parameters(config, heads * head_dim)
    return Model(name, layers, heads, head_dim, _number(config, "max_position_embeddings", 0), parameters, active)


def _number(config: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    """A whole number; `otherwise` if it is missing, null or 0. Raises ValueError."""
    value = config.get(key)
    if value is None or (value == 0 and otherwise is not None):
        if otherwise is None:
            raise ValueError(f"{key} is missing")
        return otherwise
    is_whole = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= MOST_NUMBER or value != int(value):
        raise ValueError(f"{key} is {str(value)[:40]!r}, no whole number from 1 to {MOST_NUMBER}")
    return int(value)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """Falcon's files say otherwise that all queries share one."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _number(config, "num_key_value_heads", _number(config, "num_kv_heads", heads))


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Of each layer: full, window or state. Raises ValueError."""
    count, kind = _number(config, "num_hidden_layers"), str(config.get("model_type", ""))
    if count > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {count}, above {MOST_LAYERS}")
    if types := config.get("layer_types") or config.get("layers_block_type"):
        if not isinstance(types, list) or len(types) != count or not all(isinstance(one, str) for one in types):
            raise ValueError(f"layer_types is no list of {count} names, one for each layer")
        return [_kind(one) for one in types]
    if interval := _number(config, "full_attention_interval", 0):
        return ["state" if (i + 1) % interval else "full" for i in range(count)]
    if period := _number(config, "attn_layer_period", 0):
        return ["full" if i % period == _number(config, "attn_layer_offset", 0) else "state" for i in range(count)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full"] * count
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if pattern := _number(config, key, PATTERNS.get(kind, 0)):
            return ["window" if (i + 1) % pattern else "full" for i in range(count)]
    first = _number(config, "max_window_layers", 0) if kind.startswith("qwen") else 0
    return ["full" if i < first else "window" for i in range(count)]


def _kind(name: str) -> str:
    """Of a layer, by its name in the file."""
    if "full" in name or name in ("attention", "hybrid"):
        return "full"
    return "window" if "sliding" in name or "chunked" in name else "state"


def _state_bytes(config: Mapping[str, Any]) -> int:
    """Of one layer of linear attention, or of a state space model, with its convolution's inputs."""
    if "linear_num_value_heads" in config:
        width = _number(config, "linear_key_head_dim")
        keys = _number(config, "linear_num_key_heads") * width
        values = _number(config, "linear_num_value_heads") * _number(config, "linear_value_head_dim")
        taps = _number(config, "linear_conv_kernel_dim", 4) - 1
        return STATE_BYTES * values * width + 2 * taps * (2 * keys + values)
    inner = _number(config, "mamba_expand", 2) * _number(config, "hidden_size")
    return inner * (STATE_BYTES * _number(config, "mamba_d_state") + 2 * _number(config, "mamba_d_conv"))


def _parameters(config: Mapping[str, Any], attended: int) -> tuple[float, float]:
    """All parameters and those active for a token, by the matrices; 0 twice if they are not of the
    usual form. attended: query heads times their width. Raises ValueError."""
    inner, vocabulary = _number(config, "intermediate_size", 0), _number(config, "vocab_size", 0)
    experts = next(
        (n for key in ("num_local_experts", "num_experts", "n_routed_experts") if (n := _number(config, key, 0))), 0
    )
    chosen = _number(config, "num_experts_per_tok", 0) if experts else 0
    if not inner or not vocabulary or (experts and not chosen):
        return 0.0, 0.0
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    shared = 0.0 if config.get("kv_lora_rank") else _kv_heads(config, heads) / heads
    attention = 2 * hidden * attended * (1 + shared)
    width = 3 * hidden * _number(config, "moe_intermediate_size", inner)
    dense = 3 * hidden * inner
    tables = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    mixed = (experts * width, chosen * width) if experts else (dense, dense)
    whole, some = (tables + _number(config, "num_hidden_layers") * (attention + one) for one in mixed)
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
    _plain("llama-3-8b", 32, 8, 32, billions=8.03, context=8192),
    _plain("llama-3-70b", 80, 8, 64, billions=70.6, context=8192),
    _plain("llama-3.1-8b", 32, 8, 32, billions=8.03),
    _plain("llama-3.1-70b", 80, 8, 64, billions=70.6),
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
    replace(
        _windowed(_plain("gpt-oss-120b", 36, 8, 64, billions=116.8, active=5.1, width=64), windowed=18, window=128),
        weight_bits=4.25,
    ),
    Model("deepseek-v3", (Layers(61, 512 + 64),), 128, 160, 163_840, 671e9, 37e9, weight_bits=8.0),
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
