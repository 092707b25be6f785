"""Stores, copies between layouts, bounds of keys, checksums and the benchmarks' reads on the GPU,
bit-exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.unit.kernels.page_cases import (
    COPIES,
    LAYOUTS,
    RUNS,
    STORES,
    SUMMARIES,
    Copy,
    Memory,
    Store,
    Summary,
    assert_same_bytes,
    check_copy,
    check_runs,
    check_store,
    check_summary,
)
from tests.unit.kernels.sum_cases import SUMS, Spans, check_sums
from tierd.kernels.pages import Place, copy_pages
from tools.gpu import host
from tools.gpu.bench import Bench
from tools.gpu.decodes import TYPES
from tools.gpu.device import DeviceArray, Gpu
from tools.gpu.families import Case, family
from tools.gpu.results import Result
from tools.gpu.shapes import Reader

KINDS = ("bf16", "f16", "e4m3")


def results(bench: Bench) -> Iterator[Result]:
    """A check for each family."""
    gpu = bench.gpu()
    for name, cases in (_small() if bench.is_small else _full()).items():
        yield family(bench, gpu.kernels, name, cases)
    yield family(bench, gpu, "copy_mapped", [(check_mapped, to_host) for to_host in (True, False)])
    yield family(
        bench, gpu, "read", [(check_read, count) for count in bench.pick((1, 1 << 20, (1 << 20) + 77), (5, 5000))]
    )


def _full() -> dict[str, list[Case]]:
    return {
        "store": [
            *((check_store, Store(types=types, is_hnd=is_hnd)) for types in TYPES for is_hnd in (False, True)),
            *((check_store, Store(n, page_tokens=64, heads=8, dim=96)) for n in (0, 1, 2, 100, 3000)),
        ],
        "copy": [
            *((check_copy, Copy(source, target)) for source in LAYOUTS for target in LAYOUTS),
            *((check_copy, Copy("pages-hnd", "layers-nhd", kind=kind)) for kind in (*KINDS, "f32")),
            *((check_copy, Copy("pages-nhd", "layers-hnd", blocks=blocks)) for blocks in (1, 7, 1000)),
            *((check_runs, runs) for runs in RUNS),
        ],
        "summary": [
            (check_summary, Summary(kind=kind, dim=dim, is_hnd=is_hnd))
            for kind in KINDS
            for dim in (64, 256)
            for is_hnd in (False, True)
        ],
        "sums": [(check_sums, spans) for spans in (*SUMS, Spans((1 << 18, (1 << 18) - 1, 1 << 16) * 20, (0, 8)))],
    }


def _small() -> dict[str, list[Case]]:
    return {
        "store": [(check_store, shape) for shape in STORES],
        "copy": [*((check_copy, shape) for shape in COPIES), *((check_runs, runs) for runs in RUNS)],
        "summary": [(check_summary, shape) for shape in SUMMARIES],
        "sums": [(check_sums, spans) for spans in SUMS],
    }


def check_mapped(gpu: Gpu, to_host: bool) -> None:  # noqa: FBT001 -- what a case is given
    """A kernel copies pages between the GPU's memory and registered host memory, and changes
    nothing else."""
    ours, theirs = Memory("pages-hnd", "bf16"), Memory("layers-nhd", "bf16")
    ours.fill(np.random.default_rng(5))
    with gpu.room() as room, host.pinned(gpu, theirs.lies[0].nbytes) as memory:
        shape = theirs.lies[0].shape
        mapped = memory.bytes.view(theirs.lies[0].dtype).reshape(shape)
        there = mapped.transpose([*map("lcpthd".index, "plcthd")])
        here = room.of(ours.lies[0]).axes(*map("plchtd".index, "plcthd"))
        if not to_host:
            there.view(np.uint16)[:] = ours.views[0].view(np.uint16)
            gpu.write(DeviceArray(here.address, ours.lies[0].shape, here.dtype), np.zeros_like(ours.lies[0]))
        sides: list[Any] = [Place(here), Place(there, is_mapped=True)]
        copy_pages(gpu.kernels, *(sides if to_host else sides[::-1]))
        got = gpu.read_back(DeviceArray(here.address, ours.lies[0].shape, here.dtype))
        assert_same_bytes(got, ours.lies[0], "the GPU's side")
        assert_same_bytes(np.ascontiguousarray(there), np.ascontiguousarray(ours.views[0]), "the host's side")


def check_read(gpu: Gpu, pieces: int) -> None:
    """The exclusive or of all words."""
    words = np.random.default_rng(pieces).integers(0, 1 << 32, 4 * pieces, dtype=np.uint32)
    with gpu.room() as room:
        reader, memory = Reader(gpu, room), room.of(words)
        gpu.ask("cuMemsetD8Async", reader.sums.address, 0, reader.sums.nbytes, gpu.stream)
        reader.launch(memory.address, memory.nbytes)
        got = np.bitwise_xor.reduce(gpu.read_back(reader.sums).reshape(-1))
        assert got == np.bitwise_xor.reduce(words), f"{pieces} pieces: {got:#x}"
