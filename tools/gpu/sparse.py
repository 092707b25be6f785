"""Sparse decode over tiers: results against the references, and times of its steps.

One request of Llama-3-8B's heads. Bounds lie several times in the GPU's memory, so none hits the
cache. Queries of successive steps are alike, so most of their granules are in hot slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tests.unit.kernels.small_cases import UNITS
from tests.unit.kernels.sparse_cases import Far, Score, Steps, check_far, check_resolve, check_score
from tierd.kernels import Attended
from tierd.kernels.granules import ABSENT, GRANULE_TOKENS
from tierd.kernels.paged import DeviceBatch, PagedDecode, decode_blocks, merge_scattered, part_addresses
from tierd.kernels.pages import KvPages
from tierd.kernels.sparse import (
    Chosen,
    Context,
    HostGranules,
    HotSlots,
    HotState,
    choose_granules,
    fetch_granules,
    resolve_granules,
    score_granules,
)
from tools.gpu import host
from tools.gpu.bench import Bench
from tools.gpu.device import BF16, DeviceArray, Gpu, Room
from tools.gpu.families import family
from tools.gpu.results import Left, Result, row_of
from tools.gpu.shapes import MODELS

GIGA = 1e9
ROUNDS = 7
CHOSEN = 32
"""Granules of each kv head: 2,048 tokens."""
SLOTS = 40
"""Few, so that queries miss a fifth of their granules again and again."""
COPIES = 4
"""Of the bounds, and queries."""
NOISE = 0.12
"""In a step's query, against what is alike in all."""
FETCH_SLOTS = 256
FETCHES = {"fetch_256": (16, 2), "fetch_2048": (128, 2), "fetch_2048_4k": (32, 8)}
"""Misses of each kv head, and parts of a granule: of 16 KiB, or 4 KiB."""


def results(bench: Bench) -> Iterator[Result]:
    """Checks, then times."""
    gpu = bench.gpu()
    large = [(check_far, Far(dim=128, group=4)), (check_score, Score((5000, 700), dim=128))]
    large.append((check_resolve, Steps(300, 5000, ((200, 150),) * 30)))
    yield family(bench, gpu.kernels, "sparse_right", [*UNITS["sparse"], (check_far, Far()), *bench.pick(large, [])])
    for name, tokens in (("score_128k", 1 << 17), ("select_1m", 1 << 20), ("layer_1m", 1 << 20)):
        if not bench.has_time(4):
            yield Left(name, "no time was left")
            continue
        with gpu.room() as room, host.pinned(gpu, bench.pick(256 << 20, 2 << 20)) as memory:
            layer = Layer(bench, gpu, room, memory, bench.pick(tokens, 40 * GRANULE_TOKENS))
            step = {"score_128k": layer.score, "select_1m": layer.select, "layer_1m": layer.attend}[name]
            works = [lambda i=i, step=step: step(i) for i in range(COPIES)]
            seconds = gpu.times(works, rounds=bench.pick(ROUNDS, 1))
            note = "" if name == "score_128k" else f"{layer.missed():.0%} misses"
            yield row_of(name, [1e6 * each for each in seconds], "us", note=note)
    yield from _fetches(bench, gpu)


@dataclass
class Layer:
    """A step of one layer, over granules of random bounds. memory: all keys and values repeat in it."""

    bench: Bench
    gpu: Gpu
    room: Room
    memory: host.HostMemory
    tokens: int

    def __post_init__(self) -> None:
        model, room, rng = MODELS["8b"], self.room, np.random.default_rng(14)
        self.heads, self.count = model.kv_heads, self.tokens // GRANULE_TOKENS
        limits = rng.standard_normal((self.count, self.heads, 2, model.head_dim), np.float32)
        limits[:, :, 0], limits[:, :, 1] = limits.min(axis=2), limits.max(axis=2)
        self.bounds = room.array((COPIES * self.count, *limits.shape[1:]), BF16)
        self.gpu.repeat(self.bounds, limits.astype(BF16))
        counts = room.of(np.array([self.count], np.int32))
        ids = np.arange(COPIES * self.count, dtype=np.int32).reshape(COPIES, 1, -1)
        self.contexts = [Context(room.of(each), counts) for each in ids]
        q = rng.standard_normal((1, model.q_heads, model.head_dim), np.float32)
        noise = NOISE * rng.standard_normal((COPIES, *q.shape), np.float32)
        self.q = [room.of(each.astype(BF16)) for each in q + noise]
        rows, k = (1, self.heads), self.bench.pick(CHOSEN, 3)
        self.scores = room.array((*rows, self.count), np.float32)
        self.chosen = Chosen(room.array((*rows, k), np.int32), room.array(rows, np.int32))
        self.state, self.resolved = new_state(room, self.heads, self.count, SLOTS), new_resolved(room, self.heads, k)
        self.source, hot = host_granules(room, self.memory, self.count, 2), self.state.pages
        shape = model.decode(1)
        fitting = decode_blocks(self.gpu.kernels, shape, q_type="bf16", kv_type="bf16")
        blocks = self.bench.pick(fitting, 3)
        self.decode = PagedDecode(self.gpu.kernels, shape, blocks=blocks, allocate=room.array)
        flat = DeviceArray(hot.address, hot.shape[1:], BF16)  # [slots, kv_heads, 2, 64, head_dim]
        self.gpu.repeat(flat, np.zeros(1 << 16, BF16))
        self.pages = KvPages(*(flat.at(2, side).axes(0, 2, 1, 3) for side in (0, 1)))
        self.lens = room.of(np.array([SLOTS * GRANULE_TOKENS], np.int32))
        self.slots = room.of(np.arange(SLOTS, dtype=np.int32)[None])
        self.parts = [Attended(room.array(q.shape, BF16), room.array(q.shape[:2], np.float32)) for _ in range(3)]
        self.addresses = room.of(np.array(part_addresses(self.parts[:2]), np.int64))

    def score(self, i: int) -> None:
        """Of the i-th query, over the i-th copy of the bounds."""
        score_granules(self.gpu.kernels, self.q[i], self.bounds, self.contexts[i], to=self.scores)

    def select(self, i: int) -> None:
        """Scores, the choice, and hot slots."""
        self.score(i)
        choose_granules(self.gpu.kernels, self.scores, self.contexts[i], to=self.chosen)
        resolve_granules(self.gpu.kernels, self.chosen, self.state, to=self.resolved)

    def attend(self, i: int) -> None:
        """All steps in turn, in one stream."""
        self.select(i)
        found = self.resolved
        self._decode(i, found.hits, found.hit_sizes, self.parts[0])
        fetch_granules(self.gpu.kernels, found, self.state, self.source)
        self._decode(i, found.misses, found.miss_sizes, self.parts[1])
        merge_scattered(self.gpu.kernels, self.parts[:2], self.addresses, self.parts[2])

    def _decode(self, i: int, subsets: DeviceArray, sizes: DeviceArray, to: Attended) -> None:
        batch = DeviceBatch(self.lens, self.slots, subsets=subsets, subset_sizes=sizes)
        self.decode(self.q[i], self.pages, batch, to)

    def missed(self) -> float:
        """The share of misses of the last step."""
        misses, hits = (self.gpu.read_back(each).sum() for each in (self.resolved.miss_sizes, self.resolved.hit_sizes))
        return float(misses / (misses + hits))


