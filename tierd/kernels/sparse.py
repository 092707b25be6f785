"""The steps of sparse decode by cuda/src/sparse.cu, for granules of 64 tokens in host memory.

    bound_keys          once for each granule
    score_granules      each step and layer, from its queries
    choose_granules
    resolve_granules
    fetch_granules      may run beside the attention to hits
    PagedDecode         over the hot slots: to hits, and to misses; `merge_scattered` joins both

`granules` defines the results. Here arguments are checked and kernels launched. Nothing is
allocated or read back, so a captured graph may replay all of it. The content of arrays is the
caller's duty: ids and slots exist, and the device has mapped all addresses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierd.errors import InvalidArgument
from tierd.kernels import params
from tierd.kernels.arguments import group_of
from tierd.kernels.buffers import ALIGNMENT_BYTES, BYTES, Array, Buffer
from tierd.kernels.granules import GRANULE_TOKENS, check_forced
from tierd.kernels.library import Library
from tierd.kernels.pages import COPY_BLOCKS, KV_TYPES, STORED, check_blocks

SLOT_TOKENS = 16
"""Tokens of a granule that adjoin in a page."""
SCORE_WARPS, TILE_GRANULES, OPERAND_HEADS = 4, 16, 8
QUERY_PARTS = {"bf16": 1, "f16": 2}
CHOOSE_SHARED_BYTES, RESOLVE_SHARED_BYTES = 4 * (256 + 3 + 32), 4 * 8
"""As in cuda/src."""


@dataclass(frozen=True, slots=True)
class Context:
    """Granules of the sequences of a batch.

    tables: i32 [n, most], ids of their bounds in order; entries behind counts are ignored. counts:
    i32 [n], granules of each sequence, full ones.
    """

    tables: Array
    counts: Array


@dataclass(frozen=True, slots=True)
class Chosen:
    """ids: i32 [n, kv_heads, k], rising ordinals of granules. sizes: i32 [n, kv_heads]."""

    ids: Array
    sizes: Array


@dataclass(frozen=True, slots=True)
class HotState:
    """`granules.HotBuffer` of n sequences in one layer.

    Arrays: where, i32 [n, kv_heads, most]; owners, i32, and used, u8 [n, kv_heads, slots]; hands,
    i32 [n, kv_heads]. A new one has `granules.ABSENT` in where and owners, else 0.
    pages: [n, slots, kv_heads, ...], any strides of the first three axes. The rest is a granule of
    a kv head, such as [2, 64, head_dim]. Only fetches use it.
    """

    where: Array
    owners: Array
    used: Array
    hands: Array
    pages: Array = None


@dataclass(frozen=True, slots=True)
class HotSlots:
    """Hot slots of chosen granules: `subsets` and `subset_sizes` of a decode over the hot buffer.

    hits, misses: i32 [n, kv_heads, k]; hit_sizes, miss_sizes: i32 [n, kv_heads].
    """

    hits: Array
    hit_sizes: Array
    misses: Array
    miss_sizes: Array


@dataclass(frozen=True, slots=True)
class HostGranules:
    """Places of granules in mapped host memory.

    addresses: u64 [n, most, parts], of kv head 0, multiples of 16. Parts are equally long. In a hot
    slot one follows the other.
    offset: bytes to the layer. head_stride: bytes from a kv head to the next.
    """

    addresses: Array
    offset: int
    head_stride: int


def bound_keys(library: Library, keys: Array, slots: Array, *, tokens: Array, to: Array) -> None:
    """Fills `to` with the bounds of granules' keys, as stored. Raises InvalidArgument.

    keys: [pages, page_tokens, kv_heads, head_dim]; pages have a multiple of 16 tokens.
    slots: i64 [n, 4], page * page_tokens + offset of each 16 tokens; multiples of 16. tokens: i32
    [n], 1 to 64 each.
    to: bf16 [n, kv_heads, 2, head_dim], any strides of the first two axes.
    """
    found = Buffer.of("keys", keys).checked((None,) * 4, *STORED, device=library.device, dense_from=3).aligned()
    (pages, page_tokens, kv_heads, dim), parts = found.shape, GRANULE_TOKENS // SLOT_TOKENS
    if page_tokens % SLOT_TOKENS or dim % 2:
        raise InvalidArgument(
            f"keys: pages of {page_tokens} tokens with {dim} channels; give multiples of {SLOT_TOKENS} and of 2"
        )
    places = Buffer.of("slots", slots).checked((None, parts), "i64", device=library.device)
    n = places.shape[0]
    bounds = _bounds("to", to, (n, kv_heads, 2, dim), library)
    bound = params.Bound(
        found.address,
        *found.strides[:3],
        places.address,
        Buffer.of("tokens", tokens).checked((n,), "i32", device=library.device).address,
        bounds.address,
        *bounds.strides[:2],
        dim,
        page_tokens,
        pages,
    )
    library.launch(f"bound_{found.dtype}", (n, kv_heads, 1), bound)


def score_granules(library: Library, q: Array, bounds: Array, context: Context, *, to: Array) -> None:
    """Fills `to`, f32 [n, kv_heads, most], with `granules.scores`. Raises InvalidArgument.

    q: bf16 or f16 [n, q_heads, head_dim].
    bounds: bf16 [granules, kv_heads, 2, head_dim], any strides of the first two axes.
    Scores behind a sequence's granules stay as they are.
    """
    limits = _bounds("bounds", bounds, (None, None, 2, None), library)
    granules, kv_heads, _, dim = limits.shape
    queries = Buffer.of("q", q).checked((None, None, dim), *KV_TYPES, device=library.device).aligned()
    n, q_heads, _ = queries.shape
    group = group_of(q_heads, kv_heads, dim)
    tables, counts = _context(context, n, library)
    most = tables.shape[1]
    scores = Buffer.of("to", to).checked((n, kv_heads, most), "f32", device=library.device)
    score = params.Score(
        queries.address,
        limits.address,
        *limits.strides[:2],
        tables.address,
        counts.address,
        scores.address,
        q_heads,
        kv_heads,
        most,
        granules,
    )
    kernel = f"score_{queries.dtype}_{dim}"
    heads = -(-group // OPERAND_HEADS) * OPERAND_HEADS
    shared_bytes = 2 * QUERY_PARTS[queries.dtype] * heads * dim * BYTES["bf16"]
    fitting = library.resident_blocks(kernel, shared_bytes=shared_bytes)
    needed = -(-most // (SCORE_WARPS * TILE_GRANULES))
    at_once = max(1, fitting // max(1, n * kv_heads))
    rounds = max(1, -(-needed // at_once))  # alike for all blocks
    library.launch(kernel, (-(-needed // rounds), kv_heads, n), score, shared_bytes=shared_bytes)


def choose_granules(
    library: Library, scores: Array, context: Context, *, to: Chosen, forced: tuple[int, int] = (1, 0)
) -> None:
    """Fills `to` with `granules.choose` of each sequence; k is its last axis. Raises
    InvalidArgument. scores: f32 [n, kv_heads, most]. forced: how many first and last granules."""
    found = Buffer.of("scores", scores).checked((None,) * 3, "f32", device=library.device, dense_from=0)
    n, kv_heads, most = found.shape
    _, counts = _context(context, n, library, most)
    ids, sizes = _chosen(to, (n, kv_heads), library)
    k = ids.shape[2]
    check_forced(k, *forced)
    choose = params.Choose(*(each.address for each in (found, counts, ids, sizes)), kv_heads, most, k, *forced)
    library.launch("choose_granules", (kv_heads, n, 1), choose, shared_bytes=CHOOSE_SHARED_BYTES)


def resolve_granules(library: Library, chosen: Chosen, state: HotState, *, to: HotSlots) -> None:
    """Gives each chosen granule a hot slot, as `granules.HotBuffer.resolve`; changes `state`.
    Raises InvalidArgument. Misses are in their slots once `fetch_granules` has run."""
    where, owners = (
        Buffer.of(f"state.{name}", array).checked((None,) * 3, "i32", device=library.device, dense_from=0)
        for name, array in (("where", state.where), ("owners", state.owners))
    )
    n, kv_heads, most = where.shape
    slots, rows = owners.shape[2], (n, kv_heads)
    ids, sizes = _chosen(chosen, rows, library)
    k = ids.shape[2]
    if k > slots:
        raise InvalidArgument(
            f"state.owners: {slots} hot slots, and up to {k} granules are chosen; give at least as many slots"
        )
    given = (
        ("state.owners", state.owners, (*rows, slots), "i32"),
        ("state.used", state.used, (*rows, slots), "u8"),
        ("state.hands", state.hands, rows, "i32"),
        ("to.hits", to.hits, (*rows, k), "i32"),
        ("to.misses", to.misses, (*rows, k), "i32"),
        ("to.hit_sizes", to.hit_sizes, rows, "i32"),
        ("to.miss_sizes", to.miss_sizes, rows, "i32"),
    )
    others = (
        Buffer.of(name, array).checked(shape, kind, device=library.device).address for name, array, shape, kind in given
    )
    resolve = params.Resolve(ids.address, sizes.address, where.address, *others, kv_heads, most, k, slots)
    library.launch("resolve_granules", (kv_heads, n, 1), resolve, shared_bytes=RESOLVE_SHARED_BYTES)


def fetch_granules(
    library: Library,
    resolved: HotSlots,
    state: HotState,
    source: HostGranules,
    *,
    blocks: int = COPY_BLOCKS,
) -> None:
    """Copies the granules of misses into their hot slots, which are in `state.pages`. Raises
    InvalidArgument. blocks: thread blocks, at least one for each row."""
    check_blocks(blocks)
    misses, owners = (
        Buffer.of(name, array).checked((None,) * 3, "i32", device=library.device, dense_from=0)
        for name, array in (("resolved.misses", resolved.misses), ("state.owners", state.owners))
    )
    (n, kv_heads, k), slots = misses.shape, owners.shape[2]
    owners.checked((n, kv_heads, slots), device=library.device)
    sizes = Buffer.of("resolved.miss_sizes", resolved.miss_sizes).checked((n, kv_heads), "i32", device=library.device)
    addresses = Buffer.of("source.addresses", source.addresses).checked(
        (n, None, None), "u64", device=library.device, dense_from=0
    )
    hot = Buffer.of("state.pages", state.pages)
    hot.checked((n, slots, kv_heads, *(None,) * (len(hot.shape) - 3)), device=library.device, dense_from=3).aligned()
    _, most, parts = addresses.shape
    size = math.prod(hot.shape[3:]) * BYTES[hot.dtype]
    if not parts or size % (parts * ALIGNMENT_BYTES) or (source.offset | source.head_stride) % ALIGNMENT_BYTES:
        raise InvalidArgument(
            f"source: {parts} parts of a granule of {size} bytes, offset {source.offset}, head_stride {source.head_stride}; "
            f"kernels copy parts of multiples of {ALIGNMENT_BYTES} bytes between such places"
        )
    fetch = params.Fetch(
        *(each.address for each in (misses, sizes, owners, addresses, hot)),
        *hot.strides[:3],
        source.offset,
        source.head_stride,
        kv_heads,
        most,
        k,
        slots,
        parts,
        size // parts,
    )
    library.launch("fetch_granules", (max(1, blocks // max(1, n * kv_heads)), kv_heads, n), fetch)


def _bounds(name: str, array: Array, shape: tuple[int | None, ...], library: Library) -> Buffer:
    return Buffer.of(name, array).checked(shape, "bf16", device=library.device, dense_from=2).aligned()


def _context(context: Context, n: int, library: Library, most: int | None = None) -> tuple[Buffer, Buffer]:
    """Its tables and counts. Raises InvalidArgument."""
    tables = Buffer.of("context.tables", context.tables).checked((n, most), "i32", device=library.device)
    return tables, Buffer.of("context.counts", context.counts).checked((n,), "i32", device=library.device)


def _chosen(chosen: Chosen, rows: tuple[int, int], library: Library) -> tuple[Buffer, Buffer]:
    """Its ids and sizes. Raises InvalidArgument."""
    ids = Buffer.of("chosen.ids", chosen.ids).checked((*rows, None), "i32", device=library.device)
    return ids, Buffer.of("chosen.sizes", chosen.sizes).checked(rows, "i32", device=library.device)
