"""Codecs against memcpy: encoding and decoding of whole blocks, checksum included, by one thread.

    python -m tools.bench codecs

Rates are bytes of 16-bit values per second of processor time. memcpy of the same bytes takes turns
with each codec. Calls go by turns over different blocks, WORKING_SET bytes in all: more than a
core's own caches hold. They write to memory that exists, as many places as there are blocks. Values
are made: channels with offsets and scales of their own, and a few outliers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops
from tierd.codecs.block import HEADER, Codec, decode, encode
from tierd.codecs.named import ALL, BY_NUMBER
from tierd.codecs.values import Bytes, KVShape, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import Unsupported
from tools.bench.measure import MIB, Effort, Work, cpus, interleaved
from tools.bench.rows import Row, row_of

GIGA = 1e9
REPEATS = 3
"""Calls of a measured work: one is as short as the clock's own cost."""
WORKING_SET = 32 * MIB
"""Bytes of all blocks, and as many of the results' memory."""


class Case(NamedTuple):
    """A shape by name."""

    name: str
    shape: KVShape


CASES = (
    Case("6x2x64x256", KVShape(KVGeometry(6, 2, 64, "bfloat16", "NHD"), 256)),
    Case("32x8x128x16", KVShape(KVGeometry(32, 8, 128, "bfloat16", "NHD"), 16)),
)
"""Layers, kv heads, head_dim, tokens: a long block of a small model, and a block of an 8B Llama."""


def made(shape: KVShape, seed: int = 7) -> NDArray[np.uint8]:
    """A block's bytes."""
    chance = np.random.default_rng(seed)
    layers, pair, tokens, heads, dim = shape.sizes
    channels = (layers, pair, 1, heads, dim)
    offsets = chance.standard_normal(channels) * (chance.random(channels) < 0.1) * 4
    values = (chance.standard_normal((layers, pair, tokens, heads, dim)) + offsets) * np.exp(
        chance.standard_normal(channels) / 2
    )
    return rounded(values.astype(np.float32), shape.geometry.dtype).reshape(-1).view(np.uint8)


def rows(effort: Effort) -> list[Row]:
    """Of each codec and shape: encode and decode, natively and plainly."""
    found = []
    for case in CASES:
        count = effort.pick(-(-WORKING_SET // case.shape.block_bytes), 2)
        blocks = [made(case.shape, seed) for seed in range(count)]
        for codec in ALL:
            try:
                if codec.is_calibrated:
                    continue
                codec.check(case.shape)
            except Unsupported:
                continue
            found += _rows(case, codec, blocks, effort, is_plain=False)
            if loops.library is not None:
                found += _rows(case, codec, blocks, effort, is_plain=True)
    return found


def _rows(case: Case, codec: Codec, blocks: list[Bytes], effort: Effort, *, is_plain: bool) -> list[Row]:
    library, loops.library = loops.library, None if is_plain else loops.library
    try:
        coded = [encode(codec, block, case.shape) for block in blocks]
        targets = [np.full(HEADER.itemsize + len(block), 0, np.uint8) for block in blocks]
        whole = [target[: len(block)] for target, block in zip(targets, blocks, strict=True)]
        works = {
            "memcpy": _repeated(lambda i: np.copyto(whole[i], blocks[i]), len(blocks)),
            "encode": _repeated(lambda i: encode(codec, blocks[i], case.shape, out=targets[i]), len(blocks)),
            "decode": _repeated(lambda i: decode(coded[i], BY_NUMBER, out=whole[i]), len(blocks)),
        }
        runs = effort.pick(effort.at_least(5 if is_plain else 31), 2)
        costs = interleaved(works, runs=runs)
    finally:
        loops.library = library
    amount = REPEATS * case.shape.block_bytes / GIGA
    limits = [amount / cost for cost in cpus(costs["memcpy"])]
    bits = 8 * len(coded[0]) / case.shape.values
    form = "plain" if is_plain or library is None else "native"
    return [
        row_of(
            f"{codec.name} {verb} {case.name} {form}",
            [amount / cost for cost in cpus(costs[verb])],
            unit="GB/s",
            limits=limits,
            meaning=f"{bits:.3f} bits a value; limit: memcpy; processor time",
        )
        for verb in ("encode", "decode")
    ]


def _repeated(work: Callable[[int], object], count: int) -> Work:
    """Calls for the next of count blocks, in turns."""
    turns = itertools.cycle(range(count))

    def call() -> None:
        for _ in range(REPEATS):
            work(next(turns))

    return lambda _: call
