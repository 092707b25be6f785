"""Cases for the kernels of sparse decode. Results equal those of `granules` to the bit.

Numbers have few bits, so that sums of products are exact in any order. Bounds that no table names,
entries behind a sequence's granules and unused hot slots are NaN or point far away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.unit.kernels.granule_cases import draw_chosen, exact_numbers
from tests.unit.kernels.kernel_cases import LSE_LIMIT, OUT_LIMIT, TYPES, WILD, allocate, placed
from tierd.kernels import granules
from tierd.kernels.arguments import DeviceBatch
from tierd.kernels.buffers import Buffer
from tierd.kernels.granules import ABSENT, GRANULE_TOKENS, HotBuffer
from tierd.kernels.library import Library
from tierd.kernels.paged import DecodeShape, PagedDecode, merge_scattered, part_addresses
from tierd.kernels.pages import KvPages
from tierd.kernels.reference import Attended, PagedBatch, paged_attention
from tierd.kernels.sparse import (
    SLOT_TOKENS,
    Chosen,
    Context,
    HostGranules,
    HotSlots,
    HotState,
    bound_keys,
    choose_granules,
    fetch_granules,
    resolve_granules,
    score_granules,
)

Array = np.ndarray[Any, Any]
BF16 = TYPES["bf16"]
HEADS, PARTS = 2, GRANULE_TOKENS // SLOT_TOKENS


# -- bounds


@dataclass(frozen=True)
class Bound:
    """tokens: of each granule."""

    tokens: tuple[int, ...] = (64, 1, 17, 48)
    kind: str = "bf16"
    page_tokens: int = 16
    dim: int = 64
    is_hnd: bool = False
    odd: float = 0.0


def check_bound(library: Library, shape: Bound) -> None:
    """Stale tokens and other pages are NaN; granules beside the given ones stay."""
    rng, n = np.random.default_rng(len(shape.tokens)), len(shape.tokens)
    pages = (n + 2) * GRANULE_TOKENS // shape.page_tokens
    middle = (HEADS, shape.page_tokens) if shape.is_hnd else (shape.page_tokens, HEADS)
    memory = np.full((pages, *middle, shape.dim), np.nan, TYPES[shape.kind])
    keys = memory.swapaxes(1, 2) if shape.is_hnd else memory
    slots = SLOT_TOKENS * rng.permutation(pages * shape.page_tokens // SLOT_TOKENS)[: n * PARTS].reshape(n, PARTS)
    want = np.full((n + 1, HEADS, 3, shape.dim), 7.0, np.float32)
    for i, count in enumerate(shape.tokens):
        some = np.exp(rng.uniform(-6, 6, (count, HEADS, shape.dim))) * rng.choice([-1, 1], (count, HEADS, shape.dim))
        some[count // 2, 0, 5] += shape.odd
        each = [slots[i, at // SLOT_TOKENS] + at % SLOT_TOKENS for at in range(count)]
        for slot, key in zip(each, some.astype(memory.dtype), strict=True):
            keys[slot // shape.page_tokens, slot % shape.page_tokens] = key
        slots[i, -(-count // SLOT_TOKENS) :] = WILD
        want[i, :, :2] = granules.bounds(some.astype(memory.dtype))[0]
    got = np.full(want.shape, 7.0, BF16)
    with placed(library) as put:
        counts = put(np.array(shape.tokens, np.int32))
        bound_keys(library, put(keys), put(slots.astype(np.int64)), tokens=counts, to=put(got[:n, :, :2]))
    np.testing.assert_array_equal(got.astype(np.float32), want, str(shape))
    assert not shape.odd or not np.isfinite(want).all()


# -- scores


@dataclass(frozen=True)
class Score:
    """counts: granules of each sequence. odd: one bound. is_against: all products are negative."""

    counts: tuple[int, ...] = (70, 0, 1, 33)
    kind: str = "bf16"
    dim: int = 64
    group: int = 4
    odd: float = 0.0
    query: float = 0.0
    is_against: bool = False


def check_score(library: Library, shape: Score) -> None:
    """Scores of each sequence's granules; others stay."""
    rng, n, most = np.random.default_rng(shape.group), len(shape.counts), max(shape.counts) + 3
    # An f16 query has more bits than bf16 has.
    fine = exact_numbers((n, HEADS * shape.group, shape.dim), 2) / 32 if shape.kind == "f16" else 0.0
    q = (exact_numbers((n, HEADS * shape.group, shape.dim), 1) + fine).astype(TYPES[shape.kind])
    q[0, 0, 3] += shape.query
    q = np.abs(q) if shape.is_against else q
    pool = np.full((sum(shape.counts) + 5, HEADS, 3, shape.dim), np.nan, BF16)
    tables = np.full((n, most), WILD, np.int32)
    ids = rng.permutation(len(pool))
    want = np.full((n, HEADS, most), np.nan, np.float32)
    for i, count in enumerate(shape.counts):
        tables[i, :count], ids = ids[:count], ids[count:]
        limits = np.sort(exact_numbers((count, HEADS, 2, shape.dim), 10 + i), axis=2)
        limits = -np.abs(limits[:, :, ::-1]) if shape.is_against else limits
        if i == 0:
            limits[4, 1, :, 7] += (shape.odd, abs(shape.odd))
        pool[tables[i, :count], :, :2] = limits
        want[i, :, :count] = granules.scores(q[i], limits)
    got = np.full(want.shape, np.nan, np.float32)
    with placed(library) as put:
        context = put(Context(tables, np.array(shape.counts, np.int32)))
        score_granules(library, put(q), put(pool[:, :, :2]), context, to=put(got))
    np.testing.assert_array_equal(got, want, str(shape))
    assert not shape.is_against or (want[~np.isnan(want)] < 0).all()
    assert not shape.odd or got[0, 1, 4] == math.inf
    assert not shape.query or (got[0, 0, : shape.counts[0]] == math.inf).all()


