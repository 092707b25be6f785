"""Paged attention by the kernels of cuda/: decode, prefill and the merge of partial results.

Purpose: check what is given, fill in parameters, launch. Non-purpose: what is computed, which `reference` says in plain words and tests compare. Invariants: no
memory is made after a `PagedDecode` was (for page masses: after their first use, and with longer tables), none is given back before it goes, and nothing is read back, so that a
captured graph may replay it with other lengths and tables in the same arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tierd.errors import InvalidArgument
from tierd.kernels import params
from tierd.kernels.buffers import BYTES, Array, Buffer, address_of
from tierd.kernels.library import Library
from tierd.kernels.pages import KV_TYPES, KvPages, checked_pages
from tierd.kernels.reference import Attended

TILE_TOKENS = 16
RING = 3
STAGE_TILES = 4
BLOCK_ROWS = 64
PLAN_THREADS = 256
"""As in cuda/src."""
HEAD_DIMS = (64, 96, 128, 256)
GROUP_LIMIT = 16


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """What `reference.PagedBatch` says, in arrays where the kernel runs.

    kv_lens: i32 [n]. tables: i32 [n, pages]; behind a sequence's length anything. subsets: None, or i32 [n, kv_heads, most]; subset_sizes: i32 [n, kv_heads].
    scale: of the scores, 1 / sqrt(head_dim) if not given.
    """

    kv_lens: Array
    tables: Array
    sinks: int = 0
    window: int = 0
    subsets: Array = None
    subset_sizes: Array = None
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The most sequences of a decode, and the heads of its model."""

    requests: int
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """Query tokens of several sequences. q: bf16 or f16 [tokens, q_heads, head_dim]. starts: i32 [n + 1]. longest: the most tokens of a sequence."""

    q: Array
    starts: Array
    longest: int


