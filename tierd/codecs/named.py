"""The codecs by name. Numbers are in stored blocks: they never change."""

from __future__ import annotations

from tierd.codecs.block import Codec
from tierd.codecs.cachegen import CacheGen
from tierd.codecs.int3 import Int3
from tierd.codecs.int8 import Int8
from tierd.codecs.kivi import Kivi
from tierd.codecs.kvquant import KVQuant
from tierd.codecs.layered import COARSE, LAYERED
from tierd.codecs.lossless import Lossless
from tierd.codecs.planes import Planes
from tierd.codecs.rot import Rot
from tierd.codecs.transform import Transform
from tierd.codecs.transform_fit import TARGETS
from tierd.errors import InvalidArgument

TRANSFORMS = tuple(Transform(16, f"transform-{bits:g}", profile) for profile, bits in enumerate(TARGETS))
"""One number for all: a payload names its own step."""
ALL: tuple[Codec, ...] = (
    *(Int8(1), Rot(2, 8, 8), Rot(3, 8, 4), Rot(4, 4, 4), Int3(5)),
    *(Lossless(6), Planes(7, "lz4"), Planes(8, "zstd")),
    *(KVQuant(9, 4), KVQuant(10, 3), KVQuant(11, 2)),
    *(Kivi(12, 4), Kivi(13, 2), CacheGen(14)),
    *(*TRANSFORMS, LAYERED),
)
BY_NAME = {codec.name: codec for codec in ALL}
BY_NUMBER: dict[int, Codec] = {codec.number: codec for codec in (*ALL, COARSE)}


def codec_named(name: str) -> Codec:
    """Raises InvalidArgument."""
    if name not in BY_NAME:
        raise InvalidArgument(f"codec: {name[:32]!r} is unknown; use one of {', '.join(BY_NAME)}")
    return BY_NAME[name]
