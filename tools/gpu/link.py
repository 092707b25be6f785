"""Copies between host memory and the GPU in pieces, by the driver's batches and by a kernel on mapped memory, against one copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierd.kernels.pages import Place, copy_pages
from tools.gpu import host
from tools.gpu.bench import Bench
from tools.gpu.device import DeviceArray, Gpu
from tools.gpu.results import Check, Left, Result, row_of

GIGA = 1e9
ROUNDS = 5
PIECES = {"2m": 2 << 20, "256k": 256 << 10, "64k": 64 << 10, "16k": 16 << 10}
BATCHES = 8
"""Of one copy: their number does not matter to a link, and no call gets too many pieces."""
GATHER_BLOCKS = 64


@dataclass
class Ends:
    """Host memory and the GPU's, equally long."""

    gpu: Gpu
    memory: host.HostMemory
    device: DeviceArray
    rounds: int

    def rates(self, work: Callable[[], None]) -> list[float]:
        """GB a second of what copies all of it."""
        return [
            self.device.nbytes / each / GIGA for each in self.gpu.times([work], rounds=self.rounds, as_graphs=False)
        ]


def results(bench: Bench) -> Iterator[Result]:
    """Both ways."""
    gpu, length = bench.gpu(), bench.pick(1 << 30, 4 << 20)
    with gpu.room() as room, host.pinned(gpu, length) as memory:
        ends = Ends(gpu, memory, room.array((length,), np.uint8), bench.pick(ROUNDS, 1))
        memory.bytes.view(np.uint64)[:] = np.random.default_rng(9).integers(0, 1 << 63, length // 8)
        one_way = list[float]()
        for way in ("h2d", "d2h"):
            limits = ends.rates(lambda way=way: _whole(ends, way))
            one_way.append(sum(limits) / len(limits))
            yield row_of(f"{way}_link", limits, "GB/s")
            for name, piece in PIECES.items():
                yield _batched(bench, ends, f"{way}_batch_{name}", piece, limits)
            yield _gathered(bench, ends, f"{way}_gather_16k", limits)
        yield _both_ways(bench, ends, one_way)
        yield _bytes(ends)


def _whole(ends: Ends, way: str) -> None:
    to, source = _sides(ends, way)
    ends.gpu.ask("cuMemcpyAsync", to, source, ends.device.nbytes, ends.gpu.stream)


def _sides(ends: Ends, way: str) -> tuple[int, int]:
    """Where to, and where from."""
    both = ends.device.address, ends.memory.address
    return both if way == "h2d" else both[::-1]


def _batched(bench: Bench, ends: Ends, name: str, piece: int, limits: list[float]) -> Result:
    if not bench.has_time(2):
        return Left(name, "no time was left")
    batches = batches_of(ends, name[:3], piece)

    def copy() -> None:
        for batch in batches:
            batch.launch(ends.gpu, ends.gpu.stream)

    return row_of(name, ends.rates(copy), "GB/s", limits)


@dataclass(frozen=True)
class Batch:
    """Pieces of one call: addresses of the driver's type, and how their sources are read."""

    to: list[Any]
    source: list[Any]
    piece: int
    attributes: Any

    def launch(self, gpu: Gpu, stream: Any) -> None:
        """Into the stream."""
        count = len(self.to)
        given = (self.to, self.source, [self.piece] * count, count, [self.attributes], [0], 1, stream)
        gpu.ask("cuMemcpyBatchAsync", *given)


def batches_of(ends: Ends, way: str, piece: int, *, permutation: int = 8) -> list[Batch]:
    """All pieces of the memory, each to another place; from the host sources may be read at any time, from the GPU in the order of the stream."""
    cuda = ends.gpu.cuda
    attributes = cuda.CUmemcpyAttributes()
    order = "ANY" if way == "h2d" else "STREAM"
    attributes.srcAccessOrder = getattr(cuda.CUmemcpySrcAccessOrder, f"CU_MEMCPY_SRC_ACCESS_ORDER_{order}")
    to, source = _sides(ends, way)
    count = ends.device.nbytes // piece
    rng = np.random.default_rng(permutation)
    places = [[cuda.CUdeviceptr(base + int(i) * piece) for i in rng.permutation(count)] for base in (to, source)]
    each = -(-count // BATCHES)
    cuts = [slice(first, first + each) for first in range(0, count, each)]
    return [Batch(places[0][cut], places[1][cut], piece, attributes) for cut in cuts]


def _gathered(bench: Bench, ends: Ends, name: str, limits: list[float]) -> Result:
    """Pieces of 16 KiB by the kernel that copies pages."""
    if not bench.has_time(2):
        return Left(name, "no time was left")
    gpu, piece = ends.gpu, PIECES["16k"]
    shape = (ends.device.nbytes // piece, 1, 1, 1, 1, piece)
    with gpu.room() as room:
        ids = [room.of(np.random.default_rng(i).permutation(shape[0]).astype(np.int32)) for i in range(2)]
        device = DeviceArray(ends.device.address, shape, np.uint8)
        sides = [Place(device, ids[0]), Place(ends.memory.bytes.reshape(shape), ids[1], is_mapped=True)]
        to, source = sides if name[:3] == "h2d" else sides[::-1]
        rates = ends.rates(lambda: copy_pages(gpu.kernels, source, to, blocks=GATHER_BLOCKS))
    return row_of(name, rates, "GB/s", limits, f"{GATHER_BLOCKS} blocks")


def _both_ways(bench: Bench, ends: Ends, one_way: list[float]) -> Result:
    """One half of the memory each way, at the same time, on two streams."""
    if not bench.has_time(2):
        return Left("both_ways", "no time was left")
    gpu, half = ends.gpu, ends.device.nbytes // 2
    other, first, last = gpu.ask("cuStreamCreate", 1), gpu.ask("cuEventCreate", 2), gpu.ask("cuEventCreate", 2)
    halves = [
        Ends(gpu, host.HostMemory(ends.memory.bytes[i * half :][:half]), ends.device.part(i * half, half), 1)
        for i in (0, 1)
    ]
    down, up = batches_of(halves[0], "h2d", PIECES["2m"]), batches_of(halves[1], "d2h", PIECES["2m"])

    def copy() -> None:
        gpu.ask("cuEventRecord", first, gpu.stream)
        gpu.ask("cuStreamWaitEvent", other, first, 0)
        for batch in up:
            batch.launch(gpu, other)
        for batch in down:
            batch.launch(gpu, gpu.stream)
        gpu.ask("cuEventRecord", last, other)
        gpu.ask("cuStreamWaitEvent", gpu.stream, last, 0)

    return row_of("both_ways", ends.rates(copy), "GB/s", [sum(one_way) / len(one_way)])


def _bytes(ends: Ends) -> Check:
    """There in one permutation, and back in the same: all is where it was, and had been elsewhere between."""
    gpu, piece = ends.gpu, PIECES["256k"]
    want = ends.memory.bytes.copy()
    for way in ("h2d", "d2h"):
        for batch in batches_of(ends, way, piece):
            batch.launch(gpu, gpu.stream)
        gpu.finish()
        if way == "h2d":
            ends.memory.bytes[:] = 0
    rng = np.random.default_rng(8)
    there, source = (rng.permutation(len(want) // piece) for _ in range(2))
    pieces, on_device = want.reshape(-1, piece), np.empty_like(want).reshape(-1, piece)
    on_device[there] = pieces[source]
    back = np.empty_like(on_device)
    back[there] = on_device[source]
    is_right = bool((ends.memory.bytes == back.reshape(-1)).all())
    return Check("batch_bytes", is_right, "all bytes arrived" if is_right else "bytes differ")
