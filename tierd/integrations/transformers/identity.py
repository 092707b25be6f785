"""The shape of a model's K and V, and everything that decides their bytes.

It builds a model's NamespaceSpec. The model itself shows the shapes by computing one token. The
namespace contains all that changes K and V for equal tokens: weights, configuration, dtype,
attention, release, device. A model whose K and V depend on more than tokens is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs

from tierd.core.formats.block import KVGeometry, NamespaceSpec
from tierd.errors import InvalidArgument, Unsupported
from tierd.integrations.facts import EngineFacts
from tierd.integrations.transformers.options import StoreOptions

KEPT_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose whole K and V are all their state."""
LENGTH_ROPES = ("dynamic", "longrope")
"""Rotations that depend on the whole sequence's length: a prefix has other K in a longer one."""
UNNAMED = {"_name_or_path", "name_or_path", "transformers_version", "architectures", "use_cache"}
"""Entries of a configuration that do not change the computation."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K [rows, kv_heads, tokens, head_dim], and V with value_dim, of one layer. dtype, device: torch's."""

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V for one token."""
        return self.kv_heads * (self.head_dim + self.value_dim) * int(self.dtype.itemsize)


def check_supported(model: Any) -> None:
    """Raises Unsupported, before anything is computed, for a model whose state tierd does not store."""
    config = model.config
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        raise Unsupported(
            f"transformers: {config.model_type} reads more than tokens, and tierd names K and V by tokens: use a"
            " text-only decoder"
        )
    kinds, _ = get_layer_types_and_kwargs(config)
    if unknown := sorted(set(kinds) - KEPT_LAYERS):
        raise Unsupported(
            f"transformers: {config.model_type} has layers of kind {', '.join(unknown)}; TierdCache keeps {', '.join(sorted(KEPT_LAYERS))}: use DynamicCache"
        )
    if lengths := sorted(_rope_types(config) & set(LENGTH_ROPES)):
        raise Unsupported(
            f"transformers: {config.model_type} rotates K by the whole sequence's length (rope_type "
            f"{', '.join(lengths)}), which a prefix does not determine: use DynamicCache"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise Unsupported(
            f"transformers: tensor parallel over {model.tp_size} processes; TierdCache keeps whole heads: load without tp_plan"
        )


def _rope_types(config: Any) -> set[str]:
    """Rope types of all layers, or of each kind."""
    given = getattr(config, "rope_parameters", None) or {}
    parts = [given, *(part for part in given.values() if isinstance(part, dict))]
    return {str(part.get("rope_type")) for part in parts}


def shapes_of(model: Any) -> tuple[LayerShape, ...]:
    """Shapes of each layer, which the model shows by computing one token."""
    seen = DynamicCache()
    token = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    with torch.no_grad():
        model(input_ids=token, past_key_values=seen, use_cache=True)
    return tuple(
        LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype, layer.keys.device)
        for layer in seen.layers
    )


def weights_digest(model: Any) -> str:
    """Digest of every parameter and buffer, with names and types.

    Computed once a TierdStore, at about memory speed. Raises InvalidArgument for weights on "meta".
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda named: named[0]):
        if tensor.is_meta:
            raise InvalidArgument(
                f"weights_digest: {name} is on device 'meta', its values are elsewhere; give TierdStore a weights_digest of your own"
            )
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def spec_of(model: Any, shapes: Sequence[LayerShape], options: StoreOptions) -> NamespaceSpec:
    """The namespace. Raises InvalidArgument as weights_digest does."""
    return NamespaceSpec(
        model=options.model or name_of(model),
        weights_digest=options.weights_digest or weights_digest(model),
        tokens_per_block=options.tokens_per_block,
        block_bytes=options.tokens_per_block * sum(shape.token_bytes for shape in shapes),
        adapter=options.adapter,
        salt=hashlib.sha256(
            json.dumps(_words(model, shapes, options), sort_keys=True, default=str).encode()
        ).hexdigest(),
        geometry=geometry_of(shapes),
    )


def geometry_of(shapes: Sequence[LayerShape]) -> KVGeometry:
    """Geometry of blocks whose layers are all alike; opaque if they are not."""
    first = shapes[0]
    if any(astuple(shape)[:4] != astuple(first)[:4] for shape in shapes) or first.head_dim != first.value_dim:
        return KVGeometry()
    return KVGeometry(len(shapes), first.kv_heads, first.head_dim, word_of(first.dtype))


def name_of(model: Any) -> str:
    """A name to display."""
    return Path(model.config.name_or_path).name or str(model.config.model_type)


def word_of(dtype: torch.dtype) -> str:
    """tierd's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def facts_of(model: Any, shapes: Sequence[LayerShape], options: StoreOptions) -> EngineFacts:
    """The facts that `tierctl engines` shows."""
    return EngineFacts(
        engine="transformers",
        version=transformers.__version__,
        face="TierdCache",
        model=options.model or name_of(model),
        tokens_per_block=str(options.tokens_per_block),
        dtype=word_of(shapes[0].dtype),
        layout="NHD",
    )


def _words(model: Any, shapes: Sequence[LayerShape], options: StoreOptions) -> dict[str, Any]:
    """Further facts that decide a block's bytes."""
    return {
        "face": "transformers",
        "release": ".".join(transformers.__version__.split(".")[:2]),
        "config": {name: value for name, value in model.config.to_dict().items() if name not in UNNAMED},
        "attention": model.config._attn_implementation,
        "layers": [(*astuple(shape)[:3], word_of(shape.dtype), shape.device.type) for shape in shapes],
        "salt": options.salt,
    }
