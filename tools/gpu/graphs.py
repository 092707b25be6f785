"""CUDA graphs: one captured decode, replayed at growing lengths; cost of each way to the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tools.gpu.bench import Bench
from tools.gpu.device import Gpu
from tools.gpu.results import Check, Left, Result, row_of
from tools.gpu.shapes import MODELS, Decode, Place, Pool

CALLS = 200
ROUNDS = 5


def results(bench: Bench) -> Iterator[Result]:
    """Of a decode of 8 requests."""
    gpu = bench.gpu()
    with gpu.room() as room:
        most = bench.pick([1024] * 8, [40, 20])
        pool = Pool(gpu, MODELS["8b"], bench.pick(4096, 16), Place(room))
        decode = Decode(gpu, room, pool, most, q_heads=32)
        decode.launch()
        gpu.finish()
        calls = bench.pick(CALLS, 2)
        yield row_of("decode_call", [_caller_us(gpu, decode.launch, calls) for _ in range(ROUNDS)], "us")
        if not gpu.has_graphs:
            for name in ("graph_replays", "graph_replay", "graph_launch"):
                yield Left(name, "the driver captures no work of a stream")
            return
        graph = gpu.captured(decode.launch)
        yield _growing(gpu, decode, graph, most)
        yield row_of("graph_replay", _replay_us(gpu, graph, calls), "us")
        replayed = [_caller_us(gpu, lambda: gpu.ask("cuGraphLaunch", graph, gpu.stream), calls) for _ in range(ROUNDS)]
        yield row_of("graph_launch", replayed, "us")


def _growing(gpu: Gpu, decode: Decode, graph: Any, most: list[int]) -> Check:
    """Each step changes the lengths in the array that the graph reads, and poisons its output."""
    wrong = []
    for step in range(1, max(most) + 1, max(1, max(most) // 7)):
        lengths = np.minimum(most, step + np.arange(len(most)) * 3).astype(np.int32)
        gpu.write(decode.lens, lengths)
        gpu.ask("cuMemsetD8Async", decode.to.out.address, 0xFF, decode.to.out.nbytes, gpu.stream)
        gpu.ask("cuGraphLaunch", graph, gpu.stream)
        rows = [(sequence, (step + sequence) % 8) for sequence in range(len(most))]
        found = decode.distances(rows, lengths.tolist())
        if not found.are_right:
            wrong.append(f"at {lengths[0]} tokens {found}")
    return Check("graph_replays", not wrong, "; ".join(wrong[:3]) or f"up to {max(most)} tokens")


def _replay_us(gpu: Gpu, graph: Any, calls: int) -> list[float]:
    """On the GPU, one after another."""
    launches = [lambda: gpu.ask("cuGraphLaunch", graph, gpu.stream)] * calls
    return [1e6 * gpu._round(launches) for _ in range(ROUNDS)]


def _caller_us(gpu: Gpu, launch: Callable[[], Any], calls: int) -> float:
    """Of the caller's time, while the GPU may lag behind."""
    begun = time.perf_counter()
    for _ in range(calls):
        launch()
    taken = time.perf_counter() - begun
    gpu.finish()
    return 1e6 * taken / calls
