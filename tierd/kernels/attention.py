"""The kernels of cuda/ with the signature of `reference.paged_attention`.

A worker uses `KernelAttention` instead of the reference: pages stay in mapped memory, tables are
lists. For captured graphs, callers keep their arrays on the device and use `paged`. No page is
copied. Queries are rounded to the type of the pages, beside pages of e4m3 to 16 bits. The output
has the type and device of the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, to_device
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.kernels.arguments import DeviceBatch
from tierd.kernels.buffers import Buffer
from tierd.kernels.library import Library
from tierd.kernels.paged import Chunks, DecodeShape, PagedDecode, decode_blocks, paged_prefill
from tierd.kernels.pages import KvPages, store_tokens
from tierd.kernels.pool import Pool, cast, placed
from tierd.kernels.reference import Attended, PagedBatch

Array = Any
"""A numpy array or a torch tensor."""


class KernelAttention:
    """Attention by a library of kernels, on the device of the arrays. One caller thread.

    Arrays are numpy's, torch's (in its current stream), or others with a namespace of the array API
    (`asarray`, `empty`, `empty_like`, `astype`).
    """

    def __init__(self, library: Library) -> None:
        """library: for the device of all arrays."""
        self.library = library
        self._decodes: dict[DecodeShape, PagedDecode] = {}
        self._scales: tuple[NDArray[np.float32] | None, Array] = None, None

    def __call__(
        self,
        q: Array,
        pages: Sequence[Array],
        batch: PagedBatch,
        *,
        scale: float | None = None,
        with_mass: bool = False,
    ) -> Attended:
        """As `reference.paged_attention`. Raises InvalidArgument also if no kernel fits. Page
        masses of a sequence's query rows are the sum over as many decodes, on the host."""
        once = KernelPass(self, Pool.of(pages), batch)
        done = once.attend(0, q, scale=scale, with_mass=with_mass)
        return replace(done, mass=once.masses(q) if with_mass else None)

    def over(self, pages: Sequence[Array], batch: PagedBatch, *, slots: NDArray[np.int64]) -> KernelPass:
        """One pass of a model. Raises InvalidArgument.

        pages: [layers, 2, page_tokens, kv_heads, head_dim] each, contiguous layers; or ScaledPages;
        or Located, at a cost that does not grow with their number in Python.
        slots: i64 [tokens], where `store` writes: a page's place in `pages` * page_tokens + offset;
        negative: nowhere.
        """
        return KernelPass(self, Pool.of(pages), batch, slots=slots)

    def decode(self, q: Array, kv: KvPages, batch: DeviceBatch, to: Attended, *, adds: bool = False) -> Attended:
        """Of as many sequences as there are rows, each of which ends with its row. Fills `to`, or
        `adds` to its mass."""
        n, q_heads, head_dim = q.shape
        shape = DecodeShape(1 << (n - 1).bit_length(), q_heads, kv.k.shape[2], head_dim)
        if shape not in self._decodes:
            blocks = decode_blocks(self.library, shape, q_type=Buffer.of("q", q).dtype, kv_type=kv.k.dtype)
            self._decodes[shape] = PagedDecode(self.library, shape, blocks=blocks, allocate=_beside(q))
        return self._decodes[shape](q, kv, batch, to, adds=adds)

    def beside(self, scales: NDArray[np.float32], array: Array) -> Array:
        """These scales on an array's device: placed once while the same ones are asked for."""
        if self._scales[0] is not scales:
            self._scales = scales, placed(scales, array)
        return self._scales[1]


