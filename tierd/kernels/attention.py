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
from tierd.kernels.buffers import BYTES, Buffer
from tierd.kernels.e4m3 import ScaledPages
from tierd.kernels.library import Library
from tierd.kernels.paged import Chunks, DecodeShape, PagedDecode, decode_blocks, paged_prefill
from tierd.kernels.pages import KvPages, store_tokens
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
        return KernelPass(self, _Pool.of(pages), batch).attend(0, q, scale=scale, with_mass=with_mass)

    def over(self, pages: Sequence[Array], batch: PagedBatch, *, slots: NDArray[np.int64]) -> KernelPass:
        """One pass of a model. Raises InvalidArgument.

        pages: [layers, 2, page_tokens, kv_heads, head_dim] each, contiguous layers; or ScaledPages.
        slots: i64 [tokens], where `store` writes: a page's place in `pages` * page_tokens + offset;
        negative: nowhere.
        """
        return KernelPass(self, _Pool.of(pages), batch, slots=slots)

    def decode(self, q: Array, kv: KvPages, batch: DeviceBatch, to: Attended) -> Attended:
        """Of as many sequences as there are rows, each of which ends with its row. Fills `to`."""
        n, q_heads, head_dim = q.shape
        shape = DecodeShape(1 << (n - 1).bit_length(), q_heads, kv.k.shape[2], head_dim)
        if shape not in self._decodes:
            blocks = decode_blocks(self.library, shape, q_type=Buffer.of("q", q).dtype, kv_type=kv.k.dtype)
            self._decodes[shape] = PagedDecode(self.library, shape, blocks=blocks, allocate=_beside(q))
        return self._decodes[shape](q, kv, batch, to)

    def beside(self, scales: NDArray[np.float32], array: Array) -> Array:
        """These scales on an array's device: placed once while the same ones are asked for."""
        if self._scales[0] is not scales:
            self._scales = scales, _placed(scales, array)
        return self._scales[1]


class KernelPass:
    """Stores new tokens and attends to pages, layer after layer, in one stream. The tables and
    slots are made and placed once."""

    def __init__(
        self, attention: KernelAttention, pool: _Pool, batch: PagedBatch, *, slots: NDArray[np.int64] | None = None
    ) -> None:
        """Raises InvalidArgument."""
        self._attention, self._pool, self._slots = attention, pool, slots
        self._batch = batch.checked(batch.query_starts[-1] if len(batch.query_starts) else 0, pool.page_tokens)
        self._rows = _Rows.of(batch)
        self._singles = self._rows.count_singles(len(batch.tables))
        self._decoded: DeviceBatch | None = None
        self._prefilled: tuple[DeviceBatch, Array] | None = None
        self._stored: Array = None

    def store(self, layer: int, k: Array, v: Array) -> None:
        """Writes a layer's new tokens [tokens, kv_heads, head_dim]. Raises InvalidArgument."""
        if self._stored is None:
            self._stored = _placed(self._pool.slots(self._slots), k)
        keys, values = (self._pool.cast(array) for array in (k, v))
        store_tokens(self._attention.library, keys, values, self._stored, self._layer(layer, k))

    def attend(self, layer: int, q: Array, *, scale: float | None = None, with_mass: bool = False) -> Attended:
        """Attention of one layer. Raises InvalidArgument."""
        rows = len(self._rows.sequences)
        if len(q.shape) != 3 or q.shape[0] != rows:
            raise InvalidArgument(f"q: has shape {list(q.shape)}; wanted {rows} query rows of heads and channels")
        if not rows:
            return self._nothing(q, with_mass=with_mass)
        queries, kv = _dense(self._pool.cast(q)), self._layer(layer, q)
        if with_mass or self._rows.are_single:
            batch = replace(self._as_decodes(q, rows), scale=scale)
            to = _room(queries, mass_pages=batch.tables.shape[1] if with_mass else None)
            done = self._attention.decode(queries, kv, batch, to)
        else:
            done = self._attend_apart(queries, kv, scale)
        mass = _masses(to_device(done.mass, "cpu"), self._batch, self._pool.page_tokens) if with_mass else None
        return Attended(_cast(done.out, q.dtype), done.lse, mass)

    def _layer(self, layer: int, array: Array) -> KvPages:
        """One layer of the pool, with its scales, if any, on the array's device."""
        scales = self._pool.scales
        return self._pool.layer(layer, None if scales is None else self._attention.beside(scales, array))

    def _nothing(self, q: Array, *, with_mass: bool) -> Attended:
        """The result for no rows at all."""
        masses = np.zeros((0, q.shape[1], max(map(len, self._batch.tables), default=0)), np.float32)
        return replace(_room(q), mass=_masses(masses, self._batch, self._pool.page_tokens) if with_mass else None)

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
            self._prefilled = self._pool.batch(_behind(self._batch, ones), q), _placed(starts, q)
        batch, placed = self._prefilled
        chunks = Chunks(q[ones:], placed, int(np.diff(starts).max()))
        rest = Attended(to.out[ones:], to.lse[ones:])
        paged_prefill(self._attention.library, chunks, kv, replace(batch, scale=scale), rest)
        return to


