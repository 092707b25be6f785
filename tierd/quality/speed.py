"""Speed of codecs on given blocks: whole calls of block.encode and block.decode, checksums included.

A figure is the bytes of a block before encoding over CPU time of the process: threads count too.
A copy of the same blocks is measured beside them, because machines differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tierd.codecs import block
from tierd.codecs.block import Codec, Context
from tierd.codecs.calibration import Calibration
from tierd.codecs.values import Bytes, KVShape

LEAST_S = 0.2
"""CPU time of each figure, at least."""


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
    contexts = [(Context(position, calibration), data) for position, data in sample.blocks]
    known = {calibration.hash: calibration} if calibration else {}
    stored = [block.encode(codec, data, sample.shape, context) for context, data in contexts]
    encode = _gbps(lambda i: block.encode(codec, contexts[i][1], sample.shape, contexts[i][0]), sample)
    decode = _gbps(lambda i: block.decode(stored[i], {codec.number: codec}, known), sample)
    return Speed(encode, decode)


def copy_gbps(sample: Sample) -> float:
    """The same figure of a plain copy into memory that exists."""
    target = np.empty(sample.shape.block_bytes, np.uint8)
    return _gbps(lambda i: np.copyto(target, sample.blocks[i][1]), sample)


def _gbps(call: Callable[[int], object], sample: Sample) -> float:
    """Over as many rounds of all blocks as fill LEAST_S; a first one is not counted."""
    rounds, begun, spent = -1, 0.0, 0.0
    while spent < LEAST_S:
        for i in range(len(sample.blocks)):
            call(i)
        rounds += 1
        now = time.process_time()
        begun, spent = (now, 0.0) if rounds == 0 else (begun, now - begun)
    return rounds * len(sample.blocks) * sample.shape.block_bytes / spent / 1e9
