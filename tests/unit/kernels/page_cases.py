"""Cases for the kernels that move pages: stores, copies, runs of bytes and bounds of keys.

Results equal the reference's to the bit. Whole pools are compared, to detect stray bytes. Targets
begin as 0xFF, NaN in every type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.unit.kernels.kernel_cases import TYPES, allocate, placed
from tests.unit.kernels.sum_cases import GRANULE, WILD, surrounded
from tierd.kernels import reference
from tierd.kernels.buffers import Buffer
from tierd.kernels.library import Library
from tierd.kernels.pages import KvPages, Place, copy_pages, copy_runs, layer_addresses, store_tokens, summarize_pages

Array = np.ndarray[Any, Any]
PAGES, LAYERS, TOKENS, HEADS, DIM = 5, 3, 16, 2, 64
LAYOUTS = {
    "pages-hnd": "plchtd",
    "pages-nhd": "plcthd",
    "layers-nhd": "lcpthd",
    "layers-hnd": "lpchtd",
    "tensors-nhd": "l/cpthd",
    "tensors-hnd": "l/pchtd",
}
"""Axes in memory: page, layer, K or V, token, head, dim (channel). A slash follows separate tensors."""
AXES = "plcthd"


def poison(shape: tuple[int, ...], kind: str) -> Array:
    """An array of bytes 0xFF."""
    size = np.dtype(TYPES[kind]).itemsize
    return np.full((*shape[:-1], shape[-1] * size), 0xFF, np.uint8).view(TYPES[kind])


def assert_same_bytes(got: Array, want: Array, what: object) -> None:
    """Compares to the bit, in memory order."""
    differ = np.flatnonzero(got.reshape(-1).view(np.uint8) != want.reshape(-1).view(np.uint8))
    assert not differ.size, f"{what}: {differ.size} bytes differ, the first at {differ[0]}"


# -- store


@dataclass(frozen=True)
class Store:
    """is_hnd: heads outside of tokens in a page. gap: elements between new tokens; few misalign them."""

    tokens: int = 40
    types: tuple[str, str] = ("bf16", "bf16")
    page_tokens: int = 16
    heads: int = 2
    dim: int = 64
    is_hnd: bool = False
    gap: int = 0

    def pool(self) -> Array:
        """A pool of poison, with an extra page before and behind those that the kernel gets."""
        middle = (self.heads, self.page_tokens) if self.is_hnd else (self.page_tokens, self.heads)
        return poison((self.tokens // self.page_tokens + 5, 2, *middle, self.dim), self.types[1])

    def seen(self, pool: Array) -> Array:
        """[pages, 2, page_tokens, heads, dim] of a pool's memory."""
        return pool[1:-1].swapaxes(2, 3) if self.is_hnd else pool[1:-1]


def check_store(library: Library, shape: Store) -> None:
    """Stores strided keys and dense values in random slots, a third in none, some beyond e4m3's range."""
    rng = np.random.default_rng(shape.tokens)
    new = np.exp(rng.uniform(-12, 8, (2, shape.tokens, shape.heads, shape.dim))) * rng.choice([-1, 1], shape.dim)
    k, v = new.astype(TYPES[shape.types[0]])
    room = poison((shape.tokens, 2 * k[:1].size + shape.gap), shape.types[0])
    place = room[:, k[:1].size + shape.gap :].reshape(k.shape)
    place[:], k = k, place
    got, want = shape.pool(), shape.pool()
    slots = rng.permutation(len(shape.seen(got)) * shape.page_tokens)[: shape.tokens].astype(np.int64)
    slots[::3] = -1 - slots[::3] % shape.page_tokens
    scales = [None, None]
    if shape.types[1] == "e4m3":
        scales = [np.linspace(0.3, 1.7, shape.heads, dtype=np.float32) * i for i in (1, 3)]
    for side, values in enumerate((k, v)):
        reference.store_tokens(values, slots, shape.seen(want)[:, side], scales[side])
    pool = shape.seen(got)
    with placed(library) as put:
        store_tokens(library, put(k), put(v), put(slots), put(KvPages(pool[:, 0], pool[:, 1], *scales)))
    assert_same_bytes(got, want, shape)


