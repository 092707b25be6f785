"""Codecs of the wire: encodings of a chunk between daemon and TCP clients, to send fewer bytes.

Bytes in, bytes out, one codec a class, each by its name. tcp/chunks.py defines the messages. A
chunk's checksum is of its plain bytes, and the decoding side verifies it. No data decodes to more
than CHUNK_BYTES. A codec's package is loaded with the codec.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.errors import CorruptRecord, InvalidArgument, Unsupported
from tierd.tcp.chunks import CHUNK_BYTES

Bytes = bytes | memoryview


class WireCodec(Protocol):
    """One way to encode a chunk. Threads may share it."""

    name: str

    def encode(self, plain: Bytes) -> bytes:
        """The encoded bytes; they may be longer than `plain`."""
        ...

    def decode(self, data: Bytes, *, length: int) -> memoryview:
        """Exactly `length` plain bytes. Raises CorruptRecord."""
        ...


class Lz4Planes:
    """Splits even and odd bytes into two planes, each compressed by LZ4 if that is shorter.

    In little-endian 16-bit floats the odd bytes hold sign and exponent, which repeat; the even ones
    hold mantissa bits, which do not. Mixed, neither would get shorter. Format: length of the even
    plane's part, u32 little endian | that part | the odd plane's part. A part as long as its plane
    is the plane, a shorter one an LZ4 block.
    """

    name = "lz4"
    _HEAD_BYTES = 4

    def __init__(self) -> None:
        from lz4 import block  # noqa: PLC0415  # an optional extra

        self._lz4: Any = block

    def encode(self, plain: Bytes) -> bytes:
        flat = np.frombuffer(plain, dtype=np.uint8)
        even, odd = (self._shorter(np.ascontiguousarray(flat[i::2])) for i in (0, 1))
        return b"".join((len(even).to_bytes(self._HEAD_BYTES, "little"), even, odd))

    def decode(self, data: Bytes, *, length: int) -> memoryview:
        if length > CHUNK_BYTES:
            raise CorruptRecord(
                f"chunk: {length} plain bytes, above the limit of {CHUNK_BYTES}; use one tierd on both sides"
            )
        plain = np.empty(length, dtype=np.uint8)
        parts = memoryview(data)[self._HEAD_BYTES :]
        even = int.from_bytes(data[: self._HEAD_BYTES], "little")
        plain[0::2] = self._plane(parts[:even], length=-(-length // 2))
        plain[1::2] = self._plane(parts[even:], length=length // 2)
        return plain.data

    def _shorter(self, plane: NDArray[np.uint8]) -> Bytes:
        block: bytes = self._lz4.compress(plane, store_size=False)
        return block if len(block) < len(plane) else plane.data

    def _plane(self, part: Bytes, *, length: int) -> NDArray[np.uint8]:
        """The plane of so many bytes. Raises CorruptRecord."""
        given = len(part)
        if given < length:
            try:
                part = self._lz4.decompress(part, uncompressed_size=length)
            except self._lz4.LZ4BlockError as error:
                raise CorruptRecord(f"chunk: {given} bytes are no LZ4 block of {length} ({error})") from error
        if len(part) != length:
            raise CorruptRecord(f"chunk: {given} bytes decompress to {len(part)} instead of {length}")
        return np.frombuffer(part, dtype=np.uint8)


WIRE_CODECS: dict[str, type[WireCodec]] = {Lz4Planes.name: Lz4Planes}
"""By name. A name never gets another format."""


def open_codec(name: str, *, whose: str) -> WireCodec | None:
    """The codec of this name; None for "". whose: the side to name in errors. Raises
    InvalidArgument, and Unsupported if its package is missing."""
    if not name:
        return None
    if name not in WIRE_CODECS:
        known = ", ".join(map(repr, WIRE_CODECS))
        raise InvalidArgument(f"codec: {name[:32]!r} is unknown to {whose}; use {known}, or leave it out")
    try:
        return WIRE_CODECS[name]()
    except ImportError as error:
        raise Unsupported(
            f"codec: {name} needs a package that {whose} does not have ({error}); pip install 'tierd[{name}]' there, or leave the"
            " codec out"
        ) from error


def shortest(codec: WireCodec, plain: Bytes) -> tuple[Bytes, int]:
    """The bytes to send, and the chunk's `plain_length`: 0 if encoding does not shorten them."""
    encoded = codec.encode(plain)
    return (encoded, len(plain)) if len(encoded) < len(plain) else (plain, 0)
