"""vLLM's KV cache groups as namespaces, which decide if blocks of equal hash hold equal bytes.

Each group has one NamespaceSpec and a rule for the blocks needed to serve N tokens. Locations of
blocks are in memory.py. The namespace contains everything that changes a block's bytes or the
meaning of vLLM's hash. These hashes contain tokens, `cache_salt`, pictures and the names and paths
of LoRA adapters. The state of an adapter's files is in tierd's names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    KVCacheSpecKind,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

from tierd.client import Group, KVGeometry, NamespaceSpec, OpenedNamespace
from tierd.core.formats.model import Need
from tierd.errors import Unsupported
from tierd.integrations.coding import Codings
from tierd.integrations.facts import EngineFacts
from tierd.integrations.vllm.identity import dtype_of, engine_words, model_words
from tierd.integrations.vllm.options import ConnectorOptions
from tierd.integrations.vllm.values import geometry_of

WHOLE = (
    KVCacheSpecKind.FULL_ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION,
    KVCacheSpecKind.SINK_FULL_ATTENTION,
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
)
"""Kinds that need every block."""
WINDOWS = (KVCacheSpecKind.SLIDING_WINDOW, KVCacheSpecKind.SLIDING_WINDOW_MLA)
REPLICATED = (KVCacheSpecKind.MLA_ATTENTION, KVCacheSpecKind.SLIDING_WINDOW_MLA)
"""Kinds that every tensor parallel rank holds whole."""


@dataclass(frozen=True, slots=True)
class Space:
    """A group's number in vLLM, namespace and needed blocks. hashes_per_block: of vLLM's block hashes."""

    index: int
    spec: NamespaceSpec
    need: Need = Need.PREFIX
    need_tokens: int = 0
    hashes_per_block: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.spec.tokens_per_block

    def blocks(self, hashes: Sequence[bytes], *, tokens: int) -> int:
        """Blocks that have a name and end within so many tokens."""
        return min(len(hashes) // self.hashes_per_block, tokens // self.tokens)

    def names(self, hashes: Sequence[bytes], *, tokens: int) -> tuple[bytes, ...]:
        """vLLM's names of these blocks. A block's name is the hash of its last hashed piece."""
        size = self.hashes_per_block
        return tuple(hashes[size - 1 : self.blocks(hashes, tokens=tokens) * size : size])

    def group(self, opened: OpenedNamespace, names: Sequence[bytes], *, ranks: tuple[int, ...], request: str) -> Group:
        """Blocks to look up or load; without hashes while there is no daemon. request: vLLM's id."""
        hashes = opened.fold(names)
        return Group(opened, hashes, ranks=ranks, need=self.need, need_tokens=self.need_tokens, request=request)


def spaces_of(config: Any, kv: Any, options: ConnectorOptions, *, salt: str = "") -> tuple[Space, ...]:
    """One Space for each group of a KVCacheConfig. `salt` separates further. Raises Unsupported for
    kinds that tierd does not store, ConfigError for a codec that cannot encode them."""
    check_supported(config, kv)
    words = _words(config, kv, options) | {"salt": salt}
    return tuple(
        _space(config, (index, group), options, words=words, kv=kv) for index, group in enumerate(kv.kv_cache_groups)
    )


def stamped(names: Sequence[bytes], stamp: bytes) -> tuple[bytes, ...]:
    """tierd's names of blocks, from vLLM's."""
    return tuple(name + stamp for name in names)


def check_supported(config: Any, kv: Any) -> None:
    """Raises Unsupported, before anything is stored, if KV would not load back unchanged."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise Unsupported(
            f"vllm: pipeline_parallel_size {parallel.pipeline_parallel_size}, decode_context_parallel_size {parallel.decode_context_parallel_size}; "
            "TierdConnector keeps blocks of tensor parallel ranks only: set both to 1, or use TierdTier"
        )
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise Unsupported(
            "vllm: enable_sleep_mode frees and remaps KV memory, which TierdConnector does not support; turn it off"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise Unsupported(
            "vllm: calculate_kv_scales makes scales that exist in one process only; use a checkpoint that has them"
        )
    kinds = {get_kv_cache_spec_kind(group.kv_cache_spec) for group in kv.kv_cache_groups}
    if unknown := kinds - {*WHOLE, *WINDOWS}:
        names = ", ".join(sorted(kind.value for kind in unknown))
        raise Unsupported(f"vllm: KV cache groups of kind {names}; TierdConnector keeps attention only: use TierdTier")


def block_bytes(group: Any) -> int:
    """Bytes of a block of all the group's layers on one rank."""
    return sum(_layer_bytes(group))