# -- copy


@dataclass(frozen=True)
class Copy:
    """source, target: of LAYOUTS. of_source, of_target: pages, None for those in order."""

    source: str
    target: str
    of_source: tuple[int, ...] | None = (4, 0, 3)
    of_target: tuple[int, ...] | None = (1, 4, 2)
    kind: str = "bf16"
    blocks: int = 3


class Memory:
    """Pages of a layout: the arrays in memory, and views of them with the axes that the API takes."""

    def __init__(self, layout: str, kind: str, pages: int = PAGES) -> None:
        outer, _, inner = LAYOUTS[layout].rpartition("/")
        sizes = dict(zip(AXES, (pages, LAYERS, 2, TOKENS, HEADS, DIM), strict=True))
        self.lies = [poison(tuple(sizes[axis] for axis in inner), kind) for _ in range(sizes["l"] if outer else 1)]
        order = [inner.index(axis) for axis in AXES if axis in inner]
        self.views = [array.transpose(order) for array in self.lies]
        self.is_list = bool(outer)

    def fill(self, rng: np.random.Generator) -> None:
        """Random bits, including NaN of all kinds."""
        for array in self.lies:
            array.view(np.uint8)[:] = rng.integers(0, 256, array.view(np.uint8).shape)

    def layers(self) -> list[Array]:
        """Views of each layer, [pages, 2, tokens, heads, dim]."""
        return self.views if self.is_list else [self.views[0][:, i] for i in range(LAYERS)]

    def place(self, pages: tuple[int, ...] | None, put: Callable[[Any], Any]) -> Place:
        """The pages as a side of a copy. put: moves arrays to the kernel's memory."""
        ids, views = put(None if pages is None else np.array(pages, np.int32)), put(self.views)
        if not self.is_list:
            return Place(views[0], ids)
        return Place(views, ids, put(np.array(layer_addresses(views), np.int64)))


def check_copy(library: Library, shape: Copy) -> None:
    """The named pages arrive to the bit, and nothing else of the target changes."""
    count = len(shape.of_source or shape.of_target or range(PAGES))
    source = Memory(shape.source, shape.kind, PAGES if shape.of_source is not None else count)
    source.fill(np.random.default_rng(count))
    got, want = (Memory(shape.target, shape.kind, PAGES if shape.of_target is not None else count) for _ in range(2))
    pages = [list(range(count)) if ids is None else list(ids) for ids in (shape.of_source, shape.of_target)]
    for of, to in zip(source.layers(), want.layers(), strict=True):
        reference.copy_pages(of, to, of_source=pages[0], of_target=pages[1])
    with placed(library) as put:
        sides = source.place(shape.of_source, put), got.place(shape.of_target, put)
        copy_pages(library, *sides, blocks=shape.blocks)
    for mine, other in zip(got.lies, want.lies, strict=True):
        assert_same_bytes(mine, other, shape)


def check_long_copy(library: Library, blocks: int) -> None:
    """Rows longer than one step of the threads, with a partial last share: 2,400 bytes. Gaps stay."""
    source, got = (np.full((4, 1, 3, 5, 3, 40), value, np.uint16).view(np.float16) for value in (0, 7))
    source.view(np.uint16)[:] = np.random.default_rng(5).integers(0, 1 << 16, source.shape)
    want = got.copy()
    want.view(np.uint16)[:, :, :2] = source.view(np.uint16)[:, :, :2]
    with placed(library) as put:
        copy_pages(library, Place(put(source[:, :, :2])), Place(put(got[:, :, :2])), blocks=blocks)
    assert_same_bytes(got, want, "long rows")


# -- runs


