"""The kernels of cuda/ behind the signature of `reference.paged_attention`: pages as they lie in mapped memory, and lists for tables.

Purpose: `KernelAttention`, which a worker uses in place of the reference. Non-purpose: captured graphs, whose caller keeps its arrays on the device and uses
`paged` itself. Invariants: no page is copied; queries are rounded to the type of the pages; what comes out has the type of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.kernels.library import Library
from tierd.kernels.paged import Chunks, DecodeShape, DeviceBatch, PagedDecode, paged_prefill
from tierd.kernels.pages import KvPages
from tierd.kernels.reference import Attended, PagedBatch

Array = Any
"""A numpy array."""
BLOCKS = 8
"""Thread blocks of a decode: the emulator runs one after another."""


class KernelAttention:
    """Attention of numpy arrays by a library of kernels that runs where they lie. One caller thread."""

    def __init__(self, library: Library) -> None:
        """library: the emulator's."""
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
        queries = np.ascontiguousarray(q, dtype=pool.kv.k.dtype)
        rows = _Rows.of(batch)
        if with_mass or rows.are_single:
            done = self._decode(queries, pool, rows.as_requests(batch), scale, with_mass=with_mass)
        else:
            done = self._prefill(queries, pool, batch, scale)
        mass = rows.masses(done.mass, batch, pages[0].shape[1]) if with_mass else None
        return Attended(done.out.astype(q.dtype, copy=False), done.lse, mass)

    def _decode(self, q: Array, pool: _Pool, batch: PagedBatch, scale: float | None, *, with_mass: bool) -> Attended:
        n, q_heads, head_dim = q.shape
        shape = DecodeShape(1 << (n - 1).bit_length(), q_heads, pool.kv.k.shape[2], head_dim)
        if shape not in self._decodes:
            self._decodes[shape] = PagedDecode(self._library, shape, blocks=BLOCKS, allocate=np.empty)
        told = pool.batch(batch, scale)
        to = _room(q, mass_pages=told.tables.shape[1] if with_mass else None)
        return self._decodes[shape](q, pool.kv, told, to)

    def _prefill(self, q: Array, pool: _Pool, batch: PagedBatch, scale: float | None) -> Attended:
        starts = np.asarray(batch.query_starts, np.int32)
        chunks = Chunks(q, starts, int(np.diff(starts).max()))
        return paged_prefill(self._library, chunks, pool.kv, pool.batch(batch, scale), _room(q))


@dataclass(frozen=True, slots=True)
class _Pool:
    """Pages at multiples of one step from the lowest of them. numbers: int64 [pages], which multiple each is."""

    kv: KvPages
    numbers: NDArray[np.int64]

    @classmethod
    def of(cls, pages: Sequence[Array]) -> _Pool:
        """pages: [2, page_tokens, kv_heads, head_dim] each. Raises InvalidArgument for pages that are not alike, or too far apart."""
        starts = np.array([page.__array_interface__["data"][0] for page in pages])
        lowest = starts.min()
        first = pages[int(starts.argmin())]
        for i, page in enumerate(pages):
            if (page.shape, page.strides, page.dtype) != (first.shape, first.strides, first.dtype):
                raise InvalidArgument(
                    f"pages[{i}]: {page.dtype} {page.shape} with strides {page.strides} is unlike the others, "
                    f"{first.dtype} {first.shape} with {first.strides}; give pages of one layout"
                )
        step = int(np.gcd.reduce(starts - lowest)) or first.nbytes
        numbers = (starts - lowest) // step
        if numbers.max() > np.iinfo(np.int32).max:
            raise InvalidArgument(
                f"pages: lie {starts.max() - lowest} bytes apart in steps of {step}, above 2^31 steps; take them from one pool"
            )
        shape, strides = (int(numbers.max()) + 1, *first.shape[1:]), (step, *first.strides[1:])
        k, v = (as_strided(first[i], shape, strides, writeable=False) for i in (0, 1))
        return cls(KvPages(k, v), numbers)

    def batch(self, batch: PagedBatch, scale: float | None) -> DeviceBatch:
        """The same in arrays; behind a table's end stands page 0."""
        tables = np.zeros((len(batch.tables), max(1, *map(len, batch.tables))), np.int32)
        for row, table in zip(tables, batch.tables, strict=True):
            row[: len(table)] = self.numbers[list(table)]
        subsets, sizes = _subsets(batch)
        return DeviceBatch(
            np.asarray(batch.kv_lens, np.int32), tables, batch.sinks, batch.window, subsets, sizes, scale
        )


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

    def masses(self, mass: Array, batch: PagedBatch, page_tokens: int) -> list[Array]:
        """mass: f32 [rows, q_heads, pages]. Summed over each sequence's rows: f32 [q_heads, pages that hold its tokens]."""
        return [
            mass[self.sequences == i, :, : -(-length // page_tokens)].sum(0) for i, length in enumerate(batch.kv_lens)
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


def _room(q: Array, *, mass_pages: int | None = None) -> Attended:
    """What a kernel fills for these queries."""
    rows, q_heads, _ = q.shape
    mass: Any = None if mass_pages is None else np.empty((rows, q_heads, mass_pages), np.float32)
    return Attended(np.empty_like(q), np.empty((rows, q_heads), np.float32), mass)
