"""Checks the arguments of attention calls one by one: each error names the argument.

Nothing is launched, allocated or read back here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tierd.errors import InvalidArgument
from tierd.kernels import params
from tierd.kernels.buffers import Array, Buffer, address_of
from tierd.kernels.coded import CodedPages, bits_of, coded_pool
from tierd.kernels.fitting import TILE_TOKENS
from tierd.kernels.pages import KV_TYPES, KvPages, checked_pages

HEAD_DIMS = (64, 96, 128, 256)
GROUP_LIMIT = 16
"""As in cuda/src."""
LONGEST = 2**31 - TILE_TOKENS
"""Tokens that kernels count: a longer window, or more sinks, covers all of them."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The content of a `reference.PagedBatch`, in arrays on the kernel's device.

    kv_lens: i32 [n]. tables: i32 [n, pages]; entries behind a sequence's length are ignored.
    subsets: None, or i32 [n, kv_heads, most], distinct within a head; subset_sizes: i32 [n,
    kv_heads]. scale: of the scores, 1 / sqrt(head_dim) by default.
    """

    kv_lens: Array
    tables: Array
    sinks: int = 0
    window: int = 0
    subsets: Array = None
    subset_sizes: Array = None
    scale: float | None = None


@dataclass(slots=True)
class Arguments:
    """Of one call. Each method raises InvalidArgument, naming the argument. kv_type, k_scales,
    v_scales: set by `pool`."""

    device: str
    requests: int
    q_heads: int
    kv_heads: int
    dim: int
    q_type: str = ""
    kv_type: str = ""
    k_scales: int | None = None
    v_scales: int | None = None

    def queries(self, q: Array, rows: int) -> Buffer:
        """q: [rows, q_heads, head_dim] of a type that kernels have."""
        found = Buffer.of("q", q).checked((rows, self.q_heads, self.dim), *KV_TYPES, device=self.device).aligned()
        self.q_type = found.dtype
        return found

    def pool(self, pages: KvPages | CodedPages) -> params.Pool:
        """The pool of pages; call `queries` first."""
        if isinstance(pages, CodedPages):
            self.kv_type = bits_of(pages.codec).kind
            group = self.q_heads // self.kv_heads
            return coded_pool(pages, (self.kv_heads, self.dim), group, device=self.device)
        found = checked_pages(pages, (self.kv_heads, self.dim), KV_TYPES[self.q_type], device=self.device)
        k, page_tokens = found.k, found.k.shape[1]
        if page_tokens % TILE_TOKENS:
            raise InvalidArgument(f"pages.k: pages of {page_tokens} tokens; kernels take multiples of {TILE_TOKENS}")
        self.kv_type, self.k_scales, self.v_scales = k.dtype, found.k_scales, found.v_scales
        return params.Pool(k.address, found.v.address, *k.strides[:3], page_tokens, k.shape[0])

    def batch(self, batch: DeviceBatch, n: int) -> params.Batch:
        """Lengths, tables, sinks, window and subsets of n sequences."""
        lens = Buffer.of("batch.kv_lens", batch.kv_lens).checked((n,), "i32", device=self.device)
        tables = Buffer.of("batch.tables", batch.tables).checked((n, None), "i32", device=self.device)
        if min(batch.sinks, batch.window) < 0 or (batch.window and batch.subsets is not None):
            raise InvalidArgument(
                f"batch: sinks {batch.sinks}, window {batch.window}; give no negative ones, and a window or subsets"
            )
        subsets = self._optional("batch.subsets", batch.subsets, (n, self.kv_heads, None), "i32")
        sizes = self._optional("batch.subset_sizes", batch.subset_sizes, (n, self.kv_heads), "i32")
        if (subsets is None) != (sizes is None):
            raise InvalidArgument("batch.subset_sizes: given without batch.subsets, or the other way round")
        return params.Batch(
            lens.address,
            tables.address,
            address_of(subsets),
            address_of(sizes),
            n,
            self.kv_heads,
            tables.shape[1],
            subsets.shape[2] if subsets else 0,
            min(batch.sinks, LONGEST),
            min(batch.window, LONGEST),
        )

    def like(self, name: str, array: Array, q: Buffer) -> int:
        """The address of an array of q's shape and type."""
        return Buffer.of(name, array).checked(q.shape, q.dtype, device=self.device).aligned().address

    def lse(self, array: Array, rows: int) -> int:
        """The address of lse: f32 [rows, q_heads]."""
        return Buffer.of("lse", array).checked((rows, self.q_heads), "f32", device=self.device).address

    def mass(self, array: Array, table_pages: int) -> int | None:
        """The address of mass: f32 [requests, q_heads, table_pages]; None if it is not wanted."""
        return address_of(self._optional("mass", array, (self.requests, self.q_heads, table_pages), "f32"))

    def _optional(self, name: str, array: Any, shape: tuple[int | None, ...], dtype: str) -> Buffer | None:
        return None if array is None else Buffer.of(name, array).checked(shape, dtype, device=self.device)


def group_of(q_heads: int, kv_heads: int, head_dim: int) -> int:
    """Query heads for each kv head. Raises InvalidArgument if no kernel has them."""
    group, rest = divmod(q_heads, kv_heads) if kv_heads else (0, 1)
    if rest or not 1 <= group <= GROUP_LIMIT:
        raise InvalidArgument(
            f"q: {q_heads} query heads for {kv_heads} kv heads; kernels take 1 to {GROUP_LIMIT} of them for each"
        )
    if head_dim not in HEAD_DIMS:
        raise InvalidArgument(f"q: head_dim {head_dim}; there are kernels for {', '.join(map(str, HEAD_DIMS))}")
    return group