@dataclass(frozen=True)
class Runs:
    """lengths: bytes. of_targets, of_sources: offsets of runs from a multiple of GRANULE, used in turn."""

    lengths: tuple[int, ...]
    of_targets: tuple[int, ...] = (0,)
    of_sources: tuple[int, ...] = (0,)
    blocks: int = 3

    def starts(self, shifts: tuple[int, ...], order: Array) -> Array:
        """The starts of runs that follow each other in this order, at least a byte apart."""
        rooms = -(-(np.array(self.lengths, np.int64)[order] + GRANULE) // GRANULE) * GRANULE
        starts = np.empty(len(order), np.int64)
        starts[order] = np.cumsum(rooms) - rooms + np.resize(shifts, len(order))[order]
        return starts


def check_runs(library: Library, runs: Runs) -> None:
    """Every run arrives in another order, no other byte changes; entries beside point far away."""
    count, room = len(runs.lengths), sum(runs.lengths) + 3 * GRANULE * (len(runs.lengths) + 1)
    rng = np.random.default_rng(count)
    starts = [runs.starts(runs.of_targets, rng.permutation(count)), runs.starts(runs.of_sources, np.arange(count))]
    source, got = rng.integers(0, 256, room, np.uint8), np.full(room, 0xFF, np.uint8)
    want = got.copy()
    for to, of, length in zip(*starts, runs.lengths, strict=True):
        want[to : to + length] = source[of : of + length]
    with placed(library) as put:
        bases = [Buffer.of("pool", put(pool)).address for pool in (got, source)]
        assert not any(base % GRANULE for base in bases)
        places = [
            put(surrounded((base + at).tolist(), np.uint64, WILD)) for base, at in zip(bases, starts, strict=True)
        ]
        copy_runs(library, *places, lengths=put(surrounded(runs.lengths, np.uint32, 64)), blocks=runs.blocks)
    assert_same_bytes(got, want, runs)


# -- summary


@dataclass(frozen=True)
class Summary:
    """tokens: valid tokens of each page."""

    tokens: tuple[int, ...] = (16, 0, 1, 5)
    kind: str = "bf16"
    dim: int = 64
    is_hnd: bool = False


def check_summary(library: Library, shape: Summary) -> None:
    """Stale tokens and other pages are NaN and do not count."""
    rng = np.random.default_rng(len(shape.tokens))
    middle = (HEADS, TOKENS) if shape.is_hnd else (TOKENS, HEADS)
    memory = poison((len(shape.tokens) + 2, *middle, shape.dim), shape.kind)
    keys = memory.swapaxes(1, 2) if shape.is_hnd else memory
    pages = rng.permutation(len(keys))[: len(shape.tokens)].astype(np.int32)
    for page, count in zip(pages, shape.tokens, strict=True):
        keys[page, :count] = (3 * rng.standard_normal((count, HEADS, shape.dim))).astype(keys.dtype)
    to = allocate((len(pages), HEADS, 2, shape.dim), "float32")
    with placed(library) as put:
        summarize_pages(library, put(keys), put(pages), tokens=put(np.array(shape.tokens, np.int32)), to=put(to))
    np.testing.assert_array_equal(to, reference.summarize_pages(keys, pages, shape.tokens), str(shape))


STORES = (
    Store(types=("bf16", "bf16")),
    Store(types=("f16", "e4m3"), is_hnd=True, tokens=33),
    Store(tokens=5, gap=1),
)
COPIES = (
    Copy("pages-hnd", "tensors-nhd"),
    Copy("layers-nhd", "pages-hnd", None),
    Copy("pages-hnd", "pages-hnd", kind="e4m3"),
)
LONG_COPIES = (1, 16)
RUNS = (
    Runs((4096, 16, 0, 4097, 31, 1, 15, 8192)),
    Runs((4096, 300, 17, 1, 5000), of_targets=(0, 5, 0), of_sources=(0, 0, 9, 5)),
    Runs(()),
)
SUMMARIES = (Summary(), Summary(kind="e4m3", is_hnd=True))
"""Small ones of each kind."""
