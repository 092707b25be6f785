"""Pages of a pool: stores new tokens, copies pages between layouts and runs of bytes, bounds keys.

It checks arguments, fills in parameters and launches. `reference` defines the results, and tests
compare. Nothing is allocated or read back, so a captured graph may replay it with other pages in
the same arrays. So the content of arrays of page ids, slots and token counts is the caller's duty.
Ids are below the number of pages, and no target occurs twice. No page gets too many tokens, and the
device has mapped all addresses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierd.errors import InvalidArgument
from tierd.kernels import params
from tierd.kernels.buffers import ALIGNMENT_BYTES, BYTES, Array, Buffer, address_of
from tierd.kernels.library import Library

KV_TYPES = {"bf16": ("bf16", "e4m3"), "f16": ("f16", "e4m3")}
"""The types of stored keys and values, by the type of the queries and of new tokens."""
COPY_THREADS = 256
"""As in cuda/src."""
RUNS_KERNEL = "copy_runs"
STORED = ("bf16", "f16", "e4m3")
COPY_BLOCKS = 64
"""Enough to keep a link to the host busy; most of a GPU stays free to compute."""


@dataclass(frozen=True, slots=True)
class KvPages:
    """Keys and values of one layer in a pool.

    k, v: [pages, page_tokens, kv_heads, head_dim], any strides but in the last axis. k_scales,
    v_scales: f32 [kv_heads], factors of stored e4m3 values; None: 1.
    """

    k: Array
    v: Array
    k_scales: Array = None
    v_scales: Array = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All four."""
        return (self.k, self.v, self.k_scales, self.v_scales)


@dataclass(frozen=True, slots=True)
class CheckedPages:
    """KvPages for kernels. v differs from k only in its address; scales: addresses."""

    k: Buffer
    v: Buffer
    k_scales: int | None
    v_scales: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """K and V of pages on one side of a copy.

    array: [pages, layers, 2, tokens, kv_heads, head_dim], a view with any strides but in the last
    axis. So NHD, HND and layers outside or inside of pages are all the same to the kernel. Or a
    sequence of tensors [pages, 2, tokens, kv_heads, head_dim], one a layer. An engine with separate
    tensors for K and V counts each as a layer, with 1 in place of 2.
    pages: i32 [count], which pages; None: all in order.
    addresses: for a sequence of tensors i64 [layers], their `layer_addresses`.
    is_mapped: whether it is host memory that the GPU has mapped.
    """

    array: Array
    pages: Array = None
    addresses: Array = None
    is_mapped: bool = False


def checked_pages(pages: KvPages, heads: tuple[int, int], types: Sequence[str], *, device: str) -> CheckedPages:
    """heads: kv heads and head_dim. Raises InvalidArgument, naming the field that does not fit."""
    k, v = (
        Buffer.of(name, array).checked((None, None, *heads), *types, device=device, dense_from=3).aligned()
        for name, array in (("pages.k", pages.k), ("pages.v", pages.v))
    )
    if (k.shape, k.strides, k.dtype) != (v.shape, v.strides, v.dtype):
        raise InvalidArgument(
            f"pages.v: shape, strides or type {v.shape, v.strides, v.dtype} differ from those of pages.k, {k.shape, k.strides, k.dtype}"
        )
    scales = (
        None if array is None else Buffer.of(name, array).checked(heads[:1], "f32", device=device).address
        for name, array in (("pages.k_scales", pages.k_scales), ("pages.v_scales", pages.v_scales))
    )
    return CheckedPages(k, v, *scales)


def check_blocks(blocks: int) -> None:
    """Raises InvalidArgument for none, which would do nothing, and above the kernels' limit."""
    if blocks < 1:
        raise InvalidArgument(f"blocks: {blocks} thread blocks do nothing; give 1 or more")
    if blocks >= 1 << 24:  # simt.h's kLaunch
        raise InvalidArgument(f"blocks: {blocks}, kernels count less than {1 << 24}; give as many as fit the GPU")