# -- choose


@dataclass(frozen=True)
class Choose:
    """values: that scores have; none: any."""

    counts: tuple[int, ...]
    k: int
    forced: tuple[int, int] = (1, 0)
    values: tuple[float, ...] = ()


TIES = (-math.inf, -2.5, -1e-30, -0.0, 0.0, 1e-30, 1.0, math.inf, math.nan)


def check_choose(library: Library, shape: Choose) -> None:
    """The exact top-k in order; entries behind a row's stay."""
    rng, n, most = np.random.default_rng(shape.k), len(shape.counts), max(shape.counts) + 2
    scores = rng.standard_normal((n, HEADS, most)).astype(np.float32)
    if shape.values:
        scores = rng.choice(np.array(shape.values, np.float32), scores.shape)
    want, sizes = np.full((n, HEADS, shape.k), WILD, np.int32), np.full((n, HEADS), WILD, np.int32)
    first, last = shape.forced
    for i, count in enumerate(shape.counts):
        scores[i, :, count:] = np.nan
        sizes[i] = min(count, shape.k)
        chosen = granules.choose(scores[i, :, :count], shape.k, forced_first=first, forced_last=last)
        want[i, :, : min(count, shape.k)] = chosen
    got = Chosen(np.full_like(want, WILD), np.full_like(sizes, WILD))
    with placed(library) as put:
        context = put(Context(np.full((n, most), WILD, np.int32), np.array(shape.counts, np.int32)))
        choose_granules(library, put(scores), context, to=put(got), forced=shape.forced)
    np.testing.assert_array_equal(got.ids, want, str(shape))
    np.testing.assert_array_equal(got.sizes, sizes, str(shape))


# -- resolve


@dataclass(frozen=True)
class Steps:
    """sizes: how many granules each step chooses, for the first and for the second sequence."""

    slots: int
    most: int
    sizes: tuple[tuple[int, int], ...]


