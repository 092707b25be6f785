"""The rows of `endtoend`: a daemon, and a worker with a model of Llama-3-8B's shape.

Torch computes on the GPU; tiny sizes compute with numpy, and their pages and kernels are on the
GPU. Invariants: a row counts only if the report says that its prefix came from that place. Rates
include all of a step: picking, storing and naming blocks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.client import Client
from tierd.testing import Daemon
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import Checkpoint, RawTensor
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import Held, LocalPages, page_shape
from tierd.worker.report import Request
from tierd.worker.sequences import LiveSequence
from tierd.worker.spec import LlamaSpec
from tierd.worker.tierd_pages import TierdPages
from tools.gpu.bench import Bench
from tools.gpu.endtoend import SOURCES
from tools.gpu.limits import read_rates
from tools.gpu.results import Check, Left, Result, row_of
from tools.gpu.shapes import Model as Heads
from tools.gpu.shapes import Place, Pool

NEW = 4
"""Tokens that are compared between sources."""
WAIT_S = 30.0
LIMIT_BYTES = 1 << 30
"""Read at once for the ceiling."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """prefix, tail: tokens of a prompt. chunk: of a prefill's step. requests, length: of the batch.

    capacities: of device, host and NVMe. rounds: counted prompts. steps: of the batch.
    """

    spec: LlamaSpec
    backend: Backend
    prefix: int
    tail: int
    chunk: int
    requests: int
    length: int
    capacities: tuple[str, str, str]
    rounds: int
    steps: int


LARGE = LlamaSpec(128256, 4096, 14336, 32, 32, 8, 128, rope_theta=500000.0, max_positions=16384)
SMALL = LlamaSpec(64, 128, 96, 2, 4, 2, 64, tied=True, max_positions=512)


def sizes(bench: Bench) -> Sizes:
    """Llama-3-8B in bfloat16, 64 sequences of 4 K; or a tiny model that numpy computes."""
    if bench.is_small:
        few = ("16 MiB", "32 MiB", "64 MiB")
        return Sizes(SMALL, Backend("numpy", "float32", "cuda:0"), 32, 8, 32, 2, 20, few, 1, 3)
    many = ("40 GiB", "4 GiB", "8 GiB")
    return Sizes(LARGE, Backend("torch", "bfloat16", "cuda:0"), 8192, 512, 512, 64, 4096, many, 3, 48)


def results(bench: Bench) -> Iterator[Result]:
    """Plain pages first: they leave the GPU's memory before the daemon takes it."""
    size = sizes(bench)
    os.environ["TIERD_FATBINS_FOLDER"] = str(bench.fatbins)
    model = _model(size)
    ceiling = _ceiling(bench, size)
    source = _Given(page_shape(model))
    for name, graphs in (("e2e_decode_plain", True), ("e2e_decode_passes", False)):
        options = EngineOptions(batch_limit=size.requests, keep_tails=False, decode_graphs=graphs)
        yield _decode(bench, size, name, ceiling, Engine(model, source, options=options))
    source.close()
    yield from _with_daemon(bench, size, model, ceiling)


class _Patterned(Checkpoint):
    """Random weights, one pattern at different places: quick to make, and told by their shape."""

    @property
    def digest(self) -> str:  # type: ignore[override]
        """Of the shape alone: reading all weights for it would take longer than the rows."""
        return f"pattern-{self.spec.hidden_size}-{self.spec.layers}"


def _model(size: Sizes) -> Llama:
    shapes = size.spec.tensor_shapes()
    few = np.random.default_rng(5).standard_normal(1 << 20, np.float32) * np.float32(0.02)
    longest = max(int(np.prod(shape)) for shape in shapes.values()) + len(shapes)
    values = np.resize((few.view(np.uint32) >> 16).astype("<u2"), longest)
    ones = np.full(size.spec.hidden_size, 0x3F80, "<u2")
    tensors = {}
    for i, (name, shape) in enumerate(shapes.items()):
        some = ones if len(shape) == 1 else values[i : i + int(np.prod(shape))]
        tensors[name] = RawTensor("BF16", shape, some.view(np.uint8))
    return Llama(_Patterned(size.spec, tensors), size.backend)