def store_tokens(library: Library, k: Array, v: Array, slots: Array, pages: KvPages) -> None:
    """Writes new tokens into pages, in the pages' type. Raises InvalidArgument.

    k, v: bf16 or f16 [tokens, kv_heads, head_dim], any stride between tokens. slots: i64 [tokens],
    page * page_tokens + offset; negative: not stored.
    """
    keys = Buffer.of("k", k).checked((None, None, None), *KV_TYPES, device=library.device, dense_from=1)
    values = Buffer.of("v", v).checked(keys.shape, keys.dtype, device=library.device, dense_from=1)
    tokens, kv_heads, dim = keys.shape
    to = checked_pages(pages, (kv_heads, dim), KV_TYPES[keys.dtype], device=library.device)
    store = params.Store(
        keys.address,
        values.address,
        keys.strides[0],
        values.strides[0],
        Buffer.of("slots", slots).checked((tokens,), "i64", device=library.device, dense_from=0).address,
        to.k.address,
        to.v.address,
        *to.k.strides[:3],
        to.k_scales,
        to.v_scales,
        to.k.shape[1],
        kv_heads,
        dim,
        to.k.shape[0],
    )
    library.launch(f"store_{keys.dtype}_{to.k.dtype}", (tokens, 1, 1), store)


def copy_pages(library: Library, source: Place, target: Place, *, blocks: int = COPY_BLOCKS) -> None:
    """Copies page i of one place to page i of another, bit by bit. The two must not overlap. It
    gathers, scatters or changes a layout. blocks: thread blocks at most. Raises InvalidArgument."""
    check_blocks(blocks)
    of, to = (_side(name, place, library.device) for name, place in (("source", source), ("target", target)))
    for name, mine, other in (("array", to.buffer.shape[1:], of.buffer.shape[1:]), ("pages", (to.count,), (of.count,))):
        if mine != other:
            raise InvalidArgument(f"target.{name}: has shape {list(mine)}, source.{name} {list(other)}")
    if to.buffer.dtype != of.buffer.dtype:
        raise InvalidArgument(
            f"target.array: has type {to.buffer.dtype}, source.array {of.buffer.dtype}; a copy changes none"
        )
    rows = _rows(of, to)
    pieces = math.prod(rows.counts) * rows.row_bytes // ALIGNMENT_BYTES
    library.launch(
        "copy_rows_16",
        (min(blocks, -(-pieces // COPY_THREADS)), 1, 1),
        params.Copy(of.params(), to.params(), rows.counts, rows.row_bytes),
    )


def copy_runs(library: Library, targets: Array, sources: Array, *, lengths: Array, blocks: int = COPY_BLOCKS) -> None:
    """Copies n runs of bytes that must not overlap. Raises InvalidArgument.

    targets, sources: u64 [n], addresses of any alignment that the device has mapped, host memory
    too. Runs with both at multiples of 16 are by far the fastest. lengths: u32 [n], bytes. blocks:
    thread blocks at most.
    """
    check_blocks(blocks)
    to = Buffer.of("targets", targets).checked((None,), "u64", device=library.device, dense_from=0)
    runs = params.Runs(
        to.address,
        Buffer.of("sources", sources).checked(to.shape, "u64", device=library.device, dense_from=0).address,
        Buffer.of("lengths", lengths).checked(to.shape, "u32", device=library.device, dense_from=0).address,
        to.shape[0],
    )
    library.launch(RUNS_KERNEL, (min(blocks, to.shape[0]), 1, 1), runs)


def layer_addresses(tensors: Sequence[Array]) -> list[int]:
    """`Place.addresses` for an engine's tensors. Raises InvalidArgument if they are unlike."""
    return [buffer.address for buffer in _alike("tensors", tensors)]


def summarize_pages(library: Library, keys: Array, pages: Array, *, tokens: Array, to: Array) -> Array:
    """Fills `to` with the least and greatest key per channel of n pages; inf, -inf for no tokens.

    keys: [pages, page_tokens, kv_heads, head_dim], as stored. pages: i32 [n]. tokens: i32 [n], how
    many of each are there. to: f32 [n, kv_heads, 2, head_dim]. Raises InvalidArgument.
    """
    found = Buffer.of("keys", keys).checked((None, None, None, None), *STORED, device=library.device, dense_from=3)
    ids = Buffer.of("pages", pages).checked((None,), "i32", device=library.device, dense_from=0)
    n, kv_heads, dim = ids.shape[0], *found.shape[2:]
    summary = params.Summary(
        found.address,
        *found.strides[:3],
        ids.address,
        Buffer.of("tokens", tokens).checked((n,), "i32", device=library.device, dense_from=0).address,
        Buffer.of("to", to).checked((n, kv_heads, 2, dim), "f32", device=library.device, dense_from=0).address,
        kv_heads,
        dim,
        *found.shape[:2],
    )
    library.launch(f"summarize_{found.dtype}", (n, kv_heads, 1), summary)
    return to


@dataclass(frozen=True, slots=True)
class _Side:
    """A Place, checked. count: of pages to copy. buffer: with all six axes; if layers have
    addresses, without a stride between them."""

    buffer: Buffer
    pages: Buffer | None
    addresses: Buffer | None

    @property
    def count(self) -> int:
        return (self.pages or self.buffer).shape[0]

    def params(self) -> params.Side:
        all_of, pages = self.buffer, address_of(self.pages)
        return params.Side(all_of.address, address_of(self.addresses), pages, all_of.strides[:5], all_of.shape[0])


@dataclass(frozen=True, slots=True)
class _Rows:
    """counts: of pages, layers, kinds, tokens and heads; 1 if such an axis is part of a row."""

    counts: tuple[int, ...]
    row_bytes: int


def _side(name: str, place: Place, device: str) -> _Side:
    is_list = isinstance(place.array, Sequence)
    buffer = _layered(f"{name}.array", place.array) if is_list else Buffer.of(f"{name}.array", place.array)
    buffer.checked((None,) * 6, device="cpu" if place.is_mapped else device, dense_from=5).aligned()
    if is_list != (place.addresses is not None):
        raise InvalidArgument(f"{name}.addresses: wanted with a sequence of tensors, and with nothing else")
    pages, addresses = (
        None
        if array is None
        else Buffer.of(f"{name}.{field}", array).checked((length,), kind, device=device, dense_from=0)
        for field, array, length, kind in (
            ("pages", place.pages, None, "i32"),
            ("addresses", place.addresses, buffer.shape[1], "i64"),
        )
    )
    return _Side(buffer, pages, addresses)


def _alike(name: str, tensors: Sequence[Array]) -> list[Buffer]:
    """Tensors that differ only in their addresses."""
    found = [Buffer.of(f"{name}[{i}]", tensor).aligned() for i, tensor in enumerate(tensors)]
    if not found:
        raise InvalidArgument(f"{name}: no tensors; give one for each layer")
    for other in found[1:]:
        if replace(other, name="", address=0) != replace(found[0], name="", address=0):
            raise InvalidArgument(
                f"{other.name}: its shape, strides, type or device differ from those of {found[0].name}"
            )
    return found


def _layered(name: str, tensors: Sequence[Array]) -> Buffer:
    """Tensors of layers as one buffer."""
    first = _alike(name, tensors)[0]
    shape, strides = first.shape, first.strides
    return replace(
        first, name=name, shape=(*shape[:1], len(tensors), *shape[1:]), strides=(*strides[:1], 0, *strides[1:])
    )


def _rows(of: _Side, to: _Side) -> _Rows:
    """The longest rows contiguous on both sides, in pieces of 16 bytes. Raises InvalidArgument."""
    counts, row_bytes = [of.count, *of.buffer.shape[1:5]], of.buffer.shape[5] * BYTES[of.buffer.dtype]
    if row_bytes % ALIGNMENT_BYTES:
        raise InvalidArgument(
            f"source.array: {row_bytes} bytes of a token and head are no multiple of {ALIGNMENT_BYTES}"
        )
    for axis in (4, 3, 2, 1):
        if counts[axis] == 1:
            continue
        if {of.buffer.strides[axis], to.buffer.strides[axis]} != {row_bytes}:
            break
        row_bytes *= counts[axis]
        counts[axis] = 1
    return _Rows(tuple(counts), row_bytes)
