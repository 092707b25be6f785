"""An encoded block: a header of 64 bytes, then the codec's payload. FORMAT.md has the offsets.

    block bytes ─▶ encode ─▶ header | payload        header | payload ─▶ decode ─▶ block bytes

A block with a value that is not finite is kept as it is, under codec 0: no lossy code can hold it.
The header names everything that decoding needs, and its checksum covers the payload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tierd.checksum import record_checksum
from tierd.codecs.values import DTYPES, LAYOUTS, ROUNDING, Bytes, Floats, KVShape, bytes_of, floats_of, raw_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord, InvalidArgument, Unsupported

MAGIC, VERSION = 0x56_4B_44_54, 1  # "TDKV"
HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("codec", "<u2"),
        ("codec_version", "<u2"),
        ("dtype", "u1"),
        ("layout", "u1"),
        ("layers", "<u4"),
        ("kv_heads", "<u4"),
        ("head_dim", "<u4"),
        ("tokens", "<u4"),
        ("payload", "<u4"),
        ("error", "<f4"),
        ("calibration", "V16"),
        ("reserved", "V4"),
        ("checksum", "<u8"),
    ]
)
IDENTITY = 0


class Codec(Protocol):
    """One way to encode. The values that `encode` takes are finite."""

    @property
    def name(self) -> str:
        """For settings and people."""

    @property
    def number(self) -> int:
        """In stored blocks."""

    @property
    def version(self) -> int:
        """Of the payload's format; older ones can be decoded too."""

    def check(self, shape: KVShape) -> None:
        """Raises Unsupported if blocks of this shape cannot be encoded."""

    def length(self, shape: KVShape) -> int:
        """Bytes of the payload, known before any memory is taken."""

    def encode(self, values: Floats, shape: KVShape) -> tuple[Bytes, float]:
        """The payload, and the largest error of a value before it is rounded to the block's dtype."""

    def decode(self, payload: Bytes, shape: KVShape) -> Floats:
        """The values of a payload of `length` bytes."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """block: its bytes. error: of a value at most, absolute. codec: number that the block has."""

    block: Bytes
    error: float
    codec: int


def encode(codec: Codec, block: Any, shape: KVShape) -> Bytes:
    """Header and payload. block: contiguous bytes. Raises InvalidArgument, Unsupported."""
    codec.check(shape)
    raw = raw_of(block, shape)
    values = floats_of(raw, shape.geometry.dtype)
    if not np.isfinite(values).all():
        return _framed(IDENTITY, 1, shape, bytes_of(raw, shape), 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        payload, error = codec.encode(values, shape)
    if not np.isfinite(error):  # a scale beyond float16
        return _framed(IDENTITY, 1, shape, bytes_of(raw, shape), 0.0)
    relative, absolute = ROUNDING[shape.geometry.dtype]
    largest = float(np.abs(values).max()) + error
    bound = np.float32(error * (1 + 1e-5) + max(largest * relative, absolute))
    return _framed(codec.number, codec.version, shape, payload, float(np.nextafter(bound, np.float32(np.inf))))


def decode(data: Any, codecs: dict[int, Codec]) -> Decoded:
    """A block again. Raises CorruptRecord for damaged data, Unsupported for an unknown codec or version."""
    coded = np.frombuffer(data, np.uint8)
    if len(coded) < HEADER.itemsize:
        raise CorruptRecord(
            f"encoded block: {len(coded)} bytes are no header, which has {HEADER.itemsize}; read another copy"
        )
    header, payload = coded[: HEADER.itemsize].view(HEADER)[0], coded[HEADER.itemsize :]
    if header["magic"] != MAGIC or header["checksum"] != _checksum(header, payload):
        raise CorruptRecord("encoded block: the header's checksum does not match; read another copy")
    number, version = int(header["codec"]), int(header["codec_version"])
    codec = codecs.get(number)
    known = 1 if number == IDENTITY else codec.version if codec else 0
    if header["version"] != VERSION or not 0 < version <= known:
        raise Unsupported(
            f"encoded block: format {header['version']}, codec {number} in version {version} is unknown here; upgrade "
            "tierd"
        )
    shape = _shape_of(header)
    if codec is not None:
        codec.check(shape)
    wanted = shape.block_bytes if codec is None else codec.length(shape)
    if len(payload) != header["payload"] or len(payload) != wanted:
        raise CorruptRecord(
            f"encoded block: the payload has {len(payload)} bytes, its shape takes {wanted}; read another copy"
        )
    if codec is None:
        return Decoded(payload, 0.0, IDENTITY)
    raw = rounded(codec.decode(payload, shape), shape.geometry.dtype)
    return Decoded(bytes_of(raw, shape), float(header["error"]), number)


def _framed(number: int, version: int, shape: KVShape, payload: Bytes, error: float) -> Bytes:
    g = shape.geometry
    header = np.zeros(1, HEADER)
    header[0] = (
        *(MAGIC, VERSION, number, version, DTYPES.index(g.dtype), LAYOUTS.index(g.layout)),
        *(g.layers, g.kv_heads, g.head_dim, shape.tokens, len(payload), error, b"", b"", 0),
    )
    header["checksum"] = _checksum(header[0], payload)
    return np.concatenate((header.view(np.uint8), payload))


def _checksum(header: Any, payload: Bytes) -> int:
    """Over the header without the checksum, chained with the payload's."""
    sums = np.array([record_checksum(header.tobytes()[:-8]), record_checksum(payload)], "<u8")
    return record_checksum(sums.tobytes())


def _shape_of(header: Any) -> KVShape:
    """Raises CorruptRecord for an impossible shape."""
    if header["dtype"] >= len(DTYPES) or header["layout"] >= len(LAYOUTS):
        raise CorruptRecord(
            f"encoded block: dtype {header['dtype']}, layout {header['layout']} do not exist; read another copy"
        )
    dtype, layout = DTYPES[int(header["dtype"])], LAYOUTS[int(header["layout"])]
    geometry = KVGeometry(int(header["layers"]), int(header["kv_heads"]), int(header["head_dim"]), dtype, layout)
    try:
        return KVShape(geometry, int(header["tokens"]))
    except InvalidArgument as error:
        raise CorruptRecord(f"encoded block: its header is impossible ({error}); read another copy") from None