def _ceiling(bench: Bench, size: Sizes) -> float:
    """Tokens a second if a step only read weights and the KV of half of its new tokens."""
    spec, gpu = size.spec, bench.gpu()
    with gpu.room() as room:
        pages = bench.pick(LIMIT_BYTES // (4 * 16 * spec.kv_heads * spec.head_dim), 64)
        pool = Pool(gpu, Heads(spec.q_heads, spec.kv_heads, spec.head_dim), pages, Place(room))
        rates = read_rates(gpu, room, pool.memory, pool.memory.nbytes // 2)
    each = 2 if size.backend.dtype == "bfloat16" else 4
    weights = sum(int(np.prod(s)) for name, s in spec.tensor_shapes().items() if spec.tied or "embed" not in name)
    tokens = size.requests * (size.length + size.steps // 2)
    kv_bytes = tokens * 2 * 2 * spec.layers * spec.kv_heads * spec.head_dim
    return size.requests * statistics.median(rates) / (each * weights + kv_bytes)


class _Given(LocalPages):
    """Plain pages. A prompt counts as held, in pages of any content: values do not change a step's time."""

    def acquire(self, tokens: Sequence[int], *, marks: Sequence[int] = (), by_layer: bool = False) -> Held:
        """All whole pages."""
        count = len(tokens) // self.shape.tokens_per_block
        return Held(self.reserve(count), None, count * self.shape.tokens_per_block)


def _prompt(size: Sizes, length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng([length, seed]).integers(0, size.spec.vocab_size, length).tolist())


def _decode(bench: Bench, size: Sizes, name: str, ceiling: float, engine: Engine) -> Result:
    """Tokens a second of a batch. The engine's prompts have other lengths, so blocks end at all steps."""
    sequences: list[LiveSequence] = []
    try:
        for i in range(size.requests):
            if not bench.has_time(4):
                return Left(name, "no time was left")
            prompt = _prompt(size, size.length - i % 16, i)
            sequences.append(engine.begin(Request(prompt, 2 * size.steps + 8)))
        engine.pick(sequences)
        for _ in range(3):  # a step of this size runs, is captured, and is replayed
            engine.step(sequences)
        rates = []
        for _ in range(bench.pick(3, 1)):
            begun = time.perf_counter()
            for _ in range(size.steps // 3):
                engine.step(sequences)
            rates.append(size.requests * (size.steps // 3) / (time.perf_counter() - begun))
        return row_of(name, rates, "tokens/s", [ceiling])
    finally:
        for sequence in sequences:
            sequence.table.release()


def _with_daemon(bench: Bench, size: Sizes, model: Llama, ceiling: float) -> Iterator[Result]:
    device, host, nvme = size.capacities
    segment = bench.pick("1 GiB", "4 MiB")
    config = "".join(
        f'[[{kind}]]\ncapacity = "{capacity}"\nsegment = "{segment}"\n{more}'
        for kind, capacity, more in (("device", device, 'kind = "cuda"\n'), ("host", host, ""), ("nvme", nvme, ""))
    )
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=WAIT_S) as client:
        source = TierdPages(client, model, name="end to end")
        options = EngineOptions(chunk_tokens=size.chunk, batch_limit=size.requests, keep_tails=False)
        with Engine(model, source, options=options) as engine:
            yield from _first_tokens(bench, size, engine, daemon.target)
            yield _decode(bench, size, "e2e_decode", ceiling, engine)


def _first_tokens(bench: Bench, size: Sizes, engine: Engine, target: str) -> Iterator[Result]:
    """A row for each source. The first round, in which kernels are loaded, does not count."""
    times, wrong, tokens = defaultdict[str, list[float]](list), dict[str, str](), set[bool]()
    warm = bench.pick(1, 0)
    for turn in range(size.rounds + warm):
        prompt = _prompt(size, size.prefix + size.tail, 1000 + turn)
        want: list[int] = []
        for source in SOURCES:
            if not bench.has_time(10):
                break
            _evict_to(source, target)
            report = engine.generate([Request(prompt, NEW)])[0]
            want = want or report.tokens
            tokens.add(report.tokens == want)
            found = {name.partition(".")[0] for name in report.tier_tokens} or {"none"}
            if found != {source}:
                wrong[source] = f"the prefix came from {', '.join(sorted(found))}"
            if turn >= warm:
                times[source].append(1e3 * report.ttft_s)
    for source in SOURCES:
        name = f"e2e_ttft_{source}"
        if source in wrong or not times[source]:
            yield Left(name, wrong.get(source, "no time was left"))
        else:
            yield row_of(name, times[source], "ms", [] if source == "none" else [statistics.median(times["none"])])
    said = "they differ between sources" if False in tokens else "the same from every source"
    yield Check("e2e_tokens", False not in tokens, said) if tokens else Left("e2e_tokens", "no time was left")


def _evict_to(source: str, target: str) -> None:
    """Leaves what was served before in this tier alone, or in the far ones."""
    tiers = {"host": ["device.0"], "nvme": ["device.0", "host.0"]}.get(source, [])
    if not tiers:
        return
    with connect(target) as daemon:
        daemon.ask(pb.FlushRequest(deadline_s=WAIT_S), timeout_s=WAIT_S + 5)
        for tier in tiers:
            daemon.ask(pb.EvictRequest(tier=tier), timeout_s=WAIT_S)
