"""Codecs of the wire: how the bytes of a chunk may travel between the daemon and clients over TCP, so that fewer of them do.

Purpose: bytes in, bytes out, one codec a class, each by its name. Non-purpose: how messages are laid out (tcp/chunks.py), how tiers store blocks, whether
bytes are right: the checksum of a chunk is of its plain bytes, and whoever decodes verifies it. Invariants: no more than CHUNK_BYTES of plain bytes come
of any data, however it was made; what a codec needs is loaded with the codec.
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
        """May be longer than what it was made of."""
        ...

    def decode(self, data: Bytes, *, length: int) -> memoryview:
        """Plain bytes, exactly so many. Raises CorruptRecord."""
        ...


class Lz4Planes:
    """Even and odd bytes apart, each of the two planes by LZ4 where that is shorter: of 16-bit floats in little endian the odd bytes
    have sign and exponent, which repeat, the even ones mantissa, which does not, and mixed neither would be shorter.

    Length of the even plane's part u32 little endian | that part | the odd plane's part. A part as long as its plane is the plane, a shorter one an LZ4 block.
    """

    name = "lz4"
    _HEAD_BYTES = 4

    def __init__(self) -> None:
        from lz4 import block  # noqa: PLC0415  # an extra: nobody else pays for it

        self._lz4: Any = block

    def encode(self, plain: Bytes) -> bytes:
        flat = np.frombuffer(plain, dtype=np.uint8)
        even, odd = (self._shorter(np.ascontiguousarray(flat[i::2])) for i in (0, 1))
        return b"".join((len(even).to_bytes(self._HEAD_BYTES, "little"), even, odd))

    def decode(self, data: Bytes, *, length: int) -> memoryview:
        if length > CHUNK_BYTES:
            raise CorruptRecord(
                f"chunk: {length} plain bytes, more than the {CHUNK_BYTES} of any chunk; versions differ?"
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
            raise CorruptRecord(f"chunk: {given} bytes are a plane of {len(part)}, where {length} were due")
        return np.frombuffer(part, dtype=np.uint8)


WIRE_CODECS: dict[str, type[WireCodec]] = {Lz4Planes.name: Lz4Planes}
"""By name. A name never gets another format."""


def open_codec(name: str, *, whose: str) -> WireCodec | None:
    """The codec of this name; none for "". whose: which side lacks what is missing. Raises InvalidArgument, and Unsupported where its package is missing."""
    if not name:
        return None
    if name not in WIRE_CODECS:
        known = ", ".join(map(repr, WIRE_CODECS))
        raise InvalidArgument(f"codec: {name[:32]!r} is none that {whose} knows; it knows {known}, or leave it out")
    try:
        return WIRE_CODECS[name]()
    except ImportError as error:
        raise Unsupported(
            f"codec: {name} needs a package that {whose} does not have ({error}); pip install 'tierd[{name}]' there, or leave the"
            " codec out"
        ) from error


def shortest(codec: WireCodec, plain: Bytes) -> tuple[Bytes, int]:
    """What travels of these bytes, and the chunk's `plain_length`: 0 where they go as they are, since encoded they were no shorter."""
    encoded = codec.encode(plain)
    return (encoded, len(plain)) if len(encoded) < len(plain) else (plain, 0)