def new_state(n: int, heads: int, most: int, slots: int) -> HotState:
    """Without a granule."""
    return HotState(
        np.full((n, heads, most), ABSENT, np.int32),
        np.full((n, heads, slots), ABSENT, np.int32),
        np.zeros((n, heads, slots), np.uint8),
        np.zeros((n, heads), np.int32),
    )


def new_resolved(n: int, heads: int, k: int) -> HotSlots:
    """Of poison."""
    hits, misses = (np.full((n, heads, k), WILD, np.int32) for _ in range(2))
    return HotSlots(hits, np.full((n, heads), WILD, np.int32), misses, np.full((n, heads), WILD, np.int32))


def check_resolve(library: Library, steps: Steps) -> None:
    """After every step hits, misses and the whole state equal the reference's."""
    rng, n, k = np.random.default_rng(steps.slots), 2, max(map(max, steps.sizes))
    buffers = [HotBuffer(HEADS, steps.most, steps.slots) for _ in range(n)]
    state = new_state(n, HEADS, steps.most, steps.slots)
    for number, sizes in enumerate(steps.sizes):
        chosen = Chosen(np.full((n, HEADS, k), WILD, np.int32), np.repeat(np.array(sizes, np.int32)[:, None], HEADS, 1))
        for i, size in enumerate(sizes):
            chosen.ids[i, :, :size] = draw_chosen(rng, HEADS, steps.most, size)
        got = new_resolved(n, HEADS, k)
        with placed(library) as put:
            resolve_granules(library, put(chosen), put(state), to=put(got))
        for i, buffer in enumerate(buffers):
            want = buffer.resolve(chosen.ids[i, :, : sizes[i]])
            for head in range(HEADS):
                told = f"{steps}: step {number}, sequence {i}, kv head {head}"
                for slots, count, is_miss in (
                    (got.hits, got.hit_sizes, False),
                    (got.misses, got.miss_sizes, True),
                ):
                    wanted = want.slots[head, want.is_miss[head] == is_miss]
                    assert count[i, head] == len(wanted), told
                    np.testing.assert_array_equal(slots[i, head, : len(wanted)], wanted, told)
                    assert (slots[i, head, sizes[i] :] == WILD).all(), told
            for name in ("where", "owners", "used", "hands"):
                np.testing.assert_array_equal(getattr(state, name)[i], getattr(buffer, name), f"{steps}: {name}")


# -- all steps of decodes, over granules in host memory


@dataclass(frozen=True)
class Far:
    """counts: granules of each sequence, which are scattered in blocks of 16 tokens of two layers."""

    counts: tuple[int, ...] = (20, 3, 9)
    k: int = 5
    slots: int = 7
    steps: int = 4
    group: int = 2
    dim: int = 64
    blocks: int = 5


@dataclass
class FarCase:
    """Keys and values of a context. blocks: [blocks, layers, 2, kv_heads, tokens, head_dim]; their
    places: for each sequence [granules, 2, PARTS] of (block, K or V)."""

    shape: Far
    layer: int = 1
    blocks: Array = field(init=False)
    ids: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        rng, count = np.random.default_rng(11), sum(self.shape.counts) * PARTS
        self.blocks = rng.standard_normal((count + 2, 2, 2, HEADS, SLOT_TOKENS, self.shape.dim)).astype(BF16)
        order = rng.permutation(count + 2)
        ends = np.cumsum(self.shape.counts) * PARTS
        self.ids = [part.reshape(-1, PARTS) for part in np.split(order[:count], ends[:-1])]

    def pages(self, sequence: int) -> Array:
        """[granules, 2, 64, kv_heads, head_dim] of the layer."""
        found = self.blocks[self.ids[sequence], self.layer]  # [granules, parts, 2, kv_heads, 16, dim]
        return found.transpose(0, 2, 1, 4, 3, 5).reshape(-1, 2, GRANULE_TOKENS, HEADS, self.shape.dim)

    def source(self, address: int) -> HostGranules:
        """Of blocks at this address."""
        steps = self.blocks.strides
        places = np.full((len(self.ids), max(self.shape.counts) + 1, 2 * PARTS), WILD, np.uint64)
        for i, ids in enumerate(self.ids):
            sides = [
                address + ids.astype(np.uint64) * np.uint64(steps[0]) + np.uint64(side * steps[2]) for side in (0, 1)
            ]
            places[i, : len(ids)] = np.concatenate(sides, axis=1)
        return HostGranules(places, self.layer * steps[1], steps[3])


