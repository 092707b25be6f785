"""Copies in pieces between host memory and the GPU, against one copy of as many bytes. The driver's
batches make them, or a kernel on mapped memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.gpu.runs import Runs, coalesced
from tierd.kernels.pages import Place, copy_pages, copy_runs
from tools.gpu import host
from tools.gpu.bench import Bench
from tools.gpu.device import DeviceArray, Gpu, Room
from tools.gpu.results import Check, Left, Result, row_of

GIGA = 1e9
ROUNDS = 5
PIECES = {"2m": 2 << 20, "256k": 256 << 10, "64k": 64 << 10, "16k": 16 << 10}
BATCHES = 8
"""Batches of one copy: a link does not depend on their number, and no call gets too many pieces."""
GATHER_BLOCKS = 64
ADJOINING = 16
"""Small pieces that are adjacent on both sides, as blocks of one sequence may be."""


@dataclass
class Ends:
    """Host memory and the GPU's, equally long."""

    gpu: Gpu
    memory: host.HostMemory
    device: DeviceArray
    rounds: int

    def rates(self, work: Callable[[], None]) -> list[float]:
        """GB a second of work that copies all of it."""
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
            yield _joined(bench, ends, f"{way}_joined_16k", limits)
            yield _gathered(bench, ends, f"{way}_gather_16k", limits)
            yield _told_runs(bench, ends, f"{way}_runs_16k", limits)
        yield _both_ways(bench, ends, one_way)
        yield _bytes(ends, "batch_bytes", PIECES["256k"], _batch_all)
        yield _bytes(ends, "runs_bytes", PIECES["16k"], _run_all)


def _whole(ends: Ends, way: str) -> None:
    to, source = _sides(ends, way)
    ends.gpu.ask("cuMemcpyAsync", to, source, ends.device.nbytes, ends.gpu.stream)


def _sides(ends: Ends, way: str) -> tuple[int, int]:
    """The target's and the source's address."""
    both = ends.device.address, ends.memory.address
    return both if way == "h2d" else both[::-1]


def _batched(bench: Bench, ends: Ends, name: str, piece: int, limits: list[float]) -> Result:
    if not bench.has_time(2):
        return Left(name, "no time was left")
    return row_of(name, _batch_rates(ends, batches_of(ends, name[:3], piece)), "GB/s", limits)


def _joined(bench: Bench, ends: Ends, name: str, limits: list[float]) -> Result:
    """Pieces of 16 KiB of which some adjoin: the GPU process copies adjacent ones at once."""
    if not bench.has_time(2):
        return Left(name, "no time was left")
    piece = PIECES["16k"]
    steps = np.arange(ADJOINING, dtype=np.uint64) * np.uint64(piece)
    to, source = (np.add.outer(each, steps).ravel() for each in _places(ends, name[:3], ADJOINING * piece))
    order = np.random.default_rng(4).permutation(len(to))
    given = Runs(to[order], source[order], np.full(len(to), piece, np.uint64))
    runs = coalesced(given, np.zeros(len(to), np.uint64))
    batches = _cut(ends, name[:3], runs.targets, runs.sources, int(runs.lengths[0]))
    note = f"{len(to)} pieces in {len(runs.targets)} copies"
    return row_of(name, _batch_rates(ends, batches), "GB/s", limits, note)


def _batch_rates(ends: Ends, batches: list[Batch]) -> list[float]:
    def copy() -> None:
        for batch in batches:
            batch.launch(ends.gpu, ends.gpu.stream)

    return ends.rates(copy)


@dataclass(frozen=True)
class Batch:
    """Pieces of one call: addresses of the driver's type, and the access order of their sources."""

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
    """All pieces of the memory, each to another place."""
    return _cut(ends, way, *_places(ends, way, piece, permutation=permutation), piece)


def _places(ends: Ends, way: str, piece: int, *, permutation: int = 8) -> list[NDArray[np.uint64]]:
    """Addresses of all pieces of the memory: targets, and sources."""
    count, rng = ends.device.nbytes // piece, np.random.default_rng(permutation)
    return [(base + piece * rng.permutation(count)).astype(np.uint64) for base in _sides(ends, way)]


def _cut(ends: Ends, way: str, targets: NDArray[np.uint64], sources: NDArray[np.uint64], piece: int) -> list[Batch]:
    """Copies in batches. Host sources may be read at any time, the GPU's in the stream's order."""
    cuda = ends.gpu.cuda
    attributes = cuda.CUmemcpyAttributes()
    order = "ANY" if way == "h2d" else "STREAM"
    attributes.srcAccessOrder = getattr(cuda.CUmemcpySrcAccessOrder, f"CU_MEMCPY_SRC_ACCESS_ORDER_{order}")
    places = [[cuda.CUdeviceptr(place) for place in side.tolist()] for side in (targets, sources)]
    each = -(-len(targets) // BATCHES)
    cuts = [slice(first, first + each) for first in range(0, len(targets), each)]
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


def _told_runs(bench: Bench, ends: Ends, name: str, limits: list[float]) -> Result:
    """The same by the GPU process's kernel for small pages, which gets their addresses."""
    if not bench.has_time(2):
        return Left(name, "no time was left")
    with ends.gpu.room() as room:
        tables = _run_tables(ends, room, name[:3])
        rates = ends.rates(lambda: copy_runs(ends.gpu.kernels, *tables[:2], lengths=tables[2]))
    return row_of(name, rates, "GB/s", limits)


def _run_tables(ends: Ends, room: Room, way: str) -> list[DeviceArray]:
    """Of all pieces of 16 KiB: targets, sources and lengths."""
    to, source = _places(ends, way, PIECES["16k"])
    return [room.of(column) for column in (to, source, np.full(len(to), PIECES["16k"], np.uint32))]


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


def _batch_all(ends: Ends, way: str) -> None:
    for batch in batches_of(ends, way, PIECES["256k"]):
        batch.launch(ends.gpu, ends.gpu.stream)
    ends.gpu.finish()


def _run_all(ends: Ends, way: str) -> None:
    with ends.gpu.room() as room:
        to, source, lengths = _run_tables(ends, room, way)
        copy_runs(ends.gpu.kernels, to, source, lengths=lengths)
        ends.gpu.finish()


def _bytes(ends: Ends, name: str, piece: int, copy: Callable[[Ends, str], None]) -> Check:
    """Copies there and back in the same permutations, and compares all bytes with expected ones."""
    want = ends.memory.bytes.copy()
    for way in ("h2d", "d2h"):
        copy(ends, way)
        if way == "h2d":
            ends.memory.bytes[:] = 0
    rng = np.random.default_rng(8)
    there, source = (rng.permutation(len(want) // piece) for _ in range(2))
    pieces, on_device = want.reshape(-1, piece), np.empty_like(want).reshape(-1, piece)
    on_device[there] = pieces[source]
    back = np.empty_like(on_device)
    back[there] = on_device[source]
    is_right = bool((ends.memory.bytes == back.reshape(-1)).all())
    return Check(name, is_right, "all bytes arrived" if is_right else "bytes differ")
