"""What attends to pages: kernels, or plain array operations.

Purpose: `attention_for`, the one place where a worker asks; `attention_over`, for whoever has pages and another model. Non-purpose: attending. Invariants: nothing falls back in silence: who asked for kernels, or computes
on a GPU, gets them or an error that says what is missing.
"""

from __future__ import annotations

from tierd.errors import ConfigError
from tierd.kernels import PagedAttention, paged_attention
from tierd.kernels.arguments import GROUP_LIMIT, HEAD_DIMS
from tierd.kernels.attention import KernelAttention
from tierd.kernels.fitting import TILE_TOKENS
from tierd.kernels.library import open_library
from tierd.worker.backend import KERNEL_DTYPES, Backend
from tierd.worker.model import Llama
from tierd.worker.pages import PageShape


def attention_for(model: Llama, shape: PageShape) -> PagedAttention:
    """By TIERD_KERNELS and what the model computes on: the reference on a CPU, emulated kernels where they are asked for, the GPU's on a GPU.

    Raises ConfigError for a model or pages that no kernel takes, Unsupported for kernels that are not there.
    """
    return attention_over(shape, q_heads=model.spec.q_heads, backend=model.backend)


def attention_over(shape: PageShape, *, q_heads: int, backend: Backend) -> PagedAttention:
    """The same for queries of so many heads that are computed by this backend. Raises as `attention_for`."""
    if not backend.has_kernels:
        return paged_attention
    fault = find_fault(shape, q_heads)
    if fault:
        raise ConfigError(f"kernels: {fault}; change that, or set TIERD_KERNELS=reference")
    return KernelAttention(open_library(ordinal=backend.ordinal))


def find_fault(shape: PageShape, heads: int) -> str | None:
    """Why kernels cannot attend to such pages for so many query heads; None: they can."""
    geometry = shape.geometry
    faults = {
        f"pages of {geometry.dtype}, they take {' or '.join(KERNEL_DTYPES)}": geometry.dtype not in KERNEL_DTYPES,
        f"head_dim {geometry.head_dim}, they take {HEAD_DIMS}": geometry.head_dim not in HEAD_DIMS,
        f"{heads} query heads for {geometry.kv_heads} kv heads, they take at most {GROUP_LIMIT} for each": (
            heads > GROUP_LIMIT * geometry.kv_heads
        ),
        f"pages of {shape.tokens_per_block} tokens, they take multiples of {TILE_TOKENS}": (
            shape.tokens_per_block % TILE_TOKENS != 0
        ),
    }
    return next((fault for fault, is_there in faults.items() if is_there), None)
