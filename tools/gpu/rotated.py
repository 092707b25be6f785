"""Pages of rotated codes: results against the codecs and float64, and rates.

Attention is measured against a kernel that only reads as many bytes; encoding and decoding against
copies. The GPU process stores and loads blocks of 2 MiB as codes; its rate is of their plain bytes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import numpy as np

from tests.unit.kernels.kernel_cases import Shape
from tests.unit.kernels.rot_cases import (
    BLOCKS,
    CODED,
    ODD_BLOCKS,
    RAGGED,
    Blocks,
    Coded,
    check_blocks,
    check_coded,
    check_odd_blocks,
    decoded_values,
    payload_of,
)
from tierd.codecs.values import KVShape, bytes_of, raw_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.gpu.process import GpuProcess
from tierd.gpu.protocol import PIECE, Coding
from tierd.kernels import Attended
from tierd.kernels.coded import BITS, ROTATED_DIMS, BlockShape, CodedPages, bits_of, decode_pages, encode_pages
from tierd.kernels.coded import tile_bytes as bytes_of_tile
from tierd.kernels.loaded import FATBINS_FOLDER
from tierd.kernels.paged import DeviceBatch, PagedDecode, decode_blocks
from tools.gpu import host
from tools.gpu.bench import Bench
from tools.gpu.device import BF16, DeviceArray, Gpu, Room
from tools.gpu.families import family
from tools.gpu.limits import copy_rates, read_rates
from tools.gpu.process import BLOCK_BYTES, GIGA, HOST, LAYERS, PATIENCE_S, SLAB
from tools.gpu.results import Check, Left, Result, row_of
from tools.gpu.shapes import MODELS, PAGE_TOKENS

Array = np.ndarray[Any, Any]
ROUNDS = 7
SIZES = {"1x128k": (1, 131072), "32x4k": (32, 4096)}
CODEC = "rot-4-4"


def results(bench: Bench) -> Iterator[Result]:
    """Checks, then rates of the kernels, then the GPU process."""
    gpu = bench.gpu()
    yield from _checks(bench, gpu)
    for codec, size in product(sorted(BITS), SIZES):
        name = f"decode_{bits_of(codec).kind}_{size}"
        with gpu.room() as room:
            yield _decode(bench, gpu, room, codec, name) if bench.has_time(1) else Left(name, "no time was left")
    with gpu.room() as room:
        yield from _pages(bench, gpu, room)
    with ExitStack() as stack:
        length = bench.pick(512 << 20, 4 * BLOCK_BYTES)
        descriptor = host.made(length)
        stack.callback(os.close, descriptor)
        yield from asyncio.run(_process(bench, descriptor, length))


def _checks(bench: Bench, gpu: Gpu) -> Iterator[Result]:
    all_blocks = [Blocks(*kind, tokens=33) for kind in product(sorted(BITS), ROTATED_DIMS)]
    blocks = (*BLOCKS, *bench.pick(all_blocks, []))
    cases = [*((check_blocks, each) for each in blocks), *((check_odd_blocks, number) for number in ODD_BLOCKS)]
    yield family(bench, gpu.kernels, "rot_blocks", cases)
    kinds = product(sorted(BITS), ROTATED_DIMS, ("bf16", "f16"))
    every = [Coded(Shape(RAGGED, (kind, kind), dim), codec) for codec, dim, kind in kinds]
    long = Coded(Shape(((1, 20_000), (1, 0), (1, 7_777)), head_dim=128, spread=0.5), CODEC, uneven=2.0, blocks=300)
    chosen = bench.pick([*CODED, *every, long], list(CODED[:2]))
    yield family(bench, gpu.kernels, "rot_attention", [(check_coded, each) for each in chosen])


def _decode(bench: Bench, gpu: Gpu, room: Room, codec: str, name: str) -> Result:
    """Llama-3-8B; the codes are random, the scales alike."""
    requests, length = bench.pick(SIZES[name.rpartition("_")[2]], (2, 40))
    model, rng = MODELS["8b"], np.random.default_rng(3)
    size, each = bytes_of_tile(codec, model.head_dim), -(-length // PAGE_TOKENS)
    pages = bench.pick(max(requests * each, (1 << 30) // (model.kv_heads * size)), 2 * requests * each)
    tiles = room.array((pages, model.kv_heads, 1, size), np.uint8)
    pattern = rng.integers(0, 256, (61, size), np.uint8)
    pattern[:, -4 * PAGE_TOKENS :] = np.full(2 * PAGE_TOKENS, 0.01, np.float16).view(np.uint8)
    gpu.repeat(tiles, pattern)
    shape = model.decode(requests)
    fitting = decode_blocks(gpu.kernels, shape, q_type="bf16", kv_type=bits_of(codec).kind)
    blocks = bench.pick(fitting, 3)
    decode = PagedDecode(gpu.kernels, shape, blocks=blocks, allocate=room.array)
    q = room.of(rng.standard_normal((requests, model.q_heads, model.head_dim), np.float32).astype(BF16))
    ids = rng.permutation(pages).astype(np.int32)
    count = max(1, min(8, pages // (requests * each)))
    tables = [room.of(ids[i * requests * each :][: requests * each].reshape(requests, each)) for i in range(count)]
    lens = room.of(np.full(requests, length, np.int32))
    to = Attended(room.array(q.shape, BF16), room.array(q.shape[:2], np.float32))
    works = [lambda at=at: decode(q, CodedPages(tiles, codec), DeviceBatch(lens, at), to) for at in tables]
    seconds = gpu.times(works, rounds=bench.pick(ROUNDS, 1))
    read = requests * each * model.kv_heads * size
    limits = read_rates(gpu, room, tiles, read)
    note = f"{1e6 * min(seconds):.1f} us at best"
    return row_of(name, [read / each / GIGA for each in seconds], "GB/s", [sum(limits) / len(limits) / GIGA], note)


def _pages(bench: Bench, gpu: Gpu, room: Room) -> Iterator[Result]:
    """Blocks of 2 MiB, read and written."""
    count, shape = bench.pick(256, 1), _shape(bench)
    plain, coded = (room.array((count, n), np.uint8) for n in (shape.plain_bytes, shape.coded_bytes))
    gpu.repeat(plain, np.random.default_rng(4).standard_normal(1 << 20, np.float32).astype(BF16))
    limits = [rate / GIGA for rate in copy_rates(gpu, plain, plain.nbytes)]
    places, codes = (room.of(_places(each)) for each in (plain, coded))
    found = room.of(np.zeros((count, 2), np.float32))
    works = {
        "rot_encode": lambda: encode_pages(gpu.kernels, shape, plain=places, coded=codes, found=found),
        "rot_decode": lambda: decode_pages(gpu.kernels, shape, coded=codes, plain=places),
    }
    for name, work in works.items():
        seconds = gpu.times([work], rounds=bench.pick(ROUNDS, 1))
        yield row_of(name, [(plain.nbytes + coded.nbytes) / each / GIGA for each in seconds], "GB/s", limits)


def _shape(bench: Bench) -> BlockShape:
    """Of a block of Llama-3-8B: 2 MiB."""
    model = MODELS["8b"]
    return BlockShape(CODEC, bench.pick(LAYERS, 1), model.kv_heads, PAGE_TOKENS, model.head_dim, "bf16")


def _places(rooms: DeviceArray) -> Array:
    return rooms.address + np.arange(rooms.shape[0], dtype=np.uint64) * np.uint64(rooms.strides[0])


async def _process(bench: Bench, descriptor: int, length_bytes: int) -> list[Result]:
    """Equal blocks of normal values. They go out as codes and back several times, and their bytes are
    compared with the codec's after the first."""
    count, rng, shape = length_bytes // BLOCK_BYTES // 2, np.random.default_rng(5), _shape(bench)
    size, coded = shape.plain_bytes, shape.coded_bytes
    memory = host.mapped(descriptor, length_bytes).bytes.reshape(2, count, BLOCK_BYTES)
    block = rng.standard_normal(size // 2, np.float32).astype(BF16)
    memory[0, :, :size] = block.view(np.uint8)
    pieces = np.zeros(count, PIECE)
    pieces["slab"], pieces["host"], pieces["length"], pieces["layers"] = SLAB, HOST, size, shape.layers
    pieces["slab_offset"] = BLOCK_BYTES * rng.permutation(count)
    pieces["host_offset"] = BLOCK_BYTES * np.arange(count)
    behind = pieces.copy()
    behind["host_offset"] += np.uint64(count * BLOCK_BYTES)
    sizes = (shape.layers, shape.kv_heads, shape.tokens, shape.head_dim)
    how = Coding(CODEC, 1, *sizes, "bfloat16", "NHD")
    payload, decoded = _expected(block, shape)
    os.environ[FATBINS_FOLDER] = str(bench.fatbins)  # for its process
    process = GpuProcess(0, patience_s=PATIENCE_S, on_death=lambda _: None)
    await process.start()
    seconds: dict[str, list[float]] = {"process_store_coded": [], "process_load_coded": []}
    wrong = set[str]()
    try:
        os.close(await process.make(SLAB, count * BLOCK_BYTES))
        await process.attach(HOST, descriptor, length_bytes)
        await process.load(pieces)
        for number in range(bench.pick(ROUNDS, 1)):
            begun = time.perf_counter()
            stored = await process.store_coded(behind, how)
            middle = time.perf_counter()
            arrived = await process.load_coded(behind, how)
            for name, taken in zip(seconds, (middle - begun, time.perf_counter() - middle), strict=True):
                seconds[name].append(taken)
            if not all(np.array_equal(*pair) for pair in zip(stored.tables, arrived, strict=True)):
                wrong.add("slice tables differ")
            if number == 0:
                await process.store(pieces)
                wrong |= {"payloads differ"} if (memory[1, :, :coded] != payload).any() else set()
                wrong |= {"blocks differ"} if (memory[0, :, :size] != decoded).any() else set()
    finally:
        await process.stop()
    said = "; ".join(sorted(wrong)) or f"{count} payloads and blocks are the codec's"
    moved = count * size / GIGA
    rates = [row_of(name, [moved / each for each in some], "GB/s of blocks", []) for name, some in seconds.items()]
    return [Check("process_coded", passed=not wrong, said=said), *rates]


def _expected(block: Array, shape: BlockShape) -> tuple[Array, Array]:
    """The payload of a block in NHD, and the block that it decodes to, u8."""
    kv = KVShape(KVGeometry(shape.layers, shape.kv_heads, shape.head_dim, "bfloat16", "NHD"), shape.tokens)
    payload, _ = payload_of(raw_of(block, kv), kv, CODEC)
    return payload, bytes_of(rounded(decoded_values(payload, kv, CODEC), "bfloat16"), kv)
