"""Cases of paged attention for the kernels of cuda/, with results of the plain float64 reference.

Memory that a kernel must not read is poison: stale tails, unused pages and outputs begin as NaN.
Unused entries of tables and subsets point far away, for every other kv head to an existing page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from tierd.kernels.arguments import DeviceBatch
from tierd.kernels.fitting import decode_fit, prefill_rows
from tierd.kernels.library import Library
from tierd.kernels.paged import (
    Chunks,
    DecodeShape,
    PagedDecode,
    merge_parts,
    merge_scattered,
    paged_prefill,
    part_addresses,
)
from tierd.kernels.pages import KvPages
from tierd.kernels.reference import Attended, PagedBatch, merge_attention, paged_attention

Array = np.ndarray[Any, Any]
TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "f32": np.float32}
OUT_LIMIT = {"bf16": 2e-3, "f16": 3e-4}
"""Relative L2 distance. Most of it is the rounding of the output to the queries' type."""
LSE_LIMIT = MASS_LIMIT = 1e-5
WILD = 2**31 - 1


class Nothing:
    """A library that must not be called."""

    device = "cpu"

    def launch(self, kernel: str, *_: object, **__: object) -> None:
        """Raises AssertionError."""
        raise AssertionError(kernel)

    def resident_blocks(self, kernel: str, *, shared_bytes: int = 0) -> int:
        """Raises AssertionError."""
        raise AssertionError(kernel)


@dataclass(frozen=True)
class Shape:
    """sequences: (query tokens, kv tokens) each. chosen: pages each kv head sees; odd heads one less.
    0: all. spread: of the queries; a low one gives flat attention."""

    sequences: tuple[tuple[int, int], ...]
    types: tuple[str, str] = ("bf16", "bf16")
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 4
    page_tokens: int = 16
    sinks: int = 0
    window: int = 0
    chosen: int = 0
    seed: int = 0
    spread: float = 2.0


@dataclass
class Case:
    """A shape filled with numbers. batch: for the reference; device: for the kernels."""

    shape: Shape
    q: Array
    pool: Array
    batch: PagedBatch
    device: DeviceBatch
    pages: KvPages = field(init=False)

    def __post_init__(self) -> None:
        scales = [None, None]
        if self.shape.types[1] == "e4m3":
            scales = [np.linspace(0.5, 1.5, self.shape.kv_heads, dtype=np.float32) * i for i in (1, 2)]
        self.pages = KvPages(self.pool[:, 0], self.pool[:, 1], *scales)


