"""Decode in the shapes of Llama-3 against a kernel that only reads as many bytes; cost of page
masses.

Invariants: a launch reads 256 MB or more of keys and values, from other pages than the launch
before. Its limit is measured within the same minute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from tools.gpu.bench import Bench
from tools.gpu.device import BF16, Gpu, Room
from tools.gpu.limits import copy_rates, find_datasheet, read_rates
from tools.gpu.results import Check, Left, Result, Row, row_of
from tools.gpu.shapes import MODELS, PAGE_TOKENS, Decode, Model, Place, Pool

POOL_BYTES = 4 << 30
LAYERS = 32
ROUNDS = 9
SAMPLES = 4
"""Sequences and kv heads of an output that are compared with float64."""
GIGA = 1e9


def lengths(bench: Bench) -> dict[str, list[int]]:
    """Tokens of each request, by the names of `forecasts.DECODE_SIZES`."""
    if bench.is_small:
        return {"1x128k": [50], "4x32k": [20, 20], "16x8k": [9] * 3, "17x8k": [5] * 4, "32x4k": [16] * 2, "128x2k": [3] * 5, "ragged": [1, 40]}  # fmt: skip
    ragged = np.exp(np.random.default_rng(7).uniform(np.log(256), np.log(65536), 32)).astype(int)
    sizes = {"1x128k": (1, 131072), "4x32k": (4, 32768), "16x8k": (16, 8192), "17x8k": (17, 8192), "32x4k": (32, 4096), "128x2k": (128, 2048)}  # fmt: skip
    return {name: [length] * n for name, (n, length) in sizes.items()} | {"ragged": ragged.tolist()}


def results(bench: Bench) -> Iterator[Result]:
    """Bandwidths, then decodes, then masses."""
    gpu = bench.gpu()
    samples = list[str]()
    with gpu.room() as room:
        pool = Pool(gpu, MODELS["8b"], _pages(bench, POOL_BYTES), Place(room))
        yield from _bandwidths(gpu, room, pool)
        for name, lens in lengths(bench).items():
            limits = read_rates(gpu, room, pool.memory, pool.bytes_of(sum(lens)))
            for model in ("8b", "70b"):
                yield from _decode(
                    bench, gpu, pool, lens, Asked(f"decode_{model}_{name}", MODELS[model], limits, samples)
                )
        for name in ("1x128k", "128x2k"):
            yield _mass(bench, gpu, pool, lengths(bench)[name], f"mass_{name}")
    yield from _of_one_head(bench, gpu, samples)
    yield from _in_e4m3(bench, gpu, samples)
    yield from _in_blocks(bench, gpu, samples)
    wrong = [said for said in samples if said.startswith("wrong")]
    yield Check("decode_right", not wrong and bool(samples), "; ".join(wrong) or f"{len(samples)} samples")


class Asked:
    """A row: its name, its model, the limit in bytes a second, and the list that collects samples."""

    def __init__(self, name: str, model: Model, limits: Sequence[float], samples: list[str]) -> None:
        self.name, self.model, self.limits, self.samples = name, model, list(limits), samples


def _pages(bench: Bench, length_bytes: int) -> int:
    return bench.pick(length_bytes // (2 * 8 * PAGE_TOKENS * 128 * BF16.itemsize), 64)


def _bandwidths(gpu: Gpu, room: Room, pool: Pool) -> Iterator[Result]:
    datasheet = find_datasheet(gpu)
    limits = [datasheet / GIGA] if datasheet else []
    note = "" if datasheet else "the driver does not tell clock and width"
    read = [rate / GIGA for rate in read_rates(gpu, room, pool.memory, pool.memory.nbytes // 2)]
    yield row_of("read_bandwidth", read, "GB/s", limits, note)
    copied = [rate / GIGA for rate in copy_rates(gpu, pool.memory, pool.memory.nbytes // 2)]
    yield row_of("copy_bandwidth", copied, "GB/s", limits, note)
    gpu.repeat(pool.memory, pool.pattern)  # a copy may have shifted its pages


def _decode(bench: Bench, gpu: Gpu, pool: Pool, lens: list[int], asked: Asked) -> Iterator[Result]:
    """A row, unless there is no time. It appends samples of its numbers to the list."""
    if not bench.has_time():
        yield Left(asked.name, "no time was left")
        return
    with gpu.room() as room:
        decode = Decode(gpu, room, pool, lens, q_heads=asked.model.q_heads)
        seconds = gpu.times(decode.runs(most=bench.pick(8, 1)), rounds=bench.pick(ROUNDS, 1))
        rates = [decode.kv_bytes / each / GIGA for each in seconds]
        limits = [sum(asked.limits) / len(asked.limits) / GIGA]
        yield row_of(asked.name, rates, "GB/s", limits, f"{1e6 * min(seconds):.1f} us at best")
        decode.launch()
        asked.samples.append(_sample(asked.name, decode, lens, pool.model.kv_heads))


def _sample(name: str, decode: Decode, lens: list[int], kv_heads: int) -> str:
    rng = np.random.default_rng(len(name))
    rows = [(int(rng.integers(len(lens))), int(rng.integers(kv_heads))) for _ in range(SAMPLES)]
    found = decode.distances(rows)
    return f"{'right' if found.are_right else 'wrong'}: {name}: {found}"


def _mass(bench: Bench, gpu: Gpu, pool: Pool, lens: list[int], name: str) -> Row:
    """Time with page masses over that without."""
    with gpu.room() as room:
        both = [
            gpu.times(
                Decode(gpu, room, pool, lens, q_heads=pool.model.q_heads, with_mass=with_mass).runs(
                    most=bench.pick(8, 1)
                ),
                rounds=bench.pick(ROUNDS, 1),
            )
            for with_mass in (True, False)
        ]
        return row_of(name, [1e6 * each for each in both[0]], "us", [1e6 * each for each in both[1]])


def _of_one_head(bench: Bench, gpu: Gpu, samples: list[str]) -> Iterator[Result]:
    """All blocks share one row."""
    with gpu.room() as room:
        model = MODELS["70b/8"]
        pool = Pool(gpu, model, _pages(bench, POOL_BYTES // 2), Place(room))
        lens = lengths(bench)["1x128k"]
        limits = read_rates(gpu, room, pool.memory, pool.bytes_of(sum(lens)))
        yield from _decode(bench, gpu, pool, lens, Asked("decode_one_head", model, limits, samples))


def _in_e4m3(bench: Bench, gpu: Gpu, samples: list[str]) -> Iterator[Result]:
    """Half the bytes for as much arithmetic."""
    with gpu.room() as room:
        model = MODELS["70b"]
        pool = Pool(gpu, model, _pages(bench, POOL_BYTES), Place(room), dtype=ml_dtypes.float8_e4m3fn)
        lens = bench.pick([8192] * 32, [20] * 2)
        limits = read_rates(gpu, room, pool.memory, pool.bytes_of(sum(lens)))
        yield from _decode(bench, gpu, pool, lens, Asked("decode_e4m3", model, limits, samples))


def _in_blocks(bench: Bench, gpu: Gpu, samples: list[str]) -> Iterator[Result]:
    """Pages as the device tier has them: one layer of each block, 2 MiB apart."""
    name = "decode_whole_blocks"
    free, _ = gpu.ask("cuMemGetInfo")
    lens = bench.pick([4096] * 32, [20] * 2)
    pages = bench.pick(sum(lens) // PAGE_TOKENS * 2, 8)
    if bench.pick(pages << 21, 0) > 0.8 * free:
        yield Left(name, f"the GPU has {free} bytes free, {pages << 21} are needed")
        return
    with gpu.room() as room:
        model = MODELS["8b"]
        pool = Pool(gpu, model, pages, Place(room, layers=bench.pick(LAYERS, 2)))
        limits = read_rates(gpu, room, pool.memory, pool.bytes_of(sum(lens)))
        yield from _decode(bench, gpu, pool, lens, Asked(name, model, limits, samples))
