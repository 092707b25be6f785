"""Decodes whose sequences share a prefix: read once by `tierd.kernels.shared`, against read by each.

Invariants: launches follow one another on other pages, and both ways read the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierd.kernels import Attended, PagedBatch
from tierd.kernels.arguments import DeviceBatch
from tierd.kernels.paged import Chunks, PagedDecode, decode_blocks, merge_parts, paged_prefill
from tierd.kernels.prefixes import SharedPrefix
from tierd.kernels.shared import count_parts, cut_prefixes
from tools.gpu.device import BF16, DeviceArray, Gpu, Room
from tools.gpu.results import Result, row_of
from tools.gpu.shapes import PAGE_TOKENS, Pool

PLACES = 8
"""Most groups of pages that launches take in turn."""


@dataclass(frozen=True, slots=True)
class Size:
    """sequences: that share `tokens` tokens, and have one page each of their own."""

    sequences: int
    tokens: int


def shared_row(gpu: Gpu, pool: Pool, name: str, size: Size, *, rounds: int, samples: list[float]) -> Result:
    """Microseconds with the prefix read once, against those with it read by each sequence. It
    appends the relative distance of their outputs."""
    with gpu.room() as room:
        both = _Both(gpu, room, pool, size)
        places = both.places()
        together, apart = (
            [1e6 * each for each in gpu.times([lambda at=at, do=do: do(at) for at in places], rounds=rounds)]
            for do in (both.together, both.apart)
        )
        samples.append(both.distance())
        return row_of(name, together, "us", apart)


@dataclass(frozen=True, slots=True)
class _Place:
    """One group of pages: tables of whole sequences, of their own pages, and of the prefix's parts."""

    whole: DeviceBatch
    own: DeviceBatch
    cut: DeviceBatch


class _Both:
    """Arrays for both ways."""

    def __init__(self, gpu: Gpu, room: Room, pool: Pool, size: Size) -> None:
        self._gpu, self._room, self._pool, self._size = gpu, room, pool, size
        self._pages, n, model = size.tokens // PAGE_TOKENS, size.sequences, pool.model
        group = PagedBatch(range(n + 1), [size.tokens + PAGE_TOKENS] * n, [range(self._pages + 1)] * n, shared=[SharedPrefix(range(n), self._pages)])  # fmt: skip
        self._parts = count_parts(
            group, PAGE_TOKENS, q_heads=model.q_heads, kv_heads=model.kv_heads, head_dim=model.head_dim
        )
        self._cut = cut_prefixes(group, PAGE_TOKENS, parts=self._parts, kv_heads=model.kv_heads)
        queries = np.random.default_rng(n).standard_normal((n, model.q_heads, model.head_dim), np.float32).astype(BF16)
        self._q, self._source = room.of(queries), room.of(np.concatenate([queries] * self._parts))
        self._repeated = room.array(self._source.shape, BF16)
        self._starts = room.of(np.array(self._cut.query_starts, np.int32))
        shape = model.decode(n)
        blocks = decode_blocks(gpu.kernels, shape, q_type="bf16", kv_type="bf16")
        self._decode = PagedDecode(gpu.kernels, shape, blocks=blocks, allocate=room.array)
        outs = [room.array((count, *queries.shape), BF16) for count in (self._parts + 1, 1, 1)]
        lses = [room.array((count, n, model.q_heads), np.float32) for count in (self._parts + 1, 1, 1)]
        self._outs, self._lses = outs[0], lses[0]
        self._to = [Attended(out.at(0, 0), lse.at(0, 0)) for out, lse in zip(outs[1:], lses[1:], strict=True)]

    def places(self) -> list[_Place]:
        """As many as the pool has pages for, up to PLACES."""
        each = self._pages + self._size.sequences
        ids = np.random.default_rng(each).permutation(self._pool.pages).astype(np.int32)
        return [self._place(ids[i * each : (i + 1) * each]) for i in range(min(PLACES, len(ids) // each))]

    def together(self, at: _Place) -> None:
        """The prefix's parts as chunks, own pages by decode, and the merge."""
        kv, (n, *_) = self._pool.kv(), self._q.shape
        self._gpu.ask("cuMemcpyDtoDAsync", self._repeated.address, self._source.address, self._source.nbytes, self._gpu.stream)  # fmt: skip
        chunks = Chunks(self._repeated, self._starts, n)
        parts = Attended(_flat(self._outs, self._parts * n), _flat(self._lses, self._parts * n))
        paged_prefill(self._gpu.kernels, chunks, kv, at.cut, parts)
        own = Attended(self._outs.at(0, self._parts), self._lses.at(0, self._parts))
        self._decode(self._q, kv, at.own, own)
        merge_parts(self._gpu.kernels, self._outs, self._lses, self._to[0])

    def apart(self, at: _Place) -> None:
        """All pages of each sequence by decode."""
        self._decode(self._q, self._pool.kv(), at.whole, self._to[1])

    def distance(self) -> float:
        """Relative L2 distance of the outputs of both ways."""
        one, other = (self._gpu.read_back(to.out).astype(np.float64) for to in self._to)
        return float(np.linalg.norm(one - other) / np.linalg.norm(other))

    def _place(self, ids: np.ndarray) -> _Place:
        own, n = ids[self._pages :, None], self._size.sequences
        whole = np.concatenate([np.tile(ids[: self._pages], (n, 1)), own], axis=1)
        subsets = np.array(self._cut.subsets, np.int32)
        cut = DeviceBatch(
            self._room.of(np.array(self._cut.kv_lens, np.int32)),
            self._room.of(ids[np.array(self._cut.tables)]),
            subsets=self._room.of(subsets),
            subset_sizes=self._room.of(np.full(subsets.shape[:2], subsets.shape[2], np.int32)),
        )
        return _Place(self._batch(whole), self._batch(own), cut)

    def _batch(self, tables: np.ndarray) -> DeviceBatch:
        lens = np.full(len(tables), tables.shape[1] * PAGE_TOKENS, np.int32)
        return DeviceBatch(self._room.of(lens), self._room.of(np.ascontiguousarray(tables)))


def _flat(array: DeviceArray, rows: int) -> DeviceArray:
    """The first rows of an array's first two axes together."""
    return DeviceArray(array.address, (rows, *array.shape[2:]), array.dtype)