def check_fetch(library: Library, shape: Far) -> None:
    """Misses arrive in their slots, and no other byte of the hot buffer changes."""
    case, n, rng = FarCase(shape), len(shape.counts), np.random.default_rng(13)
    state, resolved = new_state(n, HEADS, max(shape.counts) + 1, shape.slots), new_resolved(n, HEADS, shape.k)
    hot = np.full((n, shape.slots, HEADS, 2, GRANULE_TOKENS, shape.dim), np.nan, BF16)
    want = hot.copy()
    for i, count in enumerate(shape.counts):
        for head in range(HEADS):
            misses = min(count, shape.k) - head
            slots, chosen = (rng.permutation(each)[:misses] for each in (shape.slots, count))
            resolved.misses[i, head, :misses], resolved.miss_sizes[i, head] = slots, misses
            state.owners[i, head, slots] = chosen
            want[i, slots, head] = case.pages(i)[chosen, :, :, head]
    with placed(library) as put:
        host = put(case.source(Buffer.of("blocks", put(case.blocks)).address))
        fetch_granules(library, put(resolved), put(replace(state, pages=hot)), host, blocks=shape.blocks)
    np.testing.assert_array_equal(hot.view(np.uint16), want.view(np.uint16), str(shape))


def check_far(library: Library, shape: Far) -> None:
    """Each step's attention to hits and misses, merged, is that to the chosen granules of the context."""
    case, n, rng = FarCase(shape), len(shape.counts), np.random.default_rng(12)
    most, heads = max(shape.counts) + 1, (HEADS, shape.dim)
    limits = [granules.bounds(case.pages(i)[:, 0].reshape(-1, *heads)) for i in range(n)]
    tables = np.full((n, most), WILD, np.int32)
    for i, end in enumerate(np.cumsum(shape.counts)):
        tables[i, : shape.counts[i]] = np.arange(end - shape.counts[i], end)
    hot = np.full((n, shape.slots, HEADS, 2, GRANULE_TOKENS, shape.dim), np.nan, BF16)
    flat = hot.reshape(-1, *hot.shape[2:]).swapaxes(2, 3)  # [pages, kv_heads, 64, 2, dim]
    lens = np.full(n, shape.slots * GRANULE_TOKENS, np.int32)
    slots = np.arange(n * shape.slots, dtype=np.int32).reshape(n, -1)
    state = replace(new_state(n, HEADS, most, shape.slots), pages=hot)
    bounds = np.concatenate(limits).astype(BF16)
    for step in range(shape.steps):
        q = (2 * rng.standard_normal((n, HEADS * shape.group, shape.dim))).astype(BF16)
        scores = np.full((n, HEADS, most), np.nan, np.float32)
        chosen = Chosen(np.full((n, HEADS, shape.k), WILD, np.int32), np.zeros((n, HEADS), np.int32))
        got = new_resolved(n, HEADS, shape.k)
        parts = [Attended(np.full_like(q, np.nan), allocate(q.shape[:2], "float32")) for _ in range(3)]
        with placed(library) as put:
            context = put(Context(tables, np.array(shape.counts, np.int32)))
            host = put(case.source(Buffer.of("blocks", put(case.blocks)).address))
            q_there, there, to = put(q), put(state), put(got)
            scored, picked = put(scores), put(chosen)
            score_granules(library, q_there, put(bounds), context, to=scored)
            choose_granules(library, scored, context, to=picked)
            resolve_granules(library, picked, there, to=to)
            fetch_granules(library, to, there, host, blocks=shape.blocks)
            decode = PagedDecode(
                library,
                DecodeShape(n, HEADS * shape.group, *heads),
                blocks=3,
                allocate=lambda *asked, put=put: put(allocate(*asked)),
            )
            pages = put(KvPages(*(flat[:, :, :, side].swapaxes(1, 2) for side in (0, 1))))
            outs = put(parts)
            for part, subsets, sizes in ((outs[0], to.hits, to.hit_sizes), (outs[1], to.misses, to.miss_sizes)):
                batch = DeviceBatch(put(lens), put(slots), subsets=subsets, subset_sizes=sizes)
                decode(q_there, pages, batch, part)
            merge_scattered(library, outs[:2], put(np.array(part_addresses(outs[:2]), np.int64)), outs[2])
        _check_step(case, q, limits, (chosen, got, parts[2]), f"{shape}: step {step}")
    assert (state.owners != ABSENT).all() or min(shape.counts) < shape.slots


