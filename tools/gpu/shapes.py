"""Decodes of models' shapes and any size, with their GPU memory and their expected outputs.

Purpose: `Pool`, pages of random numbers; `Decode`, a batch over them, in several places of the
pool; `Reader`, which only reads. Non-purpose: times. Invariants: tables of one decode share no page
and list pages in random order. Contents repeat after PATTERN_PAGES, so `_expected` knows them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.unit.kernels.kernel_cases import LSE_LIMIT, OUT_LIMIT
from tierd.kernels import Attended
from tierd.kernels.paged import DecodeShape, DeviceBatch, PagedDecode, decode_blocks
from tierd.kernels.pages import KvPages
from tools.gpu.device import BF16, DeviceArray, Gpu, Room

Array = np.ndarray[Any, Any]
PAGE_TOKENS = 16
PATTERN_PAGES = 251
READ_THREADS, READ_AT_ONCE, PIECE_BYTES = 256, 8, 16
"""As in cuda/src/read.cu."""
LARGE_BLOCKS = 16
"""Of a reader, for each multiprocessor."""


@dataclass(frozen=True, slots=True)
class Model:
    """Heads of one layer."""

    q_heads: int
    kv_heads: int
    head_dim: int = 128

    def decode(self, requests: int) -> DecodeShape:
        """The shape for at most this many requests."""
        return DecodeShape(requests, self.q_heads, self.kv_heads, self.head_dim)


MODELS = {"8b": Model(32, 8), "70b": Model(64, 8), "70b/8": Model(8, 1)}
"""The last: the share of one of eight GPUs in Llama-3-70B."""


@dataclass(frozen=True, slots=True)
class Place:
    """A pool's place: new memory of a room, or an address, which may have its pages already."""

    room: Room | None = None
    address: int = 0
    layers: int = 1
    is_filled: bool = False

    def memory(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """For the pool."""
        return self.room.array(shape, dtype) if self.room else DeviceArray(self.address, shape, dtype)


class Pool:
    """Pages [pages, layers, 2, kv_heads, PAGE_TOKENS, head_dim], all layers in a page as in a
    block."""

    def __init__(self, gpu: Gpu, model: Model, pages: int, place: Place, *, dtype: Any = BF16) -> None:
        self.model, self.pages, self.layers = model, pages, place.layers
        layers = place.layers
        shape = (layers, 2, model.kv_heads, PAGE_TOKENS, model.head_dim)
        count = max(1, min(pages, PATTERN_PAGES // layers))
        self.pattern = np.random.default_rng(pages).standard_normal((count, *shape), np.float32).astype(dtype)
        self.memory = place.memory((pages, *shape), dtype)
        if not place.is_filled:
            gpu.repeat(self.memory, self.pattern)

    def kv(self, layer: int = 0) -> KvPages:
        """One layer, as kernels take it."""
        k, v = (self.memory.at(1, layer).at(1, side).axes(0, 2, 1, 3) for side in (0, 1))
        return KvPages(k, v)

    def tokens(self, table: Array, length: int, *, head: int, layer: int = 0) -> tuple[Array, Array]:
        """Keys and values of one kv head, f64 [length, head_dim]."""
        pages = self.pattern[table % len(self.pattern), layer, :, head].astype(np.float64)
        k, v = (pages[:, side].reshape(-1, self.model.head_dim)[:length] for side in (0, 1))
        return k, v

    def bytes_of(self, tokens: int) -> int:
        """Keys and values of this many tokens in one layer."""
        return tokens * 2 * self.model.kv_heads * self.model.head_dim * self.memory.dtype.itemsize


class Decode:
    """One query token for each of some sequences. `runs`: the same on other pages of the pool."""

    def __init__(
        self, gpu: Gpu, room: Room, pool: Pool, lengths: Sequence[int], *, q_heads: int, with_mass: bool = False
    ) -> None:
        self._gpu, self._pool, self._lengths = gpu, pool, list(lengths)
        n, model = len(self._lengths), Model(q_heads, pool.model.kv_heads, pool.model.head_dim)
        shape, kind = model.decode(n), "e4m3" if pool.memory.dtype.itemsize == 1 else "bf16"
        blocks = decode_blocks(gpu.kernels, shape, q_type="bf16", kv_type=kind)
        self._decode = PagedDecode(gpu.kernels, shape, blocks=blocks, allocate=room.array)
        queries = np.random.default_rng(n).standard_normal((n, q_heads, model.head_dim), np.float32)
        self.q = (2 * queries).astype(BF16)
        self._q, self.lens = room.of(self.q), room.of(np.array(self._lengths, np.int32))
        self.tables = _tables(self._lengths, pool.pages)
        self._device_tables = [room.of(tables) for tables in self.tables]
        mass = room.array((n, q_heads, self.tables[0].shape[1]), np.float32) if with_mass else None
        self.to = Attended(room.array(self.q.shape, BF16), room.array((n, q_heads), np.float32), mass)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one launch reads."""
        return self._pool.bytes_of(sum(self._lengths))

    def runs(self, *, most: int = 8) -> list[Callable[[], None]]:
        """Launches, each on other pages, or on other layers of them."""
        layers = range(self._pool.layers)
        pairs = [(i, layer) for layer in layers for i in range(len(self._device_tables))][:most]
        return [lambda i=i, layer=layer: self.launch(i, layer) for i, layer in pairs]

    def launch(self, i: int = 0, layer: int = 0) -> None:
        """One call, of one launch or two."""
        batch = DeviceBatch(self.lens, self._device_tables[i])
        self._decode(self._q, self._pool.kv(layer), batch, self.to)

    def distances(self, rows: Iterable[tuple[int, int]], lengths: Sequence[int] = ()) -> Distances:
        """Of launch (0, 0) from float64. rows: (sequence, kv head). lengths: if the array changed."""
        outs, lses = (self._gpu.read_back(array).astype(np.float64) for array in (self.to.out, self.to.lse))
        group = self.q.shape[1] // self._pool.model.kv_heads
        off = norm = lse = 0.0
        for sequence, head in rows:
            heads = slice(head * group, (head + 1) * group)
            want, want_lse = self._expected(sequence, head, (lengths or self._lengths)[sequence])
            off += float(((outs[sequence, heads] - want) ** 2).sum())
            norm += float((want**2).sum())
            lse = max(lse, float(np.abs(lses[sequence, heads] - want_lse).max()))
        return Distances(float(np.sqrt(off / norm)), lse)

    def _expected(self, sequence: int, head: int, length: int) -> tuple[Array, Array]:
        """Outputs and log-sum-exps of the queries of a kv head."""
        group = self.q.shape[1] // self._pool.model.kv_heads
        k, v = self._pool.tokens(self.tables[0][sequence, : -(-length // PAGE_TOKENS)], length, head=head)
        scores = self.q[sequence, head * group : (head + 1) * group].astype(np.float64) @ k.T / np.sqrt(k.shape[1])
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1)
        return weights @ v / total[:, None], top[:, 0] + np.log(total)


@dataclass(frozen=True, slots=True)
class Distances:
    """out: relative L2 over all rows together. lse: the greatest error."""

    out: float
    lse: float

    @property
    def are_right(self) -> bool:
        """Within the limits of the tests."""
        return self.out <= OUT_LIMIT["bf16"] and self.lse <= LSE_LIMIT  # false for NaN

    def __str__(self) -> str:
        return f"{self.out:.2e} off, lse {self.lse:.1e}"


def _tables(lengths: Sequence[int], pages: int) -> list[Array]:
    """i32 [n, most pages], as many tables as the pool has pages for; 0 after a sequence's pages."""
    needed = [-(-length // PAGE_TOKENS) for length in lengths]
    ids = np.random.default_rng(len(lengths)).permutation(pages).astype(np.int32)
    made = []
    for first in range(0, pages - sum(needed) + 1, sum(needed)):
        tables = np.zeros((len(lengths), max(needed)), np.int32)
        for row, count, at in zip(tables, needed, first + np.cumsum([0, *needed[:-1]]), strict=True):
            row[:count] = ids[at : at + count]
        made.append(tables)
    assert made, f"a pool of {pages} pages has no room for {sum(needed)}"
    return made


class ReadParams(ctypes.Structure):
    """read.cu"""

    _fields_ = [("from_", ctypes.c_void_p), ("sums", ctypes.c_void_p), ("pieces", ctypes.c_int64)]


class Reader:
    """Reads GPU memory and keeps only sums."""

    def __init__(self, gpu: Gpu, room: Room) -> None:
        self._gpu, self._blocks = gpu, gpu.multiprocessors * LARGE_BLOCKS
        self.sums = room.array((self._blocks, READ_THREADS), np.uint32)

    def launch(self, address: int, length_bytes: int) -> None:
        """All of it, in pieces of 16 bytes."""
        pieces = length_bytes // PIECE_BYTES
        blocks = min(self._blocks, -(-pieces // (READ_THREADS * READ_AT_ONCE)))
        self._gpu.kernels.launch("read_all", (blocks, 1, 1), ReadParams(address, self.sums.address, pieces))

    def runs(self, memory: DeviceArray, length_bytes: int, *, most: int = 8) -> list[Callable[[], None]]:
        """Launches, each on other memory as far as it suffices."""
        count = max(1, min(most, memory.nbytes // length_bytes))
        length = min(length_bytes, memory.nbytes)
        return [lambda i=i: self.launch(memory.address + i * length, length) for i in range(count)]