@dataclass(frozen=True, slots=True)
class _Pool:
    """Pages at multiples of one step from the lowest.

    first: the lowest, [layers, 2, page_tokens, kv_heads, head_dim]; dtype: as its array names it;
    numbers: int64 [pages], each one's multiple. scales: of e4m3 pages, f32 [layers, 2, kv_heads].
    """

    first: Buffer
    step: int
    dtype: Any
    numbers: NDArray[np.int64]
    scales: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, pages: Sequence[Array]) -> _Pool:
        """pages: [2, page_tokens, kv_heads, head_dim] each, or several layers of that. Raises
        InvalidArgument for pages that are not alike, or too far apart."""
        if not len(pages):
            raise InvalidArgument("pages: there are none; kernels need an address")
        if isinstance(pages, ScaledPages):
            return cls.of([_as_e4m3(i, page) for i, page in enumerate(pages.stored)])._scaled(pages.scales)
        found = [Buffer.of(f"pages[{i}]", page) for i, page in enumerate(pages)]
        starts = np.array([page.address for page in found])
        lowest = starts.min()
        first = found[int(starts.argmin())]
        for page in found:
            _check_alike(page, first)
        if len(first.shape) == 4:
            first = replace(first, shape=(1, *first.shape), strides=(0, *first.strides))
        step = int(np.gcd.reduce(starts - lowest)) or first.shape[1] * first.strides[1]
        numbers = (starts - lowest) // step
        if numbers.max() > np.iinfo(np.int32).max:
            raise InvalidArgument(
                f"pages: lie {starts.max() - lowest} bytes apart in steps of {step}, above 2^31 steps; take them from one pool"
            )
        return cls(first, step, pages[0].dtype, numbers)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.first.shape[2]

    def cast(self, array: Array) -> Array:
        """Queries or new tokens in a type that kernels take beside these pages."""
        if self.scales is None:
            return _cast(array, self.dtype)
        return array if str(array.dtype).removeprefix("torch.") in ("bfloat16", "float16") else _cast(array, "float16")

    def layer(self, layer: int, scales: Array) -> KvPages:
        """K and V of one layer. scales: those of the pool, placed."""
        first = self.first
        shape, strides = (int(self.numbers.max()) + 1, *first.shape[2:]), (self.step, *first.strides[2:])
        k = replace(first, address=first.address + layer * first.strides[0], shape=shape, strides=strides)
        v = replace(k, address=k.address + first.strides[1])
        if scales is None:
            return KvPages(k, v)
        heads = shape[2]
        every = Buffer.of("pages.k_scales", scales)
        k_scales = replace(
            every, address=every.address + layer * 2 * heads * BYTES["f32"], shape=(heads,), strides=(BYTES["f32"],)
        )
        return KvPages(k, v, k_scales, replace(k_scales, address=k_scales.address + heads * BYTES["f32"]))

    def slots(self, slots: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Turns slots by place in the list into slots of the pool. Raises InvalidArgument."""
        if slots is None:
            raise InvalidArgument("slots: not given; give a slot for each new token")
        pages, offsets = np.divmod(slots, self.page_tokens)
        numbers = self._numbers_of("slots", np.maximum(pages, 0))
        return np.where(slots < 0, -1, numbers * self.page_tokens + offsets)

    def batch(self, batch: PagedBatch, q: Array) -> DeviceBatch:
        """The batch in arrays beside the queries, tables padded with 0. Raises InvalidArgument."""
        tables = np.zeros((len(batch.tables), max(1, *map(len, batch.tables))), np.int32)
        for i, length in enumerate(batch.kv_lens):
            used = np.asarray(batch.tables[i][: -(-length // self.page_tokens)], np.int64)
            tables[i, : len(used)] = self._numbers_of(f"tables[{i}]", used)
        lens = np.asarray(batch.kv_lens, np.int32)
        subsets, sizes = (_placed(array, q) for array in _subsets(batch))
        return DeviceBatch(_placed(lens, q), _placed(tables, q), batch.sinks, batch.window, subsets, sizes)

    def _scaled(self, scales: NDArray[np.float32]) -> _Pool:
        """The same with scales. Raises InvalidArgument if they do not fit these pages."""
        layers, kinds, _, heads, _ = self.first.shape
        if scales.size != layers * kinds * heads or scales.dtype != np.float32 or not scales.flags.c_contiguous:
            raise InvalidArgument(
                f"pages.scales: {scales.dtype} {list(scales.shape)}; pages of {layers} layers and {heads} kv heads take float32 {[layers, kinds, heads]}"
            )
        return replace(self, scales=scales)

    def _numbers_of(self, name: str, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of pages by their place in the list. Raises InvalidArgument."""
        for bad in places[(places < 0) | (places >= len(self.numbers))].tolist():
            raise InvalidArgument(f"{name}: page {bad} of {len(self.numbers)}; give all that are named, from 0 on")
        return self.numbers[places]


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


def _as_e4m3(number: int, page: Array) -> Buffer:
    """A page stored as bytes, as e4m3. Raises InvalidArgument for wider values."""
    found = Buffer.of(f"pages[{number}]", page)
    if found.dtype not in ("u8", "e4m3"):
        raise InvalidArgument(f"{found.name}: has type {found.dtype}; pages with scales are of e4m3, or of bytes")
    return replace(found, dtype="e4m3")


def _check_alike(page: Buffer, first: Buffer) -> None:
    mine, its = ((one.shape, one.strides, one.dtype, one.device) for one in (page, first))
    if mine != its:
        raise InvalidArgument(
            f"{page.name}: {page.dtype} {page.shape} with strides {page.strides} on {page.device} is unlike the others, "
            f"{first.dtype} {first.shape} with {first.strides} on {first.device}; give pages of one layout in one place"
        )


def _masses(mass: Array, batch: PagedBatch, page_tokens: int) -> list[Array]:
    """mass: f32 [rows, q_heads, pages]. Returns the sums per sequence: f32 [q_heads, its pages]."""
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


def _cast(array: Array, dtype: Any) -> Array:
    """In this type, which may be another library's name for it."""
    xp = array_namespace(array)
    return xp.astype(array, getattr(xp, dtype) if isinstance(dtype, str) else dtype, copy=False)


def _dense(array: Array) -> Array:
    """Without gaps."""
    return array.contiguous() if hasattr(array, "contiguous") else array_namespace(array).asarray(array, order="C")


def _placed(array: NDArray[Any] | None, q: Array) -> Array:
    """The array in the library and on the device of these queries."""
    return None if array is None else array_namespace(q).asarray(array, device=device(q))


def _beside(q: Array) -> Callable[[tuple[int, ...], str], Array]:
    """A maker of empty arrays on the device of these queries."""
    xp, place = array_namespace(q), device(q)
    return lambda shape, dtype: xp.empty(shape, dtype=getattr(xp, dtype), device=place)


def _room(q: Array, *, mass_pages: int | None = None) -> Attended:
    """Empty outputs for these queries."""
    rows, q_heads, _ = q.shape
    empty, xp = _beside(q), array_namespace(q)
    mass = None if mass_pages is None else empty((rows, q_heads, mass_pages), "float32")
    return Attended(xp.empty_like(q), empty((rows, q_heads), "float32"), mass)