def _check_step(
    case: FarCase, q: Array, limits: list[Array], found: tuple[Chosen, HotSlots, Attended], told: str
) -> None:
    """Against the reference over the whole context, in float64."""
    chosen, resolved, merged = found
    for i, count in enumerate(case.shape.counts):
        want = granules.choose(granules.scores(q[i], limits[i]), case.shape.k)
        np.testing.assert_array_equal(chosen.ids[i, :, : want.shape[1]], want, told)
        assert (resolved.hit_sizes[i] + resolved.miss_sizes[i] == want.shape[1]).all(), told
        batch = PagedBatch([0, 1], [count * GRANULE_TOKENS], [list(range(count))], subsets=[want.tolist()])
        right = paged_attention(q[i : i + 1].astype(np.float64), case.pages(i).astype(np.float64), batch)
        distance = np.linalg.norm(merged.out[i].astype(np.float64) - right.out[0]) / np.linalg.norm(right.out)
        assert distance <= 2 * OUT_LIMIT["bf16"], f"{told}, sequence {i}: the output is {distance:.2e} off"
        assert np.abs(merged.lse[i] - right.lse[0]).max() <= LSE_LIMIT, f"{told}, sequence {i}: lse"


BOUNDS = (
    Bound(),
    Bound(kind="f16", page_tokens=32, is_hnd=True),
    Bound((64, 33), kind="e4m3", page_tokens=128),
    Bound(odd=math.nan),
    Bound(odd=-math.inf),
)
SCORES = (
    Score(),
    Score(kind="f16", group=9),
    Score((150, 16), group=3),
    Score((20, 9), group=1, is_against=True),
    Score(odd=math.nan),
    Score(odd=-math.inf, kind="f16"),
    Score(query=math.nan),
    Score(query=math.nan, kind="f16"),
)
CHOICES = (
    Choose((100, 3, 0, 12), 12),
    Choose((1300, 40), 37, (1, 3)),
    Choose((1100, 90), 30, (2, 1), TIES),
    Choose((90, 40), 25, (1, 0), (-0.0, 0.0)),
    Choose((4000,), 3950, (0, 0), (1.0, 1.0000001)),
    Choose((50, 9), 5, (2, 3)),
)
RESOLVES = (
    Steps(12, 40, ((6, 0), (5, 6), (6, 6), (2, 6), (6, 1))),
    Steps(5, 30, ((5, 5), (5, 3), (4, 5), (5, 5))),
    Steps(600, 1500, ((280, 20), (290, 300), (300, 290), (300, 1))),
)
FETCHES = (Far(), Far((3,), dim=512, blocks=1))
"""Small ones of each kind. Rows are longer than one step of a block; a clock's hand goes around twice."""
