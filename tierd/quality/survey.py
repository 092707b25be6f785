"""A row of facts for each codec, with a quick measurement on made-up values, without a model."""

from __future__ import annotations

import sys
from typing import TypedDict

import numpy as np

from tierd.codecs import block, loops
from tierd.codecs.block import Codec
from tierd.codecs.values import KVShape, bytes_of, floats_of, raw_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import Unsupported
from tierd.quality.speed import Sample, codec_speed

SHAPE = KVShape(KVGeometry(layers=1, kv_heads=8, head_dim=128, dtype="bfloat16"), tokens=256)
"""One layer of a model of usual size."""
OUTLIERS = 8
"""Every so many channels of a key have a mean and four times the spread, as in real keys."""
SEED = 5


class Known(TypedDict):
    """A codec. error: the bound in the block's header, in standard deviations of the values.

    loops: "native", "numpy" or "not installed". Without a measurement the last four are None. Then
    the codec needs a calibration or a package.
    """

    codec: str
    number: int
    is_exact: bool
    is_calibrated: bool
    loops: str
    bits: float | None
    error: float | None
    encode_gbps: float | None
    decode_gbps: float | None


def sample() -> Sample:
    """One block of normal values."""
    values = np.random.default_rng(SEED).standard_normal(SHAPE.sizes, dtype=np.float32)
    values[:, 0, ..., ::OUTLIERS] = 4 * values[:, 0, ..., ::OUTLIERS] + 6
    return Sample([(0, bytes_of(rounded(values, SHAPE.geometry.dtype), SHAPE))], SHAPE)


def surveyed(codec: Codec, on: Sample) -> Known:
    """The row of one codec, measured on these blocks."""
    known = Known(
        codec=codec.name,
        number=codec.number,
        is_exact=codec.is_exact,
        is_calibrated=codec.is_calibrated,
        loops=loops_of(codec),
        bits=None,
        error=None,
        encode_gbps=None,
        decode_gbps=None,
    )
    if not codec.is_calibrated:
        (_, data), shape = on.blocks[0], on.shape
        try:
            coded = block.encode(codec, data, shape)
        except Unsupported:
            known["loops"] = "not installed"
            return known
        spread = float(floats_of(raw_of(data, shape), shape.geometry.dtype).std())
        known["bits"] = 8 * len(coded) / shape.values
        known["error"] = block.decode(coded, {codec.number: codec}).error / spread
        known["encode_gbps"], known["decode_gbps"] = codec_speed(codec, on)
    return known


def loops_of(codec: Codec) -> str:
    """native: the codec's module has native loops, and a compiler built them here."""
    has_native = hasattr(sys.modules[type(codec).__module__], "loops")
    return "native" if has_native and loops.library is not None else "numpy"