class PagedDecode:
    """Attention of one query token of each sequence, for up to `requests` of them, one call after another in a stream: they share the arrays that it keeps.

    Raises InvalidArgument for shapes that no kernel has.

    blocks: how many thread blocks share the work; as many as fit the GPU at once. allocate(shape, dtype name): makes the arrays that it keeps.
    """

    def __init__(
        self, library: Library, shape: DecodeShape, *, blocks: int, allocate: Callable[[tuple[int, ...], str], Array]
    ) -> None:
        self._group = _group_of(shape.q_heads, shape.kv_heads, shape.head_dim)
        self._library, self._blocks, self._allocate = library, blocks, allocate
        self._requests, self._q_heads = shape.requests, shape.q_heads
        self._kv_heads, self._dim = shape.kv_heads, shape.head_dim
        rows = shape.requests * shape.kv_heads
        self._starts = allocate((rows + 1,), "int32")
        self._out = allocate((blocks + rows, self._group, shape.head_dim), "float32")
        self._lse = allocate((blocks + rows, self._group), "float32")
        self._tile_lses: list[Array] = []  # with every one that a captured graph may hold

    def __call__(self, q: Array, pages: KvPages, batch: DeviceBatch, to: Attended) -> Attended:
        """Fills `to`: out [n, q_heads, head_dim] as q, lse f32 [n, q_heads] (natural), mass f32 [n, q_heads, pages of a table] if it is given.

        q: bf16 or f16 [n, q_heads, head_dim]. Raises InvalidArgument, naming the argument that does not fit.
        """
        n = q.shape[0]
        if not 0 < n <= self._requests:
            raise InvalidArgument(f"q: {n} sequences; this decode was made for 1 to {self._requests}")
        asked = _Call(self._library.device, n, self._q_heads, self._kv_heads, self._dim)
        queries, pool = asked.queries(q, n), asked.pool(pages)
        told, table_pages = asked.batch(batch, n), batch.tables.shape[1]
        out, lse = asked.like("out", to.out, queries), asked.lse(to.lse, n)
        tiles = asked.mass(to.mass, table_pages) and self._tiles(table_pages * pool.page_tokens // TILE_TOKENS)
        starts, part_out, part_lse = (Buffer.of("workspace", a).address for a in (self._starts, self._out, self._lse))
        self._library.launch(
            "decode_plan",
            (1, 1, 1),
            params.Plan(told, pool.page_tokens, starts),
            shared_bytes=4 * PLAN_THREADS,
        )
        kernel = f"decode_{queries.dtype}_{asked.kv_type}_{self._dim}" + ("_mass" if tiles else "")
        decode = params.Decode(
            told,
            pool,
            queries.address,
            starts,
            part_out,
            part_lse,
            tiles,
            asked.k_scales,
            self._q_heads,
            _scale(batch.scale, self._dim) * math.log2(math.e),
        )
        shared_bytes = _decode_shared_bytes(self._dim, self._group, asked.kv_type)
        self._library.launch(kernel, (self._blocks, 1, 1), decode, shared_bytes=shared_bytes)
        merge = params.DecodeMerge(
            starts,
            part_out,
            part_lse,
            asked.v_scales,
            out,
            lse,
            n * self._kv_heads,
            self._kv_heads,
            self._blocks,
            self._group,
            self._dim,
        )
        self._library.launch(f"decode_merge_{queries.dtype}", (n * self._q_heads, 1, 1), merge)
        if tiles:
            weigh = params.Mass(told, tiles, lse, Buffer.of("mass", to.mass).address, self._q_heads, pool.page_tokens)
            self._library.launch("decode_page_mass", (n * self._q_heads, 1, 1), weigh)
        return to

    def _tiles(self, tiles: int) -> int:
        if not self._tile_lses or self._tile_lses[-1].shape[2] < tiles:
            self._tile_lses.append(self._allocate((self._requests, self._q_heads, tiles), "float32"))
        return Buffer.of("workspace", self._tile_lses[-1]).address


def decode_blocks(library: Library, shape: DecodeShape, *, q_type: str, kv_type: str) -> int:
    """How many blocks a PagedDecode is best given: as many as the device runs at once. Types as in `buffers.DTYPES`. Raises InvalidArgument."""
    group = _group_of(shape.q_heads, shape.kv_heads, shape.head_dim)
    shared_bytes = _decode_shared_bytes(shape.head_dim, group, kv_type)
    return library.resident_blocks(f"decode_{q_type}_{kv_type}_{shape.head_dim}", shared_bytes=shared_bytes)


def paged_prefill(library: Library, chunks: Chunks, pages: KvPages, batch: DeviceBatch, to: Attended) -> Attended:
    """Causal attention of the last tokens of each sequence: a prompt, or what is appended to one.

    Fills `to`: out as the queries, lse f32 [tokens, q_heads] (natural). Raises InvalidArgument.
    """
    q = chunks.q
    tokens, q_heads, head_dim = q.shape
    kv_heads, n = pages.k.shape[2], batch.kv_lens.shape[0]
    group = _group_of(q_heads, kv_heads, head_dim)
    asked = _Call(library.device, n, q_heads, kv_heads, head_dim)
    queries, pool, told = asked.queries(q, tokens), asked.pool(pages), asked.batch(batch, n)
    starts = Buffer.of("chunks.starts", chunks.starts).checked((n + 1,), "i32", device=library.device)
    prefill = params.Prefill(
        told,
        pool,
        queries.address,
        starts.address,
        asked.like("out", to.out, queries),
        asked.lse(to.lse, tokens),
        asked.k_scales,
        asked.v_scales,
        q_heads,
        _scale(batch.scale, head_dim) * math.log2(math.e),
    )
    shared_bytes = 2 * STAGE_TILES * 2 * TILE_TOKENS * head_dim * BYTES[asked.kv_type]
    grid = (-(-chunks.longest * group // BLOCK_ROWS), kv_heads, n)
    kernel = f"prefill_{queries.dtype}_{asked.kv_type}_{head_dim}"
    library.launch(kernel, grid, prefill, shared_bytes=shared_bytes)
    return to


def merge_parts(library: Library, outs: Array, lses: Array, to: Attended) -> Attended:
    """Attention over a union of keys from outs [parts, rows, heads, dim] and lses f32 [parts, rows, heads] (natural). Raises InvalidArgument."""
    parts, rows, heads, dim = outs.shape
    device = library.device
    given = Buffer.of("outs", outs).checked((parts, rows, heads, dim), "bf16", "f16", "f32", device=device)
    logs = Buffer.of("lses", lses).checked((parts, rows, heads), "f32", device=device)
    out = Buffer.of("out", to.out).checked((rows, heads, dim), given.dtype, device=device)
    lse = Buffer.of("lse", to.lse).checked((rows, heads), "f32", device=device)
    merge = params.Merge(given.address, logs.address, out.address, lse.address, rows * heads, parts, dim)
    library.launch(f"merge_{given.dtype}", (rows * heads, 1, 1), merge)
    return to


@dataclass(slots=True)
class _Call:
    """The arguments of one call, checked one by one. kv_type, k_scales, v_scales: known after `pool`."""

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
        found = Buffer.of("q", q).checked((rows, self.q_heads, self.dim), *KV_TYPES, device=self.device).aligned()
        self.q_type = found.dtype
        return found

    def pool(self, pages: KvPages) -> params.Pool:
        found = checked_pages(pages, (self.kv_heads, self.dim), KV_TYPES[self.q_type], device=self.device)
        k, page_tokens = found.k, found.k.shape[1]
        if page_tokens % TILE_TOKENS:
            raise InvalidArgument(f"pages.k: pages of {page_tokens} tokens; kernels take multiples of {TILE_TOKENS}")
        self.kv_type, self.k_scales, self.v_scales = k.dtype, found.k_scales, found.v_scales
        return params.Pool(k.address, found.v.address, *k.strides[:3], page_tokens)

    def batch(self, batch: DeviceBatch, n: int) -> params.Batch:
        lens = Buffer.of("batch.kv_lens", batch.kv_lens).checked((n,), "i32", device=self.device)
        tables = Buffer.of("batch.tables", batch.tables).checked((n, None), "i32", device=self.device)
        if min(batch.sinks, batch.window) < 0 or (batch.window and batch.subsets is not None):
            raise InvalidArgument(
                f"batch: sinks {batch.sinks}, window {batch.window}; give no negative ones, and a window or subsets"
            )
        most = batch.subsets.shape[2] if batch.subsets is not None else 0
        subsets = self._optional("batch.subsets", batch.subsets, (n, self.kv_heads, most), "i32")
        sizes = self._optional("batch.subset_sizes", batch.subset_sizes, (n, self.kv_heads), "i32")
        if (subsets is None) != (sizes is None):
            raise InvalidArgument("batch.subset_sizes: given without batch.subsets, or the other way round")
        return params.Batch(
            lens.address,
            tables.address,
            subsets,
            sizes,
            n,
            self.kv_heads,
            tables.shape[1],
            most,
            batch.sinks,
            batch.window,
        )

    def like(self, name: str, array: Array, q: Buffer) -> int:
        return Buffer.of(name, array).checked(q.shape, q.dtype, device=self.device).address

    def lse(self, array: Array, rows: int) -> int:
        return Buffer.of("lse", array).checked((rows, self.q_heads), "f32", device=self.device).address

    def mass(self, array: Array, table_pages: int) -> int | None:
        return self._optional("mass", array, (self.requests, self.q_heads, table_pages), "f32")

    def _optional(self, name: str, array: Any, shape: tuple[int, ...], dtype: str) -> int | None:
        return None if array is None else address_of(Buffer.of(name, array).checked(shape, dtype, device=self.device))


def _group_of(q_heads: int, kv_heads: int, head_dim: int) -> int:
    group, rest = divmod(q_heads, kv_heads) if kv_heads else (0, 1)
    if rest or not 1 <= group <= GROUP_LIMIT:
        raise InvalidArgument(
            f"q: {q_heads} query heads for {kv_heads} kv heads; kernels take 1 to {GROUP_LIMIT} of them for each"
        )
    if head_dim not in HEAD_DIMS:
        raise InvalidArgument(f"q: head_dim {head_dim}; there are kernels for {', '.join(map(str, HEAD_DIMS))}")
    return group


def _decode_shared_bytes(head_dim: int, group: int, kv_type: str) -> int:
    warps = 2 if head_dim > 128 else 4
    ring = RING * 2 * TILE_TOKENS * head_dim * BYTES[kv_type]
    return warps * (ring + 4 * group * (head_dim + 3))


def _scale(scale: float | None, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if scale is None else scale
