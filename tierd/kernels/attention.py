"""The kernels of cuda/ with the signature of `reference.paged_attention`.

A worker uses `KernelAttention` instead of the reference: pages stay in mapped memory, tables are
lists. For captured graphs, callers keep their arrays on the device and use `paged`. No page is
copied. Queries are rounded to the type of the pages, beside pages of e4m3 to 16 bits. The output
has the type and device of the queries.
"""

from __future__ import annotations

import itertools
import logging
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
from tierd.kernels.prefills import Prefill, takes
from tierd.kernels.reference import MASS_ROWS, Attended, PagedBatch
from tierd.kernels.shared import SharedParts

Array = Any
"""A numpy array or a torch tensor."""
_log = logging.getLogger(__name__)


class KernelAttention:
    """Attention by a library of kernels, on the device of the arrays. One caller thread.

    Arrays are numpy's, torch's (in its current stream), or others with a namespace of the array API
    (`asarray`, `empty`, `empty_like`, `astype`). Shared prefixes are read once if it has `take`.
    """

    def __init__(self, library: Library, prefill: Prefill | None = None) -> None:
        """library: for the device of all arrays. prefill: another project's, for what it takes."""
        self.library, self.prefill = library, prefill
        self._decodes: dict[DecodeShape, PagedDecode] = {}
        self._scales: tuple[NDArray[np.float32] | None, Array] = None, None

    @property
    def name(self) -> str:
        """Of the kernels that attend."""
        return "tierd" + (f", prefill by {self.prefill.name}" if self.prefill else "")

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
        masses come to the host."""
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

    def attended(self, q: Array, kv: KvPages, batch: DeviceBatch) -> Attended:
        """`decode` into new outputs."""
        queries = _dense(q)
        return self.decode(queries, kv, batch, _room(queries))

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
        rows = len(self._rows.sequences)
        self._singles = rows if self._rows.are_single else self._rows.count_singles(len(batch.tables))
        self._decoded: dict[tuple[int, int], DeviceBatch] = {}
        self._mass: dict[tuple[int, int], Array] = {}
        self._begun: set[tuple[int, int]] = set()
        self._prefilled: tuple[PagedBatch, DeviceBatch, Array, int] | None = None
        self._planned: Any = None
        self._stored: Array = None
        self._own: KernelPass | None = None
        self._shared: SharedParts | None = None
        if batch.shared and batch.is_plain:
            self._own = KernelPass(attention, pool, batch.apart(pool.page_tokens))

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
        if self._own is not None and not with_mass and hasattr(array_namespace(q), "take"):
            if self._shared is None:
                self._shared = SharedParts(self._attention.library, self._pool, self._batch, q)
            done = self._own.attend(layer, queries, scale=scale)
            self._shared.merge(queries, kv, scale, done)
            return Attended(cast(done.out, q.dtype), done.lse)
        done, ones = _room(queries), self._singles
        if ones:
            self._decode(queries, (0, ones), kv, scale, self._measured(done, (0, ones), with_mass=with_mass))
        if ones < rows:
            self._prefill(queries, kv, scale, Attended(done.out[ones:], done.lse[ones:]))
        for span in self._rows.last_of(self._batch, ones) if with_mass else ():
            self._decode(queries, span, kv, scale, self._measured(_room(queries), span, with_mass=True))
        return Attended(cast(done.out, q.dtype), done.lse)

    def masses(self, q: Array) -> list[Array]:
        """The page masses of all layers so far, [q_heads, its pages] of each sequence, on the host.
        Waits for the device. q: as attended."""
        size = self._pool.page_tokens
        sums = [np.zeros((q.shape[1], -(-length // size)), np.float32) for length in self._batch.kv_lens]
        for (first, _), mass in self._mass.items():
            for row, one in enumerate(np.asarray(to_device(mass, "cpu")), first):
                to = sums[self._rows.sequences[row]]
                to += one[:, : to.shape[1]]
        return sums

    def _layer(self, layer: int, array: Array) -> KvPages:
        """One layer of the pool, with its scales, if any, on the array's device."""
        scales = self._pool.scales
        return self._pool.layer(layer, None if scales is None else self._attention.beside(scales, array))

    def _measured(self, to: Attended, span: tuple[int, int], *, with_mass: bool) -> Attended:
        """Rows of a span in these outputs, with room for their masses."""
        some = slice(*span)
        if with_mass and span not in self._mass:
            pages = max(map(len, self._rows.as_requests(self._batch, *span).tables), default=0)
            self._mass[span] = _beside(to.out)((span[1] - span[0], to.out.shape[1], max(1, pages)), "float32")
        return Attended(to.out[some], to.lse[some], self._mass[span] if with_mass else None)

    def _decode(self, q: Array, span: tuple[int, int], kv: KvPages, scale: float | None, to: Attended) -> None:
        """Rows of a span, each as a sequence that ends with it. Adds masses to those of earlier layers."""
        if span not in self._decoded:
            self._decoded[span] = self._pool.batch(self._rows.as_requests(self._batch, *span), q)
        batch, adds = replace(self._decoded[span], scale=scale), to.mass is not None and span in self._begun
        self._attention.decode(q[slice(*span)], kv, batch, to, adds=adds)
        if to.mass is not None:
            self._begun.add(span)

    def _prefill(self, q: Array, kv: KvPages, scale: float | None, to: Attended) -> None:
        """Sequences behind the leading ones of one row."""
        ones = self._singles
        if self._prefilled is None:
            behind = _behind(self._batch, ones)
            starts = np.asarray(behind.query_starts, np.int32)
            self._prefilled = behind, self._pool.batch(behind, q), placed(starts, q), int(np.diff(starts).max())
        behind, batch, starts_there, longest = self._prefilled
        if scale is None and self._by_other(behind, batch, q[ones:], kv, to):
            return
        chunks = Chunks(q[ones:], starts_there, longest)
        paged_prefill(self._attention.library, chunks, kv, replace(batch, scale=scale), to)

    def _by_other(self, behind: PagedBatch, batch: DeviceBatch, q: Array, kv: KvPages, to: Attended) -> bool:
        """Whether another project's kernel attended. One that fails is not asked again."""
        other = self._attention.prefill
        if other is None or not takes(behind, kv):
            return False
        try:
            self._planned = self._planned or other.begin(behind, batch, self._pool.page_tokens)
            to.out[...], to.lse[...] = other.attend(self._planned, q, kv)
        except Exception as fault:  # noqa: BLE001 - whatever their compilers and checks raise
            _log.warning("prefill by %s failed; tierd's kernel takes over: %s", other.name, fault)
            self._attention.prefill = None
            return False
        return True


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

    def last_of(self, batch: PagedBatch, first: int) -> list[tuple[int, int]]:
        """The last MASS_ROWS rows of each sequence with rows, from row `first` on."""
        runs = itertools.pairwise(batch.query_starts)
        return [(max(start, stop - MASS_ROWS), stop) for start, stop in runs if first <= start < stop]

    def as_requests(self, batch: PagedBatch, first: int, stop: int) -> PagedBatch:
        """Makes each of these rows a sequence of its own, which ends with it."""
        sequences = self.sequences[first:stop]
        return PagedBatch(
            range(stop - first + 1),
            self.lengths[first:stop].tolist(),
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
