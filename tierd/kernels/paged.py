"""Paged attention by the kernels of cuda/: decode, prefill and the merge of partial results.

It checks arguments, fills in parameters and launches. `reference` defines the results, and tests
compare. After a `PagedDecode` was made it allocates nothing, except for page masses: at first use
and for longer tables. It releases nothing before it is deleted, and reads nothing back. So a
captured graph may replay it with other lengths and tables in the same arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tierd.errors import InvalidArgument
from tierd.kernels import params
from tierd.kernels.arguments import Arguments, DeviceBatch, group_of
from tierd.kernels.buffers import ALIGNMENT_BYTES, BYTES, Array, Buffer, seen
from tierd.kernels.coded import NARROW_GROUP, CodedPages
from tierd.kernels.fitting import TILE_TOKENS, decode_fit, prefill_fit, prefill_rows
from tierd.kernels.library import Library
from tierd.kernels.pages import KvPages, check_blocks
from tierd.kernels.prepared import Kept, Launch, Prepared
from tierd.kernels.reference import Attended

MERGE_THREADS = MASS_THREADS = CLEAR_THREADS = 128
"""As in cuda/src."""
ARGUMENTS = (
    "q",
    "pages.k",
    "pages.v",
    "pages.k_scales",
    "pages.v_scales",
    "batch.kv_lens",
    "batch.tables",
    "batch.subsets",
    "batch.subset_sizes",
    "out",
    "lse",
    "mass",
)
"""Arrays of a call of PagedDecode. Below: the fields of parameters with their addresses."""
ABSENT: tuple[int, tuple[Any, ...]] = (0, ())
OF_BATCH = {name: name for name in ARGUMENTS if name.startswith("batch.")}
OF_POOL = {"pool.k": "pages.k", "pool.v": "pages.v", "k_scales": "pages.k_scales", "v_scales": "pages.v_scales"}
OF_KEEPING = OF_BATCH | OF_POOL | {"q": "q", "to": "out", "lse_to": "lse"}
OF_DECODE = OF_KEEPING | {"mass": "mass"}
OF_MASS = OF_BATCH | {"lse": "lse", "mass": "mass"}


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The most sequences of a decode, and the heads of its model."""

    requests: int
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """Query tokens of several sequences. q: bf16 or f16 [tokens, q_heads, head_dim].

    starts: i32 [n + 1]. longest: the most tokens of a sequence. Outputs of tokens beyond it are
    NaN, up to a block's rows.
    """

    q: Array
    starts: Array
    longest: int


