"""vLLM's KV memory by block: the location of each layer's part of a block.

A block has one piece a layer, in the group's order, as long runs of bytes. Only strides are read;
no order of axes is assumed. A piece's bytes are in memory order, as if kernels did not cut the
block. The layout's name is in the namespace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tierd.errors import Unsupported
from tierd.integrations.pieces import Piece, piece_bytes
from tierd.integrations.vllm.spaces import block_bytes


class KVMemory:
    """`caches` maps layers to tensors with blocks first, as vLLM registers them; `kv` is the
    KVCacheConfig. Raises Unsupported if the tensors contradict it."""

    def __init__(self, caches: Mapping[str, Any], kv: Any) -> None:
        self._groups = [
            [_Layer(caches[name], kv.num_blocks) for name in group.layer_names] for group in kv.kv_cache_groups
        ]
        self.is_on_device = any(layer.is_on_device for layers in self._groups for layer in layers)
        for index, group in enumerate(kv.kv_cache_groups):
            found, said = sum(map(piece_bytes, self.pieces(index, 0))), block_bytes(group)
            if found != said:
                raise Unsupported(
                    f"vllm: a block of group {index} has {found} bytes in memory, {said} in vLLM's own books; this layout is not known to tierd"
                )

    def pieces(self, group: int, block: int) -> list[Piece]:
        """A block of the group, a piece a layer."""
        return [layer.piece(block) for layer in self._groups[group]]


class _Layer:
    """One tensor: [blocks, ..., tokens, content]. Kernels may cut each of vLLM's blocks into
    several of theirs; the bytes are the same."""

    def __init__(self, tensor: Any, blocks: int) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.shape[0] % blocks:
            shape = tuple(getattr(tensor, "shape", ()))
            raise Unsupported(
                f"vllm: KV memory of shape {shape} for {blocks} blocks; TierdConnector keeps attention only: use TierdTier"
            )
        self._ordered = _ordered(tensor, blocks)
        self._rows = _rows(self._ordered)
        self.is_on_device = tensor.device.type != "cpu"

    def piece(self, block: int) -> Piece:
        """The layer's bytes of a block."""
        return self._ordered[block] if self._rows is None else self._rows[block]


def _ordered(tensor: Any, blocks: int) -> Any:
    """[blocks, axes in memory order]; the parts into which kernels cut a block's tokens precede those."""
    whole, tokens = tensor.unflatten(0, (blocks, -1)), max(1, tensor.dim() - 2)
    order = sorted(range(1, tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis))
    axes = [part for axis in order for part in ((1, axis + 1) if axis == tokens else (axis + 1,))]
    ordered = whole.permute(0, *axes)
    return ordered.squeeze(tuple(axis for axis in range(1, ordered.dim()) if ordered.shape[axis] == 1))


def _rows(ordered: Any) -> Any:
    """uint8 [blocks, bytes] over the same memory (numpy on the host). None if a block is not contiguous."""
    shape, strides = list(ordered.shape[1:]), list(ordered.stride()[1:])
    if strides != _dense(shape):
        return None
    size = ordered.element_size()
    rows = torch.empty(0, dtype=torch.uint8, device=ordered.device)
    start, step = ordered.storage_offset() * size, ordered.stride(0) * size
    rows.set_(ordered.untyped_storage(), start, (len(ordered), math.prod(shape) * size), (step, 1))
    return rows.numpy() if ordered.device.type == "cpu" else rows


def _dense(shape: Sequence[int]) -> list[int]:
    """Strides of an array without gaps."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
