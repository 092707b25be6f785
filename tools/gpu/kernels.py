"""Prefill against the tensor cores. Stores, gathers, merges, bounds of keys and checksums against
copies or reads of as many bytes. Decodes with a shared prefix against the same without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tests.unit.kernels.kernel_cases import OUT_LIMIT
from tierd.kernels import Attended
from tierd.kernels.paged import Chunks, DeviceBatch, merge_parts, paged_prefill
from tierd.kernels.pages import Place, copy_pages, layer_addresses, store_tokens, summarize_pages
from tierd.kernels.sums import cut_pages, slice_sums
from tools.gpu import shapes
from tools.gpu.bench import Bench
from tools.gpu.device import BF16, Gpu, Room
from tools.gpu.limits import copy_rates, find_flops, read_rates
from tools.gpu.prefixes import Size, shared_row
from tools.gpu.results import Check, Left, Result, row_of
from tools.gpu.shapes import MODELS, PAGE_TOKENS, Pool

ROUNDS = 7
GIGA = 1e9
PARTS = 8
BLOCK_BYTES, LAYERS = 2 << 20, 32
Step = Callable[["Table"], Result]


class Table:
    """Shared by all rows: the GPU, memory of a room, a pool, and limits in bytes a second."""

    def __init__(self, bench: Bench, gpu: Gpu, room: Room) -> None:
        self.bench, self.gpu, self.room = bench, gpu, room
        self.pool = Pool(gpu, MODELS["8b"], bench.pick(32768, 64), shapes.Place(room))
        half = self.pool.memory.nbytes // 2
        self.read, self.copied = read_rates(gpu, room, self.pool.memory, half), copy_rates(gpu, self.pool.memory, half)
        self.rounds = bench.pick(ROUNDS, 1)
        self.distances = list[float]()
        gpu.repeat(self.pool.memory, self.pool.pattern)

    def against(self, name: str, works: Sequence[Callable[[], None]], moved_bytes: int, limits: list[float]) -> Result:
        """A row of bytes a second."""
        rates = [moved_bytes / each / GIGA for each in self.gpu.times(works, rounds=self.rounds)]
        return row_of(name, rates, "GB/s", [sum(limits) / len(limits) / GIGA])


def results(bench: Bench) -> Iterator[Result]:
    """A row for each."""
    gpu = bench.gpu()
    with gpu.room() as room:
        table = Table(bench, gpu, room)
        steps: tuple[tuple[str, Step], ...] = (
            ("prefill_8192", lambda table: _prefill(table, "prefill_8192", bench.pick((8192, 8192), (20, 20)))),
            ("prefill_512_8k", lambda table: _prefill(table, "prefill_512_8k", bench.pick((512, 8704), (10, 40)))),
            ("prefill_512_32k", lambda table: _prefill(table, "prefill_512_32k", bench.pick((512, 33280), (4, 60)))),
            ("store_tokens", _store),
            ("gather_pages", _gather),
            ("merge_parts", _merge),
            ("shared_64x8k", lambda table: _shared(table, "shared_64x8k", bench.pick(Size(64, 8192), Size(3, 48)))),
            ("shared_16x32k", lambda table: _shared(table, "shared_16x32k", bench.pick(Size(16, 32768), Size(2, 512)))),
            ("shared_right", _shared_right),
            ("summary_keys", _summary),
            ("sums_slices", _sums),
        )
        for name, step in steps:
            yield step(table) if bench.has_time(1) else Left(name, "no time was left")


def _prefill(table: Table, name: str, size: tuple[int, int]) -> Result:
    """size: query tokens, and all tokens. The flops are of the keys that a query sees."""
    gpu, pool, (rows, length) = table.gpu, table.pool, size
    model = pool.model
    with gpu.room() as room:
        q = room.of(
            np.random.default_rng(rows).standard_normal((rows, model.q_heads, model.head_dim), np.float32).astype(BF16)
        )
        table_of = np.random.default_rng(length).permutation(pool.pages)[: -(-length // PAGE_TOKENS)].astype(np.int32)
        chunks = Chunks(q, room.of(np.array([0, rows], np.int32)), rows)
        batch = DeviceBatch(room.of(np.array([length], np.int32)), room.of(table_of[None]))
        to = Attended(room.array(q.shape, BF16), room.array(q.shape[:2], np.float32))
        seconds = gpu.times(
            [lambda: _nothing(paged_prefill(gpu.kernels, chunks, pool.kv(), batch, to))], rounds=table.rounds
        )
        seen = rows * length - rows * (rows - 1) // 2
        flops = 4 * seen * model.q_heads * model.head_dim
        most = find_flops(gpu)
        note = "" if most else "the driver does not tell the clock"
        return row_of(name, [flops / each / 1e12 for each in seconds], "TFLOP/s", [most / 1e12] if most else [], note)


def _store(table: Table) -> Result:
    """Every token is read once and written once."""
    gpu, pool, count = table.gpu, table.pool, table.bench.pick(65536, 20)
    model = pool.model
    with gpu.room() as room:
        new = [room.array((count, model.kv_heads, model.head_dim), BF16) for _ in range(2)]
        for each in new:
            gpu.repeat(each, pool.pattern)
        slots = np.random.default_rng(3).permutation(pool.pages * PAGE_TOKENS)
        places = [room.of(slots[i * count : (i + 1) * count].astype(np.int64)) for i in range(2)]
        works = [lambda at=at: store_tokens(gpu.kernels, *new, at, pool.kv()) for at in places]
        row = table.against("store_tokens", works, 2 * pool.bytes_of(count), table.copied)
    gpu.repeat(pool.memory, pool.pattern)
    return row


def _gather(table: Table) -> Result:
    """Blocks of several layers, in random order, into an engine's tensors, one a layer: [pages, 2,
    tokens, kv_heads, head_dim]."""
    gpu, bench = table.gpu, table.bench
    count, layers = bench.pick((512, 32), (3, 2))
    with gpu.room() as room:
        source = Pool(gpu, table.pool.model, 2 * count, shapes.Place(room, layers=layers))
        model = source.model
        shape = (count, 2, PAGE_TOKENS, model.kv_heads, model.head_dim)
        tensors = [room.array(shape, BF16) for _ in range(layers)]
        addresses = room.of(np.array(layer_addresses(tensors), np.int64))
        ids = np.random.default_rng(4).permutation(2 * count).astype(np.int32).reshape(2, count)
        named = [room.of(some) for some in ids]
        blocks = gpu.kernels.resident_blocks("copy_rows_16")
        pages = source.memory.axes(0, 1, 2, 4, 3, 5)
        works = [
            lambda at=at: copy_pages(gpu.kernels, Place(pages, at), Place(tensors, addresses=addresses), blocks=blocks)
            for at in named
        ]
        return table.against("gather_pages", works, 2 * count * source.memory.strides[0], table.copied)


def _merge(table: Table) -> Result:
    """Parts in f32, as splits write them."""
    gpu, rows, (heads, dim) = table.gpu, table.bench.pick(4096, 4), (32, 128)
    with gpu.room() as room:
        outs = room.array((PARTS, rows, heads, dim), np.float32)
        gpu.repeat(outs, np.random.default_rng(5).standard_normal(1 << 16, np.float32))
        lses = room.of(np.random.default_rng(6).standard_normal((PARTS, rows, heads), np.float32))
        to = Attended(room.array((rows, heads, dim), np.float32), room.array((rows, heads), np.float32))
        moved = outs.nbytes + lses.nbytes + to.out.nbytes + to.lse.nbytes
        works = [lambda: _nothing(merge_parts(gpu.kernels, outs, lses, to))]
        return table.against("merge_parts", works, moved, table.copied)


def _shared(table: Table, name: str, size: Size) -> Result:
    """Decodes with a shared prefix."""
    return shared_row(table.gpu, table.pool, name, size, rounds=table.rounds, samples=table.distances)


def _shared_right(table: Table) -> Result:
    """Both ways give the same, except for the rounding of the parts."""
    near = [each <= 3 * OUT_LIMIT["bf16"] for each in table.distances]  # false for NaN
    return Check("shared_right", bool(near) and all(near), ", ".join(f"{each:.1e}" for each in table.distances))


def _summary(table: Table) -> Result:
    """Reads the keys of one layer, and writes two rows for each page."""
    gpu, pool, count = table.gpu, table.pool, table.bench.pick(16384, 4)
    with gpu.room() as room:
        ids = np.random.default_rng(7).permutation(pool.pages).astype(np.int32)
        places = [room.of(ids[i * count : (i + 1) * count]) for i in range(2)]
        full = room.of(np.full(count, PAGE_TOKENS, np.int32))
        to = room.array((count, pool.model.kv_heads, 2, pool.model.head_dim), np.float32)
        works = [
            lambda at=at: _nothing(summarize_pages(gpu.kernels, pool.kv().k, at, tokens=full, to=to)) for at in places
        ]
        moved = pool.bytes_of(count * PAGE_TOKENS) // 2 + to.nbytes
        return table.against("summary_keys", works, moved, table.read)


def _sums(table: Table) -> Result:
    """Blocks of 2 MiB in slices of a layer each."""
    gpu, pool = table.gpu, table.pool
    count = table.bench.pick(512, 1)
    length = min(BLOCK_BYTES, pool.memory.nbytes // 2)
    with gpu.room() as room:
        out = room.array((count * LAYERS,), np.uint64)
        cuts = [
            cut_pages(
                [pool.memory.address + (i * count + block) * length for block in range(count)],
                [length] * count,
                [LAYERS] * count,
            )
            for i in range(2)
        ]
        sides = [(room.of(cut.addresses), room.of(cut.lengths)) for cut in cuts]
        works = [lambda side=side: _nothing(slice_sums(gpu.kernels, *side, out)) for side in sides]
        return table.against("sums_slices", works, count * length, table.read)


def _nothing(_: object) -> None:
    """Drops the result of a kernel's Python function."""
