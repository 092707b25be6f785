"""SGLang's own host pools, small, over device pools on the CPU, and its storage configuration."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
    MLASplitBuffers,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE, TOKENS, LAYERS, HEADS, WIDTH = 4, 64, 3, 2, 8
LATENT, ROPE = 16, 8
CPU = torch.device("cpu")
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_first_kv_split")


def mha(layout: str, *, dtype: torch.dtype = torch.bfloat16, heads: int = HEADS) -> Any:
    """A pool of keys and values."""
    k, v = (tuple(torch.zeros(TOKENS, heads, WIDTH, dtype=dtype) for _ in range(LAYERS)) for _ in range(2))
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD),
        page_size=PAGE,
        head_num=heads,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=dtype,
        device=CPU,
    )
    return MHATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=TOKENS, start_layer=0, end_layer=LAYERS
    )


def mla(layout: str, *, dcp_size: int = 1, dcp_rank: int = 0) -> Any:
    """A pool of latents; page_first_kv_split as on Ascend, with an index pool beside it."""
    is_split = layout == "page_first_kv_split"
    rows = tuple(torch.zeros(TOKENS, 1, LATENT + ROPE, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=_split() if is_split else rows,
        data_ptrs=None if is_split else _pointers(rows),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=LATENT + ROPE,
        dtype=torch.bfloat16,
        device=CPU,
    )
    return MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE * dcp_size,
        layout,
        pin_memory=False,
        dcp_size=dcp_size,
        dcp_rank=dcp_rank,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def mamba(layout: str = "page_first") -> Any:
    """A pool of states, one a page."""
    temporal = torch.zeros(LAYERS, 16, HEADS, WIDTH, dtype=torch.float32)
    conv = (torch.zeros(LAYERS, 16, WIDTH, 3, dtype=torch.bfloat16),)
    return MambaPoolHost(
        MambaStateBufferInfo(temporal=temporal, conv=conv), 2.0, 0, device_capacity=16, pin_memory=False, layout=layout
    )


def buffers(pool: Any) -> list[torch.Tensor]:
    """All memory of a pool."""
    names = (
        ("k_buffer", "v_buffer", "index_k_buffer")
        if getattr(pool, "layout", "") == "page_first_kv_split"
        else ("kv_buffer",)
    )
    found = [getattr(pool, name) for name in names]
    if isinstance(pool, MambaPoolHost):
        found = [pool.temporal_buffer, *pool.conv_buffer]
    return [one for one in found if one is not None]


def fill(pool: Any, seed: int) -> list[torch.Tensor]:
    """Fills the pool with random bits; returns copies of its buffers."""
    torch.manual_seed(seed)
    for one in buffers(pool):
        raw = one.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return [one.clone() for one in buffers(pool)]


def page(pool: Any, index: int) -> list[bytes]:
    """The bytes of a page, read through the pool's own pointers."""
    import ctypes

    tokens = getattr(pool, "logical_page_size", 1)
    pointers, lengths = pool.get_page_buffer_meta(torch.arange(index, index + tokens))
    return [ctypes.string_at(at, length) for at, length in zip(pointers, lengths, strict=True)]


def config(target: str, *, is_mla: bool = False, interface_v1: int = 1, **given: Any) -> HiCacheStorageConfig:
    """HiCacheStorageConfig as SGLang makes it. given: its fields; `extra` adds options of ours,
    `words` replaces them all."""
    extra = given.pop("words", None) or {
        "backend_name": "tierd",
        "module_path": "tierd.integrations.sglang",
        "class_name": "TierdHiCache",
        "interface_v1": interface_v1,
        "target": target,
        "timeout_s": 30.0,
        "lookup_timeout_s": 10.0,
    } | given.pop("extra", {})
    words: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "m",
    } | given
    return HiCacheStorageConfig(is_mla_model=is_mla, extra_config=extra, **words)


def backend(target: str, pool: Any = None, **given: Any) -> Any:
    """TierdHiCache as SGLang's own factory makes it, with its pool registered."""
    made = StorageBackendFactory.create_backend("dynamic", config(target, **given), pool)
    if pool is not None:
        made.register_mem_pool_host(pool)
    return made


def indices(*pages: int, size: int = PAGE) -> torch.Tensor:
    """host_indices of these pages."""
    return torch.cat([torch.arange(number * size, (number + 1) * size) for number in pages])


def _pointers(tensors: Any) -> torch.Tensor:
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.uint64)


def _split() -> MLASplitBuffers:
    return MLASplitBuffers(
        k=torch.zeros(LAYERS, TOKENS // PAGE, PAGE, 1, LATENT, dtype=torch.bfloat16),
        v=torch.zeros(LAYERS, TOKENS // PAGE, PAGE, 1, ROPE, dtype=torch.bfloat16),
        index_k=torch.zeros(LAYERS, TOKENS // PAGE, PAGE, 1, WIDTH, dtype=torch.bfloat16),
        index_scales=None,
        index_layer_indices=tuple(range(LAYERS)),
        k_width=LATENT,
        v_width=ROPE,
        index_width=WIDTH,
    )
