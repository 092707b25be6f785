"""The codecs that tests of engines use. They need no calibration, and their packages are installed."""

from __future__ import annotations

from tierd.codecs.block import Codec
from tierd.codecs.named import ALL
from tierd.codecs.values import KVShape
from tierd.core.formats.block import KVGeometry
from tierd.errors import Unsupported

SHAPE = KVShape(KVGeometry(1, 1, 64, "bfloat16"), 16)


def _is_usable(codec: Codec) -> bool:
    try:
        codec.check(SHAPE)
    except Unsupported:  # its package is not installed
        return False
    return not codec.is_calibrated


USABLE = [codec for codec in ALL if _is_usable(codec)]