def _layer_bytes(group: Any) -> list[int]:
    """Bytes of a block of each of the group's layers."""
    spec, names = group.kv_cache_spec, group.layer_names
    has_own = isinstance(spec, UniformTypeKVCacheSpecs)
    return [int((spec.kv_cache_specs[name] if has_own else spec).real_page_size_bytes) for name in names]


def is_replicated(kv: Any) -> bool:
    """Whether every rank holds the same KV, so that one stores it for all."""
    return all(get_kv_cache_spec_kind(group.kv_cache_spec) in REPLICATED for group in kv.kv_cache_groups)


def is_kept_by_blocks(kv: Any) -> bool:
    """Whether a request can continue from its first blocks if later ones fail to load: it has one
    group and no sliding window."""
    kinds = [get_kv_cache_spec_kind(group.kv_cache_spec) for group in kv.kv_cache_groups]
    return len(kinds) == 1 and kinds[0] not in WINDOWS


def step_tokens(spaces: Sequence[Space]) -> int:
    """The least number of tokens at whose multiples all groups' blocks end."""
    return math.lcm(*(space.tokens for space in spaces))


def tokens_of(request: Any, start: int, stop: int) -> tuple[int, ...]:
    """Tokens of a vLLM request, for routers. Empty if tokens alone do not determine a block's
    content; they would mislead routers."""
    is_more = request.lora_request or request.cache_salt or request.mm_features or request.prompt_embeds is not None
    return () if is_more else tuple(request.all_token_ids[start:stop])


def facts_of(config: Any, kv: Any, *, role: str, rank: int = 0) -> EngineFacts:
    """The facts that `tierctl engines` shows."""
    transfer, cache = config.kv_transfer_config, config.cache_config
    return EngineFacts(
        engine="vllm",
        version=vllm.__version__,
        face="TierdConnector",
        model=config.model_config.model,
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=kv_cache_utils.get_none_hash_seed() if role == "scheduler" else "",  # other processes never hash
        tokens_per_block="/".join(str(group.kv_cache_spec.block_size) for group in kv.kv_cache_groups),
        dtype=dtype_of(config),
        layout=str(kv.kv_cache_layout or ""),
        ranks=f"{rank}/{config.parallel_config.tensor_parallel_size}",
        role=role,
        load_failure_policy=transfer.kv_load_failure_policy,
    )


def _space(config: Any, group: tuple[int, Any], options: ConnectorOptions, *, words: Any, kv: Any) -> Space:
    index, spec = group[0], group[1].kv_cache_spec
    kind, window = get_kv_cache_spec_kind(spec), get_kv_cache_spec_sliding_window(spec)
    words = words | {"kind": kind.value, "spec": str(spec), "layers": list(group[1].layer_names)}
    named = NamespaceSpec(
        model=options.model or config.model_config.model,
        weights_digest=options.weights_digest,
        tokens_per_block=spec.block_size,
        block_bytes=block_bytes(group[1]),
        group=str(index),
        salt=hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode()).hexdigest(),
        geometry=_layers_of(group[1]),
        rank_count=1 if is_replicated(kv) else config.parallel_config.tensor_parallel_size,
    )
    named = Codings(options).spec(named, geometry_of(group[1]))
    size = max(1, spec.block_size // _hash_tokens(config, kv))
    if kind in WINDOWS and window and window > 1:
        return Space(index, named, Need.LAST_TOKENS, window - 1 + _kept_longer(spec), hashes_per_block=size)
    return Space(index, named, hashes_per_block=size)


def _layers_of(group: Any) -> KVGeometry:
    """The number of layers alone, if they are equally long. The order of values is the kernels' own."""
    sizes = _layer_bytes(group)
    return KVGeometry(layers=len(sizes) if len(set(sizes)) == 1 else 0)


def _hash_tokens(config: Any, kv: Any) -> int:
    """Tokens of each of vLLM's block hashes."""
    return int(getattr(kv, "hash_block_size", None) or kv_cache_utils.resolve_kv_cache_block_sizes(kv, config)[1])


def _kept_longer(spec: Any) -> int:
    """Tokens before its window that vLLM also needs: drafting computes them again."""
    return max(getattr(layer, "extra_retained_tokens", 0) for layer in iter_layer_specs(spec))


def _words(config: Any, kv: Any, options: ConnectorOptions) -> dict[str, Any]:
    """Further facts that decide a block's bytes or the meaning of its hash."""
    return {
        "face": "TierdConnector",
        "layout": kv.kv_cache_layout,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "hash_algorithm": config.cache_config.prefix_caching_hash_algo,
        **engine_words(),
        **model_words(config, options),
    }