class PagedDecode:
    """Attention of one query token of each of up to `requests` sequences. Raises InvalidArgument.

    blocks: thread blocks that share the work; best as many as fit the GPU at once.
        allocate: makes its arrays from a shape and a dtype name, at multiples of 16 bytes.

    Calls share these arrays, so they run one after another in a stream. Two arrays count launches
    and the parts of blocks. The constructor clears them in the current stream: use the stream of
    the calls, or wait before the first. Do not construct it during a graph capture. Lengths must
    not change during a call, and calls must not overlap. Else their results are wrong, but those of
    later calls are right.
    """

    def __init__(
        self, library: Library, shape: DecodeShape, *, blocks: int, allocate: Callable[[tuple[int, ...], str], Array]
    ) -> None:
        self._group = group_of(shape.q_heads, shape.kv_heads, shape.head_dim)
        check_blocks(blocks)
        self._library, self._shape, self._blocks, self._allocate = library, shape, blocks, allocate
        parts = blocks + shape.requests * shape.kv_heads
        self._launches, self._arrived = (allocate((count,), "int64") for count in (1, parts))
        for each, words in ((self._launches, 2), (self._arrived, 2 * parts)):
            clear = params.Clear(self._address(each), words)
            library.launch("decode_clear", (-(-words // CLEAR_THREADS), 1, 1), clear)
        self._out = allocate((parts, self._group, shape.head_dim), "float32")
        self._lse = allocate((2, parts, self._group), "float32")
        self._tile_lses: list[Array] = []  # with every one that a captured graph may hold
        self._kept = Kept()

    def __call__(
        self, q: Array, pages: KvPages | CodedPages, batch: DeviceBatch, to: Attended, *, adds: bool = False
    ) -> Attended:
        """Fills `to`: out [n, q_heads, head_dim] as q, lse f32 [n, q_heads] (natural), and mass.

        mass: f32 [n, q_heads, pages of a table], if given; `adds`: to what it holds.
        q: bf16 or f16 [n, q_heads, head_dim]. Raises InvalidArgument, naming the argument. Every
        call checks its arguments; the launches of a layout are prepared at its first call.
        """
        addresses, layout = _looked_at(q, pages, batch, to)
        made = self._kept.find_or_make((layout, adds), lambda: self._prepared(q, pages, batch, to, adds=adds))
        made.launch(self._library, addresses)
        return to

    def _prepared(
        self, q: Array, pages: KvPages | CodedPages, batch: DeviceBatch, to: Attended, *, adds: bool
    ) -> Prepared:
        """The launches of a call with such arguments, which are checked."""
        n, shape = _shape_of("q", q, 3, self._library)[0], self._shape
        if not 0 < n <= shape.requests:
            raise InvalidArgument(f"q: {n} sequences; this decode was made for 1 to {shape.requests}")
        asked = Arguments(self._library.device, n, shape.q_heads, shape.kv_heads, shape.head_dim)
        queries, pool = asked.queries(q, n), asked.pool(pages)
        batch_params = asked.batch(batch, n)
        table_pages, table_tiles = (
            batch_params.table_stride,
            batch_params.table_stride * pool.page_tokens // TILE_TOKENS,
        )
        if isinstance(pages, CodedPages) and to.mass is not None:
            raise InvalidArgument("mass: kernels of coded pages have no page masses; give none, or decode the pages")
        out, lse, mass = asked.like("out", to.out, queries), asked.lse(to.lse, n), asked.mass(to.mass, table_pages)
        fit = decode_fit(self._library, shape.head_dim, self._group, asked.kv_type)
        tiles = mass and self._tiles(table_tiles)
        decode = params.Decode(
            batch_params,
            pool,
            queries.address,
            out,
            lse,
            *map(self._address, (self._out, self._lse, self._launches, self._arrived)),
            tiles,
            None if adds else mass,
            asked.k_scales,
            asked.v_scales,
            shape.q_heads,
            fit.depth,
            _scale(batch.scale, shape.head_dim) * math.log2(math.e),
        )
        kernel = _decode_kernel(queries.dtype, asked.kv_type, shape.head_dim, self._group) + ("_mass" if tiles else "")
        launches = [Launch(kernel, (self._blocks, 1, 1), decode, OF_KEEPING if adds else OF_DECODE, fit.shared_bytes)]
        if tiles:
            weigh = params.Mass(batch_params, tiles, lse, mass, shape.q_heads, pool.page_tokens)
            grid = (n * shape.kv_heads, -(-table_tiles // MASS_THREADS), 1)
            launches.append(Launch("decode_page_mass", grid, weigh, OF_MASS))
        return Prepared(launches, ARGUMENTS)

    def _tiles(self, tiles: int) -> int:
        if not self._tile_lses or self._tile_lses[-1].shape[2] < tiles:
            room = 1 << (tiles - 1).bit_length()  # all of them together are at most twice the last
            self._tile_lses.append(self._allocate((self._shape.requests, self._shape.q_heads, room), "float32"))
        return self._address(self._tile_lses[-1])

    @staticmethod
    def _address(kept: Array) -> int:
        """Of an array that was allocated for it."""
        return Buffer.of("workspace", kept).address


def decode_blocks(library: Library, shape: DecodeShape, *, q_type: str, kv_type: str) -> int:
    """The best `blocks` of a PagedDecode: as many as the device runs at once. Types as in
    `buffers.DTYPES`. Raises InvalidArgument."""
    group = group_of(shape.q_heads, shape.kv_heads, shape.head_dim)
    shared_bytes = decode_fit(library, shape.head_dim, group, kv_type).shared_bytes
    return library.resident_blocks(_decode_kernel(q_type, kv_type, shape.head_dim, group), shared_bytes=shared_bytes)


def _decode_kernel(q_type: str, kv_type: str, head_dim: int, group: int) -> str:
    """The one without page masses."""
    return f"decode_{q_type}_{kv_type}_{head_dim}" + ("_wide" if group > NARROW_GROUP else "")


def paged_prefill(library: Library, chunks: Chunks, pages: KvPages, batch: DeviceBatch, to: Attended) -> Attended:
    """Causal attention of the last tokens of each sequence: a prompt, or tokens appended to one.
    Fills `to`: out as the queries, lse f32 [tokens, q_heads] (natural). Raises InvalidArgument."""
    tokens, q_heads, head_dim = _shape_of("q", chunks.q, 3, library)
    kv_heads, n = _shape_of("pages.k", pages.k, 4, library)[2], _shape_of("batch.kv_lens", batch.kv_lens, 1, library)[0]
    group = group_of(q_heads, kv_heads, head_dim)
    asked = Arguments(library.device, n, q_heads, kv_heads, head_dim)
    queries, pool, batch_params = asked.queries(chunks.q, tokens), asked.pool(pages), asked.batch(batch, n)
    starts = Buffer.of("chunks.starts", chunks.starts).checked((n + 1,), "i32", device=library.device)
    if chunks.longest * n < tokens:
        raise InvalidArgument(
            f"chunks.longest: {n} sequences of at most {chunks.longest} tokens have no {tokens}; give the most tokens of a sequence"
        )
    fit = prefill_fit(library, head_dim, asked.kv_type)
    prefill = params.Prefill(
        batch_params,
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
    grid = (kv_heads * -(-chunks.longest * group // prefill_rows(head_dim)), n, 1)
    kernel = f"prefill_{queries.dtype}_{asked.kv_type}_{head_dim}"
    library.launch(kernel, grid, prefill, shared_bytes=fit.shared_bytes)
    return to


def merge_parts(library: Library, outs: Array, lses: Array, to: Attended) -> Attended:
    """Attention over a union of keys. Raises InvalidArgument. outs: [parts, rows, heads, dim].
    lses: f32 [parts, rows, heads] (natural)."""
    device = library.device
    given = Buffer.of("outs", outs).checked((None,) * 4, "bf16", "f16", "f32", device=device)
    parts, rows, heads, dim = given.shape
    logs = Buffer.of("lses", lses).checked((parts, rows, heads), "f32", device=device)
    out = Buffer.of("out", to.out).checked((rows, heads, dim), given.dtype, device=device)
    lse = Buffer.of("lse", to.lse).checked((rows, heads), "f32", device=device)
    merge = params.Merge(given.address, logs.address, out.address, lse.address, rows * heads, parts, dim)
    library.launch(f"merge_{given.dtype}", (_merge_blocks(merge, given.dtype), 1, 1), merge)
    return to


def merge_scattered(library: Library, parts: Sequence[Attended], addresses: Array, to: Attended) -> Attended:
    """The same of parts in separate arrays: out [rows, heads, dim] and lse f32 [rows, heads] each.
    addresses: i64 [2, parts], `part_addresses` on the kernel's device. Raises InvalidArgument."""
    outs, _ = _parts(parts)
    count, device = len(outs), library.device
    first = outs[0].checked(outs[0].shape, device=device)
    where = Buffer.of("addresses", addresses).checked((2, count), "i64", device=device).address
    out = Buffer.of("out", to.out).checked(first.shape, first.dtype, device=device).address
    lse = Buffer.of("lse", to.lse).checked(first.shape[:2], "f32", device=device).address
    rows, dim = first.shape[0] * first.shape[1], first.shape[2]
    merge = params.Merge(where, where + count * BYTES["i64"], out, lse, rows, count, dim)
    library.launch(f"merge_scattered_{first.dtype}", (_merge_blocks(merge, first.dtype), 1, 1), merge)
    return to


def _merge_blocks(merge: params.Merge, dtype: str) -> int:
    """A thread for each piece of a row."""
    rows, dim = int(merge.rows), int(merge.dim)
    return max(min(rows, 1), -(-(rows * dim * BYTES[dtype] // ALIGNMENT_BYTES) // MERGE_THREADS))


def part_addresses(parts: Sequence[Attended]) -> list[list[int]]:
    """The addresses for `merge_scattered`. Raises InvalidArgument if a part is unlike the first."""
    return [[buffer.address for buffer in buffers] for buffers in _parts(parts)]


def _parts(parts: Sequence[Attended]) -> tuple[list[Buffer], list[Buffer]]:
    """Outputs and log-sum-exps, all on one device. Raises InvalidArgument."""
    outs: list[Buffer] = []
    lses: list[Buffer] = []
    shape: tuple[int | None, ...] = (None, None, None)
    types: tuple[str, ...] = ("bf16", "f16", "f32")
    place = ""
    for i, part in enumerate(parts):
        out, lse = Buffer.of(f"parts[{i}].out", part.out), Buffer.of(f"parts[{i}].lse", part.lse)
        place = place or out.device
        outs.append(out.checked(shape, *types, device=place))
        shape, types = out.shape, (out.dtype,)
        lses.append(lse.checked(shape[:2], "f32", device=place))
    if not outs:
        raise InvalidArgument("parts: there are none; give at least one")
    return outs, lses


def _looked_at(
    q: Array, pages: KvPages | CodedPages, batch: DeviceBatch, to: Attended
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Addresses of ARGUMENTS, and all else that a launch depends on."""
    of_batch = (batch.kv_lens, batch.tables, batch.subsets, batch.subset_sizes)
    given = (q, *pages.arrays, *of_batch, to.out, to.lse, to.mass)
    looked = [ABSENT if array is None else seen(name, array) for name, array in zip(ARGUMENTS, given, strict=True)]
    addresses, layouts = zip(*looked, strict=True)
    codec = pages.codec if isinstance(pages, CodedPages) else ""
    return addresses, (layouts, codec, batch.sinks, batch.window, batch.scale)


def _shape_of(name: str, array: Array, axes: int, library: Library) -> tuple[int, ...]:
    """The shape of an array of so many axes. Raises InvalidArgument."""
    return Buffer.of(name, array).checked((None,) * axes, device=library.device, dense_from=axes).shape


def _scale(scale: float | None, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if scale is None else scale
