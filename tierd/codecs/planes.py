"""Codecs lz4 and zstd: two planes of bytes through a general compressor, which comes by a package.

The first plane has the exponents' bytes, the second the others. Both are channel by channel, tokens
adjoining. Payload: the first plane's length (uint32), both planes. A plane that would be no
shorter stays as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.block import Context, Lengths, Payload, room_for_raw
from tierd.codecs.values import Bytes, KVShape, Raw
from tierd.errors import CorruptRecord, Unsupported

LEVEL = 1
"""Of zstd: higher ones are slower, and no shorter on these planes."""


class Compressor(NamedTuple):
    """expand: (compressed, length of the original) -> the original. Both may raise the package's errors.

    most: no byte of its stands for more."""

    package: str
    most: int
    compress: Callable[[Any, bytes], bytes]
    expand: Callable[[Any, bytes, int], bytes]


def _zstd_expanded(zstandard: Any, data: bytes, length: int) -> bytes:
    if zstandard.frame_content_size(data) != length:  # known before any memory is taken
        raise ValueError("the frame has another length")
    expanded: bytes = zstandard.ZstdDecompressor().decompress(data, max_output_size=length)
    return expanded


COMPRESSORS = {
    "lz4": Compressor(
        "lz4.block",
        255,
        lambda lz4, data: lz4.compress(data, store_size=False),
        lambda lz4, data, length: lz4.decompress(data, uncompressed_size=length),
    ),
    "zstd": Compressor(
        "zstandard",
        1 << 16,
        lambda zstandard, data: zstandard.ZstdCompressor(level=LEVEL).compress(data),
        _zstd_expanded,
    ),
}


@dataclass(frozen=True, slots=True)
class Planes:
    """name: of the compressor."""

    number: int
    name: str
    version: int = 1
    is_exact: bool = True
    is_calibrated: bool = False

    def check(self, shape: KVShape) -> None:
        """Raises Unsupported if the package is not installed."""
        self._package()

    def lengths(self, shape: KVShape) -> Lengths:
        """From the most that the compressor can do, to the planes as they are."""
        return Lengths(4 + 2 * (shape.values // COMPRESSORS[self.name].most), 4 + shape.block_bytes)

    def expected_bytes(self, shape: KVShape) -> int:
        """Real keys and values take up to 13.5 bits each."""
        return shape.values * 14 // 8

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        words, package = np.ascontiguousarray(raw.transpose(0, 1, 3, 4, 2)).reshape(-1), self._package()
        parts = []
        for plane in _split(words, shape):
            data = COMPRESSORS[self.name].compress(package, plane.tobytes())
            parts.append(np.frombuffer(data, np.uint8) if len(data) < len(plane) else plane)
        return Payload(np.concatenate((np.array([len(parts[0])], "<u4").view(np.uint8), *parts)), 0.0)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        first = int(payload[:4].view("<u4")[0])
        planes = [self._expanded(part, shape.values) for part in (payload[4 : 4 + first], payload[4 + first :])]
        layers, pair, tokens, heads, dim = shape.sizes
        raw = room_for_raw(shape, context)
        raw[:] = _joined(planes[0], planes[1], shape).reshape(layers, pair, heads, dim, tokens).transpose(0, 1, 4, 2, 3)
        return raw

    def _expanded(self, part: Bytes, length: int) -> Bytes:
        """Raises CorruptRecord."""
        if len(part) == length:
            return part
        package = self._package()
        try:
            data = COMPRESSORS[self.name].expand(package, part.tobytes(), length)
        except Exception as error:  # noqa: BLE001 -- each package has its own classes, some below Exception alone
            raise CorruptRecord(f"codec {self.name}: a plane does not expand ({error}); read another copy") from None
        if len(data) != length:
            raise CorruptRecord(f"codec {self.name}: a plane has {len(data)} bytes, not {length}; read another copy")
        return np.frombuffer(data, np.uint8)

    def _package(self) -> Any:
        """Raises Unsupported."""
        wanted = COMPRESSORS[self.name].package
        try:
            return importlib.import_module(wanted)
        except ImportError:
            raise Unsupported(
                f"codec {self.name}: package {wanted.split('.')[0]} is not installed; install tierd[{self.name}], or "
                "use codec lossless"
            ) from None


def _split(words: NDArray[np.uint16], shape: KVShape) -> tuple[Bytes, Bytes]:
    """bfloat16: exponents, then sign and fraction. float16: the high bytes, then the low ones."""
    if shape.geometry.dtype == "float16":
        return (words >> 8).astype(np.uint8), (words & 255).astype(np.uint8)
    return (words >> 7 & 255).astype(np.uint8), (words >> 8 & 128 | words & 127).astype(np.uint8)


def _joined(first: Bytes, second: Bytes, shape: KVShape) -> NDArray[np.uint16]:
    high, low, is_half = first.astype(np.uint16), second.astype(np.uint16), shape.geometry.dtype == "float16"
    joined = high << 8 | low if is_half else high << 7 | (low & 128) << 8 | low & 127
    return joined.astype(np.uint16, copy=False)
