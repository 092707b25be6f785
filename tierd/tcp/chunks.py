"""Chunks of blocks on the wire: messages with one long bytes field, copied once out, never in.

The bytes are protobuf's, and incoming ones are read in place. Fields may come in any order,
repeated, and unknown ones too. All unusual messages are left to protobuf, so it alone decides what
is malformed. So are messages of many fields, which bounds the work here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

CHUNK_BYTES = 1 << 20
"""Of a block, in one chunk, at most."""
FIELDS_MAX = 16
"""Fields that are looked at."""
VARINT_MAX_BYTES, TAG_MAX_BYTES = 10, 5
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Chunk(Generic[M]):
    """head: the message without its bytes; data: the bytes, valid while referenced."""

    head: M
    data: memoryview


class Codec(Generic[M]):
    """Encodes and decodes messages of one kind, whose bytes are their field `data`."""

    def __init__(self, kind: type[M]) -> None:
        self._kind = cast(Any, kind)
        self._tag_number: int = self._kind.DESCRIPTOR.fields_by_name["data"].number << 3 | _BYTES
        self._tag = _varint(self._tag_number)

    def encode(self, head: M, data: Any) -> bytes:
        """A message on the wire. head: without bytes; data: contiguous bytes of any kind."""
        given: Any = head
        return b"".join((given.SerializeToString(), self._tag, _varint(len(data)), data))

    def decode(self, raw: bytes) -> Chunk[M]:
        """Decodes a message. Raises google.protobuf.message.DecodeError."""
        spans = self._spans(raw)
        if spans is None:
            return self._left_to_protobuf(raw)
        begun, data, rest = 0, memoryview(b""), []
        for field, start, end in spans:
            rest.append(raw[begun:field])
            data, begun = memoryview(raw)[start:end], end
        rest.append(raw[begun:])
        return Chunk(self._kind.FromString(b"".join(rest)), data)

    def _left_to_protobuf(self, raw: bytes) -> Chunk[M]:
        head = self._kind.FromString(raw)
        data = memoryview(head.data)
        head.ClearField("data")
        return Chunk(head, data)

    def _spans(self, raw: bytes) -> list[tuple[int, int, int]] | None:
        """(start of the field, of its bytes, and end) of each occurrence; None if unusual."""
        found, at, end = [], 0, len(raw)
        for _ in range(FIELDS_MAX):
            if at == end:
                break
            field = at
            tag, tag_end = _read_varint(raw, field)
            start, at = _skip(raw, tag_end, kind=tag & 7)
            if at > end or tag_end - field > TAG_MAX_BYTES:
                return None
            if tag == self._tag_number:
                found.append((field, start, at))
        return found if at == end else None


def _skip(raw: bytes, at: int, *, kind: int) -> tuple[int, int]:
    """A value's start and end: beyond the end of raw if it is cut off or of unknown kind."""
    if kind == _VARINT:
        return at, _read_varint(raw, at)[1]
    if kind == _BYTES:
        length, at = _read_varint(raw, at)
        return at, at + length
    return at, at + _FIXED_BYTES.get(kind, len(raw) + 1)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number and its end: beyond the end of raw if it is cut off or too long."""
    value = 0
    for shift, byte in enumerate(raw[at : at + VARINT_MAX_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    return 0, len(raw) + 1