def made(shape: Shape) -> Case:
    """Random queries and pages, in random order in a pool that is NaN elsewhere."""
    rng = np.random.default_rng(shape.seed)
    kv_lens = [kv for _, kv in shape.sequences]
    needed = [-(-kv // shape.page_tokens) for kv in kv_lens]
    pool = np.full(
        (sum(needed) + 3, 2, shape.page_tokens, shape.kv_heads, shape.head_dim), np.nan, TYPES[shape.types[1]]
    )
    ids = iter(rng.permutation(len(pool)).tolist())
    tables = [[next(ids) for _ in range(count)] for count in needed]
    for kv, table in zip(kv_lens, tables, strict=True):
        for i, page in enumerate(table):
            tokens = min(shape.page_tokens, kv - i * shape.page_tokens)
            pool[page, :, :tokens] = rng.standard_normal((2, tokens, *pool.shape[3:])).astype(pool.dtype)
    starts = np.concatenate([[0], np.cumsum([rows for rows, _ in shape.sequences])]).tolist()
    q = (shape.spread * rng.standard_normal((starts[-1], shape.kv_heads * shape.group, shape.head_dim))).astype(
        TYPES[shape.types[0]]
    )
    batch = PagedBatch(starts, kv_lens, tables, sinks=shape.sinks, window=shape.window)
    if shape.chosen:
        seen = [
            [rng.permutation(n)[: max(0, shape.chosen - head % 2)].tolist() for head in range(shape.kv_heads)]
            for n in needed
        ]
        batch = replace(batch, subsets=seen)
    return Case(shape, q, pool, batch, _on_device(batch, shape))


def _on_device(batch: PagedBatch, shape: Shape) -> DeviceBatch:
    n = len(batch.kv_lens)
    tables = np.full((n, max(1, *map(len, batch.tables)) + 1), WILD, np.int32)
    for i, table in enumerate(batch.tables):
        tables[i, : len(table)] = table
    device = DeviceBatch(np.array(batch.kv_lens, np.int32), tables, batch.sinks, batch.window)
    if batch.subsets is None:
        return device
    subsets = np.full((n, shape.kv_heads, shape.chosen), WILD // 1024, np.int32)
    subsets[:, ::2] = 0
    sizes = np.array([[len(head) for head in heads] for heads in batch.subsets], np.int32)
    for i, heads in enumerate(batch.subsets):
        for h, seen in enumerate(heads):
            subsets[i, h, : len(seen)] = seen
    return replace(device, subsets=subsets, subset_sizes=sizes)


def allocate(shape: tuple[int, ...], dtype: str) -> Array:
    """An array that holds poison."""
    filled: Array = np.full(shape, np.nan if dtype == "float32" else -1, dtype)
    return filled


@contextmanager
def placed(library: Library) -> Iterator[Callable[[Any], Any]]:
    """Yields a function that moves arrays, and objects with arrays, to the library's memory.

    At the end, written arrays are copied back. The emulator's kernels use numpy's arrays.
    """
    if hasattr(library, "placed"):
        with library.placed() as put:
            yield put
    else:
        yield lambda given: given


class Narrow:
    """A library whose thread blocks have less shared memory; all else is unchanged."""

    def __init__(self, library: Library, block_shared_bytes: int) -> None:
        self._library, self.block_shared_bytes = library, block_shared_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def decoded(library: Library, case: Case, *, blocks: int = 3, with_mass: bool = True) -> Attended:
    """The result of the decode kernels."""
    n, heads, dim = case.q.shape
    shape = DecodeShape(n + 1, heads, case.shape.kv_heads, dim)
    mass = allocate((n, heads, case.device.tables.shape[1]), "float32") if with_mass else None
    to = Attended(_poison_like(case.q), allocate((n, heads), "float32"), mass)
    with placed(library) as put:
        decode = PagedDecode(library, shape, blocks=blocks, allocate=lambda *asked: put(allocate(*asked)))
        decode(put(case.q), put(case.pages), put(case.device), put(to))
    return to


def prefilled(library: Library, case: Case) -> Attended:
    """The result of the prefill kernels."""
    starts = np.array(case.batch.query_starts, np.int32)
    longest = max(rows for rows, _ in case.shape.sequences)
    to = Attended(_poison_like(case.q), allocate(case.q.shape[:2], "float32"))
    with placed(library) as put:
        paged_prefill(library, put(Chunks(case.q, starts, longest)), put(case.pages), put(case.device), put(to))
    return to


def _poison_like(array: Array) -> Array:
    return np.full(array.shape, np.nan, array.dtype)


def expected(case: Case) -> Attended:
    """The reference in float64."""
    pool = case.pool.astype(np.float64)
    if case.pages.k_scales is not None:
        pool *= np.stack([case.pages.k_scales, case.pages.v_scales])[None, :, None, :, None]
    return paged_attention(case.q.astype(np.float64), pool, case.batch, with_mass=True)


def check(case: Case, got: Attended) -> None:
    """Raises AssertionError if a kernel differs from the reference by more than its limit."""
    want = expected(case)
    out, wrong = got.out.astype(np.float64), np.isnan(want.out)
    assert (np.isnan(out) == wrong).all(), (
        f"{case.shape}: NaN in the output that should be none, or the other way round"
    )
    norm = float(np.linalg.norm(want.out[~wrong]))
    distance = float(np.linalg.norm(out[~wrong] - want.out[~wrong])) / (norm or 1.0)
    assert distance <= OUT_LIMIT[case.shape.types[0]], f"{case.shape}: the output is {distance:.2e} off"
    assert (np.isnan(got.lse) == np.isnan(want.lse)).all(), f"{case.shape}: NaN became a number, or the other way round"
    some = np.isfinite(want.lse)
    assert np.isneginf(got.lse[np.isneginf(want.lse)]).all(), f"{case.shape}: a query that sees nothing has an lse"
    assert not some.any() or np.abs(got.lse[some] - want.lse[some]).max() <= LSE_LIMIT, f"{case.shape}: lse"
    if got.mass is not None:
        for i, of in enumerate(want.mass or []):
            whole = np.zeros(got.mass[i].shape)
            whole[:, : of.shape[1]] = of
            seen = np.isnan(whole) & (got.mass[i] != 0)  # a page that no query sees may have no mass
            assert np.isnan(got.mass[i][seen]).all(), f"{case.shape}: masses of NaN that are none"
            assert not np.isnan(of).any() or seen.any(), f"{case.shape}: no mass is NaN"
            whole[np.isnan(whole)] = got.mass[i][np.isnan(whole)]
            np.testing.assert_allclose(
                got.mass[i], whole, rtol=0, atol=MASS_LIMIT, err_msg=f"{case.shape}: page masses of sequence {i}"
            )


def check_decode(library: Library, shape: Shape) -> None:
    """Raises AssertionError."""
    case = made(shape)
    check(case, decoded(library, case))


def check_cut_decode(library: Library, cut: tuple[int, Shape]) -> None:
    """Decodes with this number of blocks. Raises AssertionError."""
    blocks, shape = cut
    case = made(shape)
    check(case, decoded(library, case, blocks=blocks))


def check_prefill(library: Library, shape: Shape) -> None:
    """Raises AssertionError."""
    case = made(shape)
    check(case, prefilled(library, case))


def check_dirty_decode(library: Library, cut: tuple[int, Shape]) -> None:
    """A second call is right with any part counters, as concurrent calls or new lengths cause them."""
    blocks, shape = cut
    case, kept = made(shape), list[Array]()

    def keep(*asked: Any) -> Array:
        kept.append(allocate(*asked))
        return kept[-1]

    n, heads, dim = case.q.shape
    decode = PagedDecode(library, DecodeShape(n, heads, shape.kv_heads, dim), blocks=blocks, allocate=keep)
    counters = [array for array in kept if array.dtype.kind == "i" and array.size > 1]
    assert counters
    for dirt in (0, 1, 3, 2):
        case.q *= -1  # so that parts left by the previous call are wrong
        for array in counters:
            array[:dirt] += dirt
        to = Attended(_poison_like(case.q), allocate((n, heads), "float32"))
        check(case, decode(case.q, case.pages, case.device, to))


def check_short_prefill(library: Library, shape: Shape) -> None:
    """If the caller's longest chunk is too short, rows beyond it are NaN and the others are right.

    Raises AssertionError.
    """
    case = made(shape)
    starts = np.array(case.batch.query_starts, np.int32)
    to = Attended(_poison_like(case.q), allocate(case.q.shape[:2], "float32"))
    with placed(library) as put:
        longest = -(-len(case.q) // len(shape.sequences))
        to.lse[:] = 0  # a value that no result may have
        to.out[:] = 0
        paged_prefill(library, put(Chunks(case.q, starts, longest)), put(case.pages), put(case.device), put(to))
    block = prefill_rows(shape.head_dim)
    covered = -(-longest * shape.group // block) * block
    rows = np.concatenate([np.arange(count * shape.group).reshape(count, shape.group) for count, _ in shape.sequences])
    beyond, want = np.tile(rows >= covered, (1, shape.kv_heads)), expected(case)
    assert beyond.any()
    assert (np.isnan(to.lse) == beyond).all(), f"{shape}: rows beyond are no NaN"
    assert (np.isnan(to.out.astype(np.float32)).all(axis=2) == beyond).all(), f"{shape}: outputs beyond are no NaN"
    np.testing.assert_allclose(to.lse[~beyond], want.lse[~beyond], atol=LSE_LIMIT)


def check_narrow_decode(library: Library, shape: Shape) -> None:
    """With shared memory only for the smaller ring. Raises AssertionError."""
    most = decode_fit(library, shape.head_dim, shape.group, shape.types[1]).shared_bytes
    check_decode(Narrow(library, most - 1), shape)


def check_merge(library: Library, kind: str, dim: int = 96) -> None:
    """Merges parts of unequal weight, an empty one and an empty row, from one array and from several."""
    rng = np.random.default_rng(1)
    outs, lses = rng.standard_normal((6, 5, 2, dim)), (4 * rng.standard_normal((6, 5, 2))).astype(np.float32)
    lses[1, 2], lses[:, 4] = -np.inf, -np.inf
    outs[1, 2], outs[:, 4] = np.nan, np.nan
    lses[3, 0, 1], lses[0, 1, 0] = np.nan, np.inf
    given = outs.astype(TYPES[kind])
    got, again = (Attended(_poison_like(given[0]), allocate((5, 2), "float32")) for _ in range(2))
    with placed(library) as put:
        merge_parts(library, put(given), put(lses), put(got))
        parts = [put(Attended(given[i].copy(), lses[i].copy())) for i in (2, 0, 5, 1, 4, 3)]
        merge_scattered(library, parts, put(np.array(part_addresses(parts), np.int64)), put(again))
    want = merge_attention(list(given.astype(np.float64)), list(lses.astype(np.float64)))
    for each in (got, again):
        np.testing.assert_allclose(each.out.astype(np.float64), want.out, atol=1e-6 if kind == "f32" else 1e-2)
        np.testing.assert_allclose(each.lse, want.lse, atol=1e-5)


DECODES = (
    Shape(((1, 133), (1, 0), (1, 1), (1, 16), (1, 300))),
    Shape(((1, 100), (1, 70)), types=("f16", "e4m3"), page_tokens=32, group=7, kv_heads=1),
    Shape(((1, 209), (1, 20), (1, 3)), types=("f16", "f16"), page_tokens=32, sinks=4, window=50),
    Shape(((1, 200), (1, 20), (1, 3)), types=("bf16", "e4m3"), page_tokens=32, chosen=2, group=16, kv_heads=1),
    Shape(((1, 777),), kv_heads=1, spread=0.5),
    Shape(((1, 200), (1, 0), (1, 40)), page_tokens=32, chosen=3),
    Shape(((1, 200), (1, 0), (1, 40)), chosen=1),
)
PREFILLS = (
    Shape(((20, 150), (40, 40), (1, 30))),
    Shape(((50, 90), (0, 20), (33, 33)), types=("bf16", "e4m3"), page_tokens=32, group=3),
    Shape(((40, 128), (10, 10)), types=("f16", "f16"), sinks=4, window=58, group=1),
    Shape(((30, 150), (0, 20), (9, 9)), page_tokens=32, chosen=2, group=2),
)
"""Small ones of each kind, with the sanitizers' head dim. A prompt has five steps of tiles, so
stages are refilled. Windows begin at a tile's last token, in decodes in a page's second tile.
A decode run ends with the last row and refills each warp's ring. One decode has flat attention."""
CUT_DECODES = (
    (1, Shape(((1, 1060),), kv_heads=1)),
    (10, Shape(((1, 600),), types=("f16", "e4m3"), kv_heads=1, group=9)),
    (64, Shape(((1, 20), (1, 1100), (1, 30)), kv_heads=1, group=2)),
)
"""By this many blocks: a run of over 64 tiles, and rows whose parts join in one step and in two."""
SHORT_PREFILLS = (Shape(((100, 150), (1, 40))), Shape(((5, 5), (90, 90), (0, 9)), types=("f16", "e4m3"), group=3))
"""One sequence has most of the tokens."""
NARROW_DECODES = (DECODES[0], DECODES[3], DECODES[4])
"""Both element sizes; decodes with partial results for several rows, and one that wraps its ring."""
MERGES = ("f32", "bf16", "f16")
