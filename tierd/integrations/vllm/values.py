"""The values in vLLM's blocks: their shape, and the place of each in a layer's memory.

Codecs need both; plain copies need neither. Blocks of dense attention have one shape of keys and
values. On GPUs a token's key and value of a head adjoin. On CPUs kernels pack them, in tiles for
AMX or by columns. So the kernel itself is asked: it writes numbers, which tell their places.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from tierd.core.formats.block import KVGeometry
from tierd.errors import Unsupported
from tierd.integrations.coding import Order

Places = NDArray[np.intp]


def geometry_of(group: Any) -> KVGeometry:
    """Geometry of a KV cache group's blocks on one rank; opaque if it is not dense attention of one shape."""
    spec, names = group.kv_cache_spec, group.layer_names
    layers = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    shapes = {_shape_of(layer) for layer in layers}
    shape = shapes.pop()
    if shapes or shape is None:
        return KVGeometry()
    return KVGeometry(len(names), *shape)


def order_of(group: Any, cache: Any) -> Order:
    """The place of each value in a layer's part of a block. Values are in the order [keys and values,
    tokens, kv_heads, head_dim]. cache: the layer's tensor, as vLLM registers it.

    Raises Unsupported if the kernels' order is not known.
    """
    geometry, tokens = geometry_of(group), int(group.kv_cache_spec.block_size)
    if current_platform.is_cpu():
        return order_on_cpu(geometry, tokens, kernel_tokens=int(cache.shape[2]))
    if current_platform.is_cuda():
        is_by_head = cache.shape[1] > 1 and cache.stride(1) > cache.stride(2)
        return order_on_gpu(geometry, tokens, is_by_head=is_by_head)
    raise Unsupported(
        f"vllm: codec on {current_platform.device_name}: the order of values in blocks is not known; leave out `codec`"
    )


def order_on_gpu(geometry: KVGeometry, tokens: int, *, is_by_head: bool) -> Order:
    """Memory is [kv_heads, tokens] or [tokens, kv_heads], then [keys and values, head_dim]."""
    heads, dim = geometry.kv_heads, geometry.head_dim
    shape = (heads, tokens, 2, dim) if is_by_head else (tokens, heads, 2, dim)
    places = np.arange(2 * tokens * heads * dim).reshape(shape)
    return _flat(places.transpose((2, 1, 0, 3) if is_by_head else (2, 0, 1, 3)))


def order_on_cpu(geometry: KVGeometry, tokens: int, *, kernel_tokens: int) -> Order:
    """Memory is [kv_heads, kernel's blocks of a block], then keys and values as the kernel packs them."""
    heads, dim, parts = geometry.kv_heads, geometry.head_dim, tokens // kernel_tokens
    packed = _places_on_cpu(kernel_tokens, dim, geometry.dtype).reshape(2, 1, kernel_tokens, 1, dim)
    part, head = np.arange(parts).reshape(1, parts, 1, 1, 1), np.arange(heads).reshape(1, 1, 1, heads, 1)
    return _flat(packed + 2 * dim * (kernel_tokens * part + tokens * head))


def _shape_of(spec: Any) -> tuple[int, int, str] | None:
    """(kv_heads, head_dim, dtype) of dense keys and values; None if a block has something else."""
    heads, dim = getattr(spec, "num_kv_heads", 0), getattr(spec, "head_size", 0)
    size = 2 * spec.block_size * heads * dim * getattr(getattr(spec, "dtype", None), "itemsize", 0)
    if not size or spec.real_page_size_bytes != size or getattr(spec, "head_size_v", dim) != dim:
        return None
    return heads, dim, str(spec.dtype).removeprefix("torch.")


@cache
def _places_on_cpu(tokens: int, dim: int, dtype: str) -> Places:
    """[2, tokens, dim]: the place of each value of one head, from what vLLM's kernel writes.

    Each value's number is written in two rounds, a byte each, as finite floats. Raises Unsupported
    if the kernel has another interface, or writes a value twice.
    """
    kind = getattr(torch, dtype)
    numbers = torch.arange(2 * tokens * dim, dtype=torch.int32).reshape(2, tokens, 1, dim)
    found = torch.zeros(2 * tokens * dim, dtype=torch.int64)
    for shift in (0, 8, 16):
        given = (0x4000 + (numbers >> shift & 0xFF)).to(torch.int16).view(kind)
        memory = torch.zeros(1, 1, 2 * tokens, dim, dtype=kind)
        try:
            _write(given, memory)
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            raise Unsupported(
                f"vllm: codec: the CPU kernel's order of values is not known ({error}); leave out `codec`"
            ) from error
        found += (memory.view(torch.int16).reshape(-1).to(torch.int64) - 0x4000 & 0xFF) << shift
    places = np.full(len(found), -1, np.intp)
    held = found.numpy()
    places[held[held < len(places)]] = np.arange(len(places))[held < len(places)]
    if (places < 0).any():
        raise Unsupported("vllm: codec: the CPU kernel writes values in an unknown order; leave out `codec`")
    return places.reshape(2, tokens, dim)


def _write(given: Any, memory: Any) -> None:
    """Lets vLLM's kernel write keys and values [2, tokens, 1, dim] into one block."""
    from vllm import _custom_ops as ops  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    tokens, dim = given.shape[1], given.shape[3]
    keys, values = memory.chunk(2, dim=2)
    isa = _get_attn_isa(given.dtype, tokens, dim)
    slots = torch.arange(tokens, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(given[0].contiguous(), given[1].contiguous(), keys, values, slots, isa)


def _flat(places: Any) -> Order:
    return np.ascontiguousarray(places).reshape(-1).astype(np.intp)