class KernelPass:
    """Stores new tokens and attends to pages, layer after layer, in one stream. The tables and
    slots are made and placed once."""

    def __init__(
        self, attention: KernelAttention, pool: Pool, batch: PagedBatch, *, slots: NDArray[np.int64] | None = None
    ) -> None:
        """Raises InvalidArgument."""
        self._attention, self._pool, self._slots = attention, pool, slots
        self._batch = batch.checked(batch.query_starts[-1] if len(batch.query_starts) else 0, pool.page_tokens)
        self._rows = _Rows.of(batch)
        self._singles = self._rows.count_singles(len(batch.tables))
        self._decoded: DeviceBatch | None = None
        self._prefilled: tuple[DeviceBatch, Array] | None = None
        self._stored: Array = None
        self._mass: Array = None

    def store(self, layer: int, k: Array, v: Array) -> None:
        """Writes a layer's new tokens [tokens, kv_heads, head_dim]. Raises InvalidArgument."""
        if self._stored is None:
            self._stored = placed(self._pool.slots(self._slots), k)
        keys, values = (self._pool.cast(array) for array in (k, v))
        store_tokens(self._attention.library, keys, values, self._stored, self._layer(layer, k))

    def attend(self, layer: int, q: Array, *, scale: float | None = None, with_mass: bool = False) -> Attended:
        """Attention of one layer. with_mass: its page masses are added on the device, for `masses`.
        Raises InvalidArgument."""
        rows = len(self._rows.sequences)
        if len(q.shape) != 3 or q.shape[0] != rows:
            raise InvalidArgument(f"q: has shape {list(q.shape)}; wanted {rows} query rows of heads and channels")
        if not rows:
            return _room(q)
        queries, kv = _dense(self._pool.cast(q)), self._layer(layer, q)
        if with_mass or self._rows.are_single:
            batch = replace(self._as_decodes(q, rows), scale=scale)
            adds = with_mass and self._mass is not None
            if with_mass and not adds:
                self._mass = _beside(queries)((rows, q.shape[1], batch.tables.shape[1]), "float32")
            to = replace(_room(queries), mass=self._mass if with_mass else None)
            done = self._attention.decode(queries, kv, batch, to, adds=adds)
        else:
            done = self._attend_apart(queries, kv, scale)
        return Attended(cast(done.out, q.dtype), done.lse)

    def masses(self, q: Array) -> list[Array]:
        """The page masses of all layers so far, [q_heads, its pages] of each sequence, on the host.
        Waits for the device. q: as attended."""
        most = max(map(len, self._batch.tables), default=0)
        mass = np.zeros((0, q.shape[1], most), np.float32) if self._mass is None else to_device(self._mass, "cpu")
        return _masses(mass, self._batch, self._pool.page_tokens)

    def _layer(self, layer: int, array: Array) -> KvPages:
        """One layer of the pool, with its scales, if any, on the array's device."""
        scales = self._pool.scales
        return self._pool.layer(layer, None if scales is None else self._attention.beside(scales, array))

    def _as_decodes(self, q: Array, rows: int) -> DeviceBatch:
        """The first rows, each as a sequence."""
        if self._decoded is None:
            self._decoded = self._pool.batch(self._rows.as_requests(self._batch, rows), q)
        return self._decoded

    def _attend_apart(self, q: Array, kv: KvPages, scale: float | None) -> Attended:
        """Leading sequences of one row by the decode kernel, which splits their keys; others by prefill."""
        to, ones = _room(q), self._singles
        if ones:
            batch = replace(self._as_decodes(q, ones), scale=scale)
            self._attention.decode(q[:ones], kv, batch, Attended(to.out[:ones], to.lse[:ones]))
        starts = np.asarray(self._batch.query_starts[ones:], np.int32) - ones
        if self._prefilled is None:
            self._prefilled = self._pool.batch(_behind(self._batch, ones), q), placed(starts, q)
        batch, on_device = self._prefilled
        chunks = Chunks(q[ones:], on_device, int(np.diff(starts).max()))
        rest = Attended(to.out[ones:], to.lse[ones:])
        paged_prefill(self._attention.library, chunks, kv, replace(batch, scale=scale), rest)
        return to


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
        """Whether no sequence has two rows."""
        return len(np.unique(self.sequences)) == len(self.sequences)

    def count_singles(self, sequences: int) -> int:
        """How many leading sequences have one row."""
        rows = np.bincount(self.sequences, minlength=sequences)
        return int(np.argmax(rows != 1)) if (rows != 1).any() else sequences

    def as_requests(self, batch: PagedBatch, rows: int) -> PagedBatch:
        """Makes each of the first rows a sequence of its own, which ends with it."""
        sequences = self.sequences[:rows]
        return PagedBatch(
            range(rows + 1),
            self.lengths[:rows].tolist(),
            [batch.tables[i] for i in sequences],
            batch.sinks,
            batch.window,
            None if batch.subsets is None else [batch.subsets[i] for i in sequences],
        )


def _behind(batch: PagedBatch, first: int) -> PagedBatch:
    """The sequences from this one on."""
    subsets = None if batch.subsets is None else batch.subsets[first:]
    starts = [start - batch.query_starts[first] for start in batch.query_starts[first:]]
    return PagedBatch(starts, batch.kv_lens[first:], batch.tables[first:], batch.sinks, batch.window, subsets)


def _masses(mass: Array, batch: PagedBatch, page_tokens: int) -> list[Array]:
    """mass: f32 [rows, q_heads, pages]. Returns the sums per sequence: f32 [q_heads, its pages]."""
    starts = batch.query_starts
    return [
        mass[starts[i] : starts[i + 1], :, : -(-length // page_tokens)].sum(0) for i, length in enumerate(batch.kv_lens)
    ]


def _dense(array: Array) -> Array:
    """Without gaps."""
    return array.contiguous() if hasattr(array, "contiguous") else array_namespace(array).asarray(array, order="C")


def _beside(q: Array) -> Callable[[tuple[int, ...], str], Array]:
    """A maker of empty arrays on the device of these queries."""
    xp, place = array_namespace(q), device(q)
    return lambda shape, dtype: xp.empty(shape, dtype=getattr(xp, dtype), device=place)


def _room(q: Array) -> Attended:
    """Empty outputs for these queries."""
    return Attended(array_namespace(q).empty_like(q), _beside(q)(q.shape[:2], "float32"))
