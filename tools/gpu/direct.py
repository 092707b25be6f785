"""Checks whether a disk read reaches a slab without a detour over host memory, and its rate.

As a daemon does, it makes one read and compares cuFile's counters. Purpose: `results`. Non-purpose:
that comparison (`tierd.gpu.probe`). Invariants: both ways read the same file past the page cache
into the same slab, in turns. Every block is right. TIERD_DIRECT_FOLDER: the folder of the file, to
test a disk other than this checkout's.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tierd.checksum import slice_sums
from tierd.core.formats.block import slice_lengths
from tierd.errors import TierdError, Unsupported
from tierd.gpu.probe_file import probe_file
from tierd.gpu.process import GpuProcess
from tierd.gpu.protocol import PIECE, READ, SliceTable
from tools.gpu.bench import ROOT, Bench
from tools.gpu.results import Check, Fact, Left, Result, row_of

BLOCK_BYTES, LAYERS = 2 << 20, 16
BLOCKS, ROUNDS, THREADS = 64, 3, 16
SLAB, HOST, FILE = 1, 2, 3
PATIENCE_S = 10.0
GIGA = 1e9
RATES = ("direct_rate", "kvikio_rate")


def results(bench: Bench) -> Iterator[Result]:
    """A fact and, if the read is direct, a figure for each library."""
    folder = Path(os.environ.get("TIERD_DIRECT_FOLDER", ROOT / "build"))
    folder.mkdir(parents=True, exist_ok=True)
    yield from asyncio.run(_life(folder, bench.pick(BLOCKS, 2), bench.pick(ROUNDS, 1)))


async def _life(folder: Path, blocks: int, rounds: int) -> list[Result]:
    gpu, other = (GpuProcess(0, patience_s=PATIENCE_S, on_death=lambda _: None) for _ in range(2))
    await gpu.start()
    try:
        with probe_file(folder) as descriptor:
            fact = Fact("direct_read", f"direct, by {await gpu.probe(descriptor)}; a file in {folder.name}")
            left = await _left_out(other, descriptor)
        with ExitStack() as ends:
            rates = await _rates([gpu, other][: 1 + (not left)], _sides(folder, blocks, ends), rounds)
        return [fact, *rates, *left]
    except (Unsupported, OSError) as error:
        said = f"a detour: {error}; a file in {folder.name}"
        return [Fact("direct_read", said), *(Left(name, "reads are not direct") for name in RATES)]
    finally:
        await gpu.stop()


async def _left_out(other: GpuProcess, descriptor: int) -> list[Result]:
    """Starts a process that reads by kvikio; why not, if it cannot."""
    if find_spec("kvikio") is None:
        return [Left("kvikio_rate", "kvikio is not installed")]
    await other.start()
    try:
        await other.probe(descriptor, "kvikio")
    except TierdError as error:
        await other.stop()
        return [Left("kvikio_rate", str(error))]
    return []


@dataclass(frozen=True, slots=True)
class Sides:
    """A file of blocks, and host memory: descriptors. memory: mapped; want: the blocks' sums."""

    file: int
    host: int
    memory: memoryview
    want: list[SliceTable]

    @property
    def starts(self) -> range:
        """The blocks' offsets."""
        return range(0, len(self.memory), BLOCK_BYTES)


def _sides(folder: Path, blocks: int, ends: ExitStack) -> Sides:
    length = blocks * BLOCK_BYTES
    host = os.memfd_create("direct")
    ends.callback(os.close, host)
    os.ftruncate(host, length)
    memory = memoryview(mmap.mmap(host, length))
    np.frombuffer(memory, np.uint64)[:] = np.random.default_rng(7).integers(0, 1 << 63, length // 8)
    file = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
    ends.callback(os.close, file)
    sides = Sides(file, host, memory, [])
    for at in sides.starts:
        os.pwrite(file, memory[at : at + BLOCK_BYTES], at)
        sides.want.append(slice_sums(memory[at : at + BLOCK_BYTES], slice_lengths(BLOCK_BYTES, LAYERS)))
    os.fsync(file)
    return sides


async def _rates(processes: list[GpuProcess], sides: Sides, rounds: int) -> list[Result]:
    """Directly, by kvikio if there are two processes, and by way of host memory, in turns."""
    length, gpu = len(sides.memory), processes[0]
    for each in processes:
        os.close(await each.make(SLAB, length))
        await each.open_file(FILE, sides.file)
    await gpu.attach(HOST, sides.host, length)
    reads, pieces = np.zeros(len(sides.want), READ), np.zeros(len(sides.want), PIECE)
    for each in (reads, pieces):
        each["slab"], each["length"], each["layers"], each["slab_offset"] = SLAB, BLOCK_BYTES, LAYERS, sides.starts
    reads["file"], reads["room"], reads["file_offset"] = FILE, BLOCK_BYTES, sides.starts
    pieces["host"], pieces["host_offset"] = HOST, sides.starts
    rates: dict[str, list[float]] = {name: [] for name in (*RATES[: len(processes)], "host")}
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(rounds + 1):  # the first one registers the memory
            for name, process in zip(RATES, processes, strict=False):
                begun = time.perf_counter()
                tables, faults = await process.read(reads)
                rates[name].append(length / (time.perf_counter() - begun) / GIGA)
                if faults or not _are_right(tables, sides.want):
                    return [Check(name, False, f"blocks differ, or have not come: {list(faults.values())[:1]}")]
            begun = time.perf_counter()
            await asyncio.to_thread(_read, threads, sides)
            tables = await gpu.load(pieces)
            rates["host"].append(length / (time.perf_counter() - begun) / GIGA)
            if not _are_right(tables, sides.want):
                raise TierdError("blocks that came by way of host memory differ")
    for each in processes[1:]:
        await each.stop()
    limits = {"direct_rate": ("host", "by way of host memory"), "kvikio_rate": ("direct_rate", "by tierd's bindings")}
    return [
        row_of(name, rates[name][1:], "GB/s", rates[limits[name][0]][1:], f"limit: {limits[name][1]}")
        for name in RATES[: len(processes)]
    ]


def _read(threads: ThreadPoolExecutor, sides: Sides) -> None:
    """Reads the file into host memory, as a store's lanes do."""
    parts = [(sides.memory[at : at + BLOCK_BYTES], at) for at in sides.starts]
    list(threads.map(lambda part: os.preadv(sides.file, [part[0]], part[1]), parts))


def _are_right(tables: list[SliceTable], want: list[SliceTable]) -> bool:
    return all(np.array_equal(table, right) for table, right in zip(tables, want, strict=True))