def new_state(room: Room, heads: int, granules: int, slots: int) -> HotState:
    """Of one request, without a granule."""
    owners = room.of(np.full((1, heads, slots), ABSENT, np.int32))
    where, used = np.full((1, heads, granules), ABSENT, np.int32), np.zeros((1, heads, slots), np.uint8)
    pages = room.array((1, slots, heads, 2, GRANULE_TOKENS, MODELS["8b"].head_dim), BF16)
    return HotState(room.of(where), owners, room.of(used), room.of(np.zeros((1, heads), np.int32)), pages)


def new_resolved(room: Room, heads: int, k: int) -> HotSlots:
    """Undefined."""
    sizes = [room.array((1, heads), np.int32) for _ in range(2)]
    return HotSlots(room.array((1, heads, k), np.int32), sizes[0], room.array((1, heads, k), np.int32), sizes[1])


def host_granules(room: Room, memory: host.HostMemory, count: int, parts: int) -> HostGranules:
    """Blocks of [K or V, parts, kv_heads, tokens, head_dim], which repeat in the memory."""
    model = MODELS["8b"]
    part = 2 * GRANULE_TOKENS * 2 * model.head_dim // parts
    size = part * parts * model.kv_heads
    order = np.random.default_rng(15).permutation(count) % (memory.bytes.nbytes // size)
    steps = np.arange(parts, dtype=np.uint64) * np.uint64(part * model.kv_heads)
    places = np.uint64(memory.address) + order.astype(np.uint64)[:, None] * np.uint64(size) + steps
    return HostGranules(room.of(places[None]), 0, part)


def _fetches(bench: Bench, gpu: Gpu) -> Iterator[Result]:
    """Against one copy of the memory."""
    length, heads = bench.pick(256 << 20, 2 << 20), MODELS["8b"].kv_heads
    with gpu.room() as room, host.pinned(gpu, length) as memory:
        whole = room.array((length,), np.uint8)
        copy: Callable[[], None] = lambda: gpu.ask("cuMemcpyAsync", whole.address, memory.address, length, gpu.stream)  # noqa: E731
        rounds = bench.pick(ROUNDS, 1)
        limits = [length / each / GIGA for each in gpu.times([copy], rounds=rounds, as_graphs=False)]
        for name, (full, parts) in FETCHES.items():
            misses = bench.pick(full, 1)
            if not bench.has_time(2):
                yield Left(name, "no time was left")
                continue
            source, state = host_granules(room, memory, 1024, parts), new_state(room, heads, 1024, FETCH_SLOTS)
            rng, resolved = np.random.default_rng(16), new_resolved(room, heads, FETCH_SLOTS)
            gpu.write(resolved.misses, np.array([[rng.permutation(FETCH_SLOTS) for _ in range(heads)]]))
            gpu.write(resolved.miss_sizes, np.full((1, heads), misses))
            gpu.write(state.owners, np.array([[rng.permutation(1024)[:FETCH_SLOTS] for _ in range(heads)]]))
            works = [lambda given=(resolved, state, source): fetch_granules(gpu.kernels, *given)]
            moved = misses * heads * state.pages.strides[2]
            rates = [moved / each / GIGA for each in gpu.times(works, rounds=rounds)]
            yield row_of(name, rates, "GB/s", limits, f"{misses * parts * heads} parts")
