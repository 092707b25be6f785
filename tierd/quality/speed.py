"""Speed of codecs on given blocks: whole calls of block.encode and block.decode, checksums included.

A figure is the bytes of a block before encoding over CPU time of the process: threads count too.
Calls take turns over copies of the blocks, WORKING_SET bytes in all: more than a core's own caches
hold. Results go to memory that exists, as many places as there are copies. A copy of the same
blocks is measured in the same way, because machines differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tierd.codecs import block
from tierd.codecs.block import HEADER, Codec, Context
from tierd.codecs.calibration import Calibration
from tierd.codecs.values import Bytes, KVShape

LEAST_S = 0.2
"""CPU time of each figure, at least."""
WORKING_SET = 32 << 20
"""Bytes of all blocks, and as many of the results' memory."""


class Speed(NamedTuple):
    """GB (10^9 bytes) of a block's own bytes per second of CPU time."""

    encode_gbps: float
    decode_gbps: float


class Sample(NamedTuple):
    """Blocks of one shape to measure on, each with its position."""

    blocks: Sequence[tuple[int, Bytes]]
    shape: KVShape


def codec_speed(codec: Codec, sample: Sample, calibration: Calibration | None = None) -> Speed:
    """The speed of a codec. Raises Unsupported if it cannot encode such blocks."""
    shape, known = sample.shape, {calibration.hash: calibration} if calibration else {}
    contexts = [Context(position, calibration) for position, _ in sample.blocks]
    once = [block.encode(codec, data, shape, each) for (_, data), each in zip(sample.blocks, contexts, strict=True)]
    plain, coded = _copies([data for _, data in sample.blocks], shape), _copies(once, shape)
    outs = _places(len(plain), HEADER.itemsize + shape.block_bytes)
    encode = _gbps(
        lambda i: block.encode(codec, plain[i], shape, contexts[i % len(contexts)], outs[i]), len(plain), shape
    )
    outs = _places(len(plain), shape.block_bytes)
    decode = _gbps(lambda i: block.decode(coded[i], {codec.number: codec}, known, out=outs[i]), len(plain), shape)
    return Speed(encode, decode)


def copy_gbps(sample: Sample) -> float:
    """The same figure of a plain copy."""
    plain = _copies([data for _, data in sample.blocks], sample.shape)
    outs = _places(len(plain), sample.shape.block_bytes)
    return _gbps(lambda i: np.copyto(outs[i], plain[i]), len(plain), sample.shape)


def _copies(blocks: Sequence[Bytes], shape: KVShape) -> list[Bytes]:
    """Copies of blocks by turns, as many as fill WORKING_SET before encoding."""
    count = max(len(blocks), -(-WORKING_SET // shape.block_bytes))
    return [blocks[i % len(blocks)].copy() for i in range(count)]


def _places(count: int, length: int) -> list[Bytes]:
    """Memory that exists: zeros were written to it."""
    return [np.full(length, 0, np.uint8) for _ in range(count)]


def _gbps(call: Callable[[int], object], count: int, shape: KVShape) -> float:
    """Over calls for 0 to count - 1, in turns, that fill LEAST_S. As many before them do not count."""
    calls, spent = 0, 0.0
    for _ in range(2):
        calls, begun, spent = 0, time.process_time(), 0.0
        while spent < LEAST_S:
            call(calls % count)
            calls += 1
            spent = time.process_time() - begun
    return calls * shape.block_bytes / spent / 1e9
