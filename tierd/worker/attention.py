"""Chooses the attention over pages: kernels, or plain array operations.

`attention_for` chooses for a worker; `attention_over` for other callers with pages. It never falls
back silently. A caller that asks for kernels, or computes on a GPU, gets them or an error.
"""

from __future__ import annotations

from tierd.errors import ConfigError
from tierd.kernels import PagedAttention, paged_attention
from tierd.kernels.arguments import GROUP_LIMIT, HEAD_DIMS
from tierd.kernels.attention import KernelAttention
from tierd.kernels.fitting import TILE_TOKENS
from tierd.kernels.library import open_library
from tierd.kernels.prefills import find_prefill
from tierd.worker.backend import KERNEL_DTYPES, Backend
from tierd.worker.model import Llama
from tierd.worker.pages import PageShape


def attention_for(model: Llama, shape: PageShape) -> PagedAttention:
    """Chosen by TIERD_KERNELS and the model's device.

    A CPU uses the reference, or emulated kernels on request; a GPU uses its kernels. Raises
    ConfigError for a model or pages that no kernel supports, Unsupported for missing kernels.
    """
    return attention_over(shape, q_heads=model.spec.q_heads, backend=model.backend)


def attention_over(shape: PageShape, *, q_heads: int, backend: Backend) -> PagedAttention:
    """As `attention_for`, for so many query heads computed by this backend; raises the same.
    TIERD_PREFILL chooses the prefill of a GPU on which torch computes."""
    if not backend.has_kernels:
        return paged_attention
    fault = find_fault(shape, q_heads)
    if fault:
        raise ConfigError(f"kernels: {fault}; change that, or set TIERD_KERNELS=reference")
    prefill = find_prefill(backend.torch, backend.device) if backend.torch and backend.is_on_gpu else None
    return KernelAttention(open_library(ordinal=backend.ordinal), prefill)


def name_of(attention: PagedAttention) -> str:
    """A name for reports: "reference", or kernels and whose prefill."""
    return attention.name if isinstance(attention, KernelAttention) else "reference"


def find_fault(shape: PageShape, heads: int) -> str | None:
    """The reason why kernels cannot attend to such pages for so many query heads; None: they can."""
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
