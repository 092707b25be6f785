"""The device tier's GPU process on this driver: slabs, copies, checksums, its death, and its rates."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierd.checksum import slice_sums
from tierd.core.formats.block import slice_lengths
from tierd.gpu.process import GpuProcess
from tierd.gpu.protocol import PIECE, SliceTable
from tools.gpu import host
from tools.gpu.bench import Bench
from tools.gpu.results import Check, Fact, Result, row_of

GIGA = 1e9
BLOCK_BYTES, LAYERS = 2 << 20, 32
PATIENCE_S = 20
ROUNDS = 5
SLAB, HOST = 1, 0
Array = np.ndarray[Any, Any]


@dataclass
class Sides:
    """Blocks in host memory, and their pieces both ways. The memory's first half is the source; the
    second receives the blocks that come back. descriptor: of the slab."""

    memory: host.HostMemory
    load: Array
    store: Array
    descriptor: int = -1

    @property
    def length_bytes(self) -> int:
        """Of the slab."""
        return self.memory.bytes.nbytes // 2

    def tables(self) -> list[SliceTable]:
        """The tables of the blocks in the order of the loads."""
        lengths = slice_lengths(BLOCK_BYTES, LAYERS)
        places = self.load["host_offset"].tolist()
        return [slice_sums(memoryview(self.memory.bytes[at : at + BLOCK_BYTES]), lengths) for at in places]


def results(bench: Bench) -> Iterator[Result]:
    """Measures the link first, in this process, which then releases its GPU memory."""
    length = bench.pick(512 << 20, 3 * BLOCK_BYTES)
    limits = _link(bench, length)
    with ExitStack() as stack:
        descriptor = host.made(2 * length)
        stack.callback(os.close, descriptor)
        yield from asyncio.run(_life(bench, _sides(descriptor, length), descriptor, limits))


def _link(bench: Bench, length_bytes: int) -> tuple[float, float]:
    """Bytes a second to the GPU and from it."""
    gpu = bench.gpu(with_kernels=False)
    with gpu.room() as room, host.pinned(gpu, length_bytes) as memory:
        both = room.bytes(length_bytes), memory.address
        rates = [
            length_bytes
            / min(
                gpu.times(
                    [lambda ways=ways: gpu.ask("cuMemcpyAsync", *ways, length_bytes, gpu.stream)],
                    rounds=3,
                    as_graphs=False,
                )
            )
            for ways in (both, both[::-1])
        ]
    return rates[0], rates[1]


def _sides(descriptor: int, length_bytes: int) -> Sides:
    memory = host.mapped(descriptor, 2 * length_bytes)
    rng, count = np.random.default_rng(12), length_bytes // BLOCK_BYTES
    memory.bytes[:length_bytes].view(np.uint64)[:] = rng.integers(0, 1 << 63, length_bytes // 8)
    load, store = np.zeros(count, PIECE), np.zeros(count, PIECE)
    for pieces, base in ((load, 0), (store, length_bytes)):
        pieces["slab"], pieces["host"], pieces["length"], pieces["layers"] = SLAB, HOST, BLOCK_BYTES, LAYERS
        pieces["host_offset"] = base + BLOCK_BYTES * rng.permutation(count)
    load["slab_offset"] = BLOCK_BYTES * rng.permutation(count)
    store["slab_offset"] = load["slab_offset"]
    return Sides(memory, load, store)


async def _life(bench: Bench, sides: Sides, descriptor: int, limits: tuple[float, float]) -> list[Result]:
    """Two GPU processes: the first is killed, the second takes over its slab."""
    dead = asyncio.Event()
    first = GpuProcess(0, patience_s=PATIENCE_S, on_death=lambda _: dead.set())
    facts = await first.start()
    told = [f"exports {facts.exports}", f"hashes {facts.hashes}", facts.copying, *facts.notices]
    found: list[Result] = [Fact("process_facts", "; ".join(told))]
    sides.descriptor = await first.make(SLAB, sides.length_bytes)
    await first.attach(HOST, descriptor, 2 * sides.length_bytes)
    want = sides.tables()
    found += await _copied(bench, first, sides, want, limits)
    os.kill(first.pid, signal.SIGKILL)
    await asyncio.wait_for(dead.wait(), PATIENCE_S)
    second = GpuProcess(0, patience_s=PATIENCE_S, on_death=lambda _: None)
    await second.start(slabs={SLAB: (sides.descriptor, sides.length_bytes)})
    is_same = _are_same(await second.sums(sides.load), want)
    await second.stop()
    os.close(sides.descriptor)
    said = "its successor found every block" if is_same else "blocks differ"
    return [*found, Check("process_death", is_same, said)]


async def _copied(
    bench: Bench, process: GpuProcess, sides: Sides, want: list[SliceTable], limits: tuple[float, float]
) -> list[Result]:
    """There and back, several times."""
    are_right, seconds = True, ([], [], [])
    for _ in range(bench.pick(ROUNDS, 1)):
        times = [time.perf_counter()]
        tables = await process.load(sides.load)
        times.append(time.perf_counter())
        await process.store(sides.store)
        times.append(time.perf_counter())
        again = await process.sums(sides.load)
        times.append(time.perf_counter())
        for each, taken in zip(seconds, np.diff(times), strict=True):
            each.append(float(taken))
        are_right &= _are_same(tables, want) and _are_same(again, want) and _is_back(sides)
        sides.memory.bytes[sides.length_bytes :] = 0
    rates = [[sides.length_bytes / each / GIGA for each in some] for some in seconds]
    return [
        Check(
            "process_bytes", are_right, "blocks and slice tables are right" if are_right else "bytes or tables differ"
        ),
        row_of("process_load", rates[0], "GB/s", [limits[0] / GIGA], "with the checksums of what arrived"),
        row_of("process_store", rates[1], "GB/s", [limits[1] / GIGA]),
        row_of("process_sums", rates[2], "GB/s", [limits[1] / GIGA]),
    ]


def _are_same(got: list[SliceTable], want: list[SliceTable]) -> bool:
    return len(got) == len(want) and all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def _is_back(sides: Sides) -> bool:
    """Whether every block came back, at its new place."""
    blocks = sides.memory.bytes.reshape(-1, BLOCK_BYTES)
    places = [pieces["host_offset"] // BLOCK_BYTES for pieces in (sides.load, sides.store)]
    return bool((blocks[places[0]] == blocks[places[1]]).all())
