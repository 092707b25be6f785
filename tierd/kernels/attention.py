"""The kernels of cuda/ behind the signature of `reference.paged_attention`: pages as they lie in mapped memory, and lists for tables.

Purpose: `KernelAttention`, which a worker uses in place of the reference. Non-purpose: captured graphs, whose caller keeps its arrays on the device and uses
`paged` itself. Invariants: no page is copied; queries are rounded to the type of the pages; what comes out has the type of the queries and lies beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.kernels.buffers import Buffer
from tierd.kernels.library import Library
from tierd.kernels.paged import Chunks, DecodeShape, DeviceBatch, PagedDecode, decode_blocks, paged_prefill
from tierd.kernels.pages import KvPages
from tierd.kernels.reference import Attended, PagedBatch

Array = Any
"""A numpy array or a torch tensor."""


class KernelAttention:
    """Attention of numpy arrays or torch tensors by a library of kernels that runs where they lie; of torch in its current stream. One caller thread."""

    def __init__(self, library: Library) -> None:
        """library: of the device of all that it will be given."""
        self._library = library
        self._decodes: dict[DecodeShape, PagedDecode] = {}

    def __call__(
        self,
        q: Array,
        pages: Sequence[Array],
        batch: PagedBatch,
        *,
        scale: float | None = None,
        with_mass: bool = False,
    ) -> Attended:
        """As `reference.paged_attention`. Raises InvalidArgument also for what no kernel takes, naming it.

        Page masses of several query rows of a sequence are those of as many decodes, added up.
        """
        if not len(pages):
            raise InvalidArgument("pages: there are none; kernels need an address")
        batch.checked(q.shape[0], pages[0].shape[1])
        pool = _Pool.of(pages)
        queries = _dense(q, pages[0].dtype)
        rows = _Rows.of(batch)
        if with_mass or rows.are_single:
            done = self._decode(queries, pool, rows.as_requests(batch), scale, with_mass=with_mass)
        else:
            done = self._prefill(queries, pool, batch, scale)
        mass = _masses(done.mass, batch, pages[0].shape[1]) if with_mass else None
        return Attended(array_namespace(q).astype(done.out, q.dtype, copy=False), done.lse, mass)

    def _decode(self, q: Array, pool: _Pool, batch: PagedBatch, scale: float | None, *, with_mass: bool) -> Attended:
        n, q_heads, head_dim = q.shape
        shape = DecodeShape(1 << (n - 1).bit_length(), q_heads, pool.kv.k.shape[2], head_dim)
        if shape not in self._decodes:
            kind = pool.kv.k.dtype
            blocks = decode_blocks(self._library, shape, q_type=kind, kv_type=kind)
            self._decodes[shape] = PagedDecode(self._library, shape, blocks=blocks, allocate=_beside(q))
        told = pool.batch(batch, scale, q)
        to = _room(q, mass_pages=told.tables.shape[1] if with_mass else None)
        return self._decodes[shape](q, pool.kv, told, to)

    def _prefill(self, q: Array, pool: _Pool, batch: PagedBatch, scale: float | None) -> Attended:
        starts = np.asarray(batch.query_starts, np.int32)
        chunks = Chunks(q, _placed(starts, q), int(np.diff(starts).max()))
        return paged_prefill(self._library, chunks, pool.kv, pool.batch(batch, scale, q), _room(q))


@dataclass(frozen=True, slots=True)
class _Pool:
    """Pages at multiples of one step from the lowest of them. numbers: int64 [pages], which multiple each is."""

    kv: KvPages
    numbers: NDArray[np.int64]

    @classmethod
    def of(cls, pages: Sequence[Array]) -> _Pool:
        """pages: [2, page_tokens, kv_heads, head_dim] each. Raises InvalidArgument for pages that are not alike, or too far apart."""
        found = [Buffer.of(f"pages[{i}]", page) for i, page in enumerate(pages)]
        starts = np.array([page.address for page in found])
        lowest = starts.min()
        first = found[int(starts.argmin())]
        for page in found:
            _check_alike(page, first)
        step = int(np.gcd.reduce(starts - lowest)) or first.shape[0] * first.strides[0]
        numbers = (starts - lowest) // step
        if numbers.max() > np.iinfo(np.int32).max:
            raise InvalidArgument(
                f"pages: lie {starts.max() - lowest} bytes apart in steps of {step}, above 2^31 steps; take them from one pool"
            )
        shape, strides = (int(numbers.max()) + 1, *first.shape[1:]), (step, *first.strides[1:])
        k = replace(first, shape=shape, strides=strides)
        return cls(KvPages(k, replace(k, address=k.address + first.strides[0])), numbers)

    def batch(self, batch: PagedBatch, scale: float | None, q: Array) -> DeviceBatch:
        """The same in arrays beside the queries; behind a table's end stands page 0."""
        tables = np.zeros((len(batch.tables), max(1, *map(len, batch.tables))), np.int32)
        for row, table in zip(tables, batch.tables, strict=True):
            row[: len(table)] = self.numbers[list(table)]
        lens = np.asarray(batch.kv_lens, np.int32)
        subsets, sizes = (_placed(array, q) for array in _subsets(batch))
        return DeviceBatch(_placed(lens, q), _placed(tables, q), batch.sinks, batch.window, subsets, sizes, scale)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of each query row: its sequence, and the tokens up to its own."""

    sequences: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, batch: PagedBatch) -> _Rows:
        starts = np.asarray(batch.query_starts)
        sequences = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        behind = starts[1:][sequences] - 1 - np.arange(len(sequences))
        return cls(sequences, np.maximum(np.asarray(batch.kv_lens)[sequences] - behind, 0))

    @property
    def are_single(self) -> bool:
        """Whether no sequence has two."""
        return len(np.unique(self.sequences)) == len(self.sequences)

    def as_requests(self, batch: PagedBatch) -> PagedBatch:
        """Each a sequence of its own, which ends with it."""
        return PagedBatch(
            range(len(self.sequences) + 1),
            self.lengths.tolist(),
            [batch.tables[i] for i in self.sequences],
            batch.sinks,
            batch.window,
            None if batch.subsets is None else [batch.subsets[i] for i in self.sequences],
        )


def _check_alike(page: Buffer, first: Buffer) -> None:
    mine, its = ((one.shape, one.strides, one.dtype, one.device) for one in (page, first))
    if mine != its:
        raise InvalidArgument(
            f"{page.name}: {page.dtype} {page.shape} with strides {page.strides} on {page.device} is unlike the others, "
            f"{first.dtype} {first.shape} with {first.strides} on {first.device}; give pages of one layout in one place"
        )


def _masses(mass: Array, batch: PagedBatch, page_tokens: int) -> list[Array]:
    """mass: f32 [rows, q_heads, pages]. Summed over each sequence's rows: f32 [q_heads, pages that hold its tokens]."""
    starts = batch.query_starts
    return [
        mass[starts[i] : starts[i + 1], :, : -(-length // page_tokens)].sum(0) for i, length in enumerate(batch.kv_lens)
    ]


def _subsets(batch: PagedBatch) -> tuple[Array, Array]:
    """i32 [n, kv_heads, most] and [n, kv_heads]; None twice if all pages are seen."""
    if batch.subsets is None:
        return None, None
    sizes = np.array([[len(head) for head in heads] for heads in batch.subsets], np.int32)
    subsets = np.zeros((*sizes.shape, max(1, int(sizes.max()))), np.int32)
    for i, heads in enumerate(batch.subsets):
        for j, head in enumerate(heads):
            subsets[i, j, : len(head)] = head
    return subsets, sizes


def _dense(array: Array, dtype: Any) -> Array:
    """In this type, without gaps."""
    cast = array_namespace(array).astype(array, dtype, copy=False)
    return cast.contiguous() if hasattr(cast, "contiguous") else np.ascontiguousarray(cast)


def _placed(array: NDArray[np.int32] | None, q: Array) -> Array:
    """An array of the library of these queries, where they lie."""
    return None if array is None else array_namespace(q).asarray(array, device=device(q))


def _beside(q: Array) -> Callable[[tuple[int, ...], str], Array]:
    """What makes empty arrays where these queries lie."""
    xp, place = array_namespace(q), device(q)
    return lambda shape, dtype: xp.empty(shape, dtype=getattr(xp, dtype), device=place)


def _room(q: Array, *, mass_pages: int | None = None) -> Attended:
    """What a kernel fills for these queries."""
    rows, q_heads, _ = q.shape
    empty, xp = _beside(q), array_namespace(q)
    mass = None if mass_pages is None else empty((rows, q_heads, mass_pages), "float32")
    return Attended(xp.empty_like(q), empty((rows, q_heads), "float32"), mass)
