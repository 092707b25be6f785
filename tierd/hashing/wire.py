"""What the daemon and its hash process say to each other, over a pair of SEQPACKET sockets.

Purpose: messages as bytes. Non-purpose: what becomes of them. Invariants: both ends are of one version, since one starts the other; a message fits into a socket's buffer;
pages are answered in the order in which they were asked for. Little-endian; the standard library alone, so that the process begins at once.

    attach  "A" {u8 segment, u8 bytes}, with a descriptor
    detach  "D" {u8 segment}
    hash    "H" {u8 number}, then PAGE for each page
    sums    {u8 number}, then for each page {u2 count, u8 sums[count]}; of no page: the process is ready
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MESSAGE_BYTES = 32 << 10
"""Of a message at most, but for the sums of one page that are more."""
ANSWER_BYTES = 64 << 10
"""More than the longest answer: SLICE_WORDS_MAX sums behind a message that was almost full."""
ATTACH, DETACH, HASH = b"A", b"D", b"H"

_NUMBER, _ATTACHED, _COUNT = struct.Struct("<Q"), struct.Struct("<QQ"), struct.Struct("<H")
_PAGE = struct.Struct("<QQ4I")
PAGES_MAX = (MESSAGE_BYTES - 1 - _NUMBER.size) // _PAGE.size
"""Of one hash message."""


class Page(NamedTuple):
    """Where a block lies, and how it is cut, which is `tierd.core.block.Cut`."""

    segment: int
    offset: int
    piece: int
    pieces: int
    last: int
    layers: int

    @property
    def lengths(self) -> list[int]:
        """Of its slices, in order."""
        return ([self.piece] * (self.pieces - 1) + [self.last]) * self.layers


def attach(segment: int, length_bytes: int) -> bytes:
    """To be sent with a descriptor."""
    return ATTACH + _ATTACHED.pack(segment, length_bytes)


def attached(message: bytes) -> tuple[int, int]:
    """Segment, bytes."""
    return _ATTACHED.unpack_from(message, 1)


def detach(segment: int) -> bytes:
    """Of a segment that has ended."""
    return DETACH + _NUMBER.pack(segment)


def detached(message: bytes) -> int:
    """The segment."""
    return int(_NUMBER.unpack_from(message, 1)[0])


def ask(number: int, pages: Sequence[Page]) -> bytes:
    """At most PAGES_MAX of them."""
    return HASH + _NUMBER.pack(number) + b"".join(_PAGE.pack(*page) for page in pages)


def asked(message: bytes) -> tuple[int, Iterator[Page]]:
    """Number, pages."""
    return _NUMBER.unpack_from(message, 1)[0], map(Page._make, _PAGE.iter_unpack(message[1 + _NUMBER.size :]))


def answers(number: int, tables: Iterator[Sequence[int]]) -> Iterator[bytes]:
    """Messages with the sums of each page."""
    head = message = _NUMBER.pack(number)
    for table in tables:
        message += _COUNT.pack(len(table)) + struct.pack(f"<{len(table)}Q", *table)
        if len(message) >= MESSAGE_BYTES:
            yield message
            message = head
    if message is not head:
        yield message


READY = _NUMBER.pack(0)


def answered(message: bytes) -> tuple[int, list[bytes]]:
    """Number, and each page's sums as bytes."""
    tables, at = list[bytes](), _NUMBER.size
    while at < len(message):
        end = at + _COUNT.size + 8 * _COUNT.unpack_from(message, at)[0]
        tables.append(message[at + _COUNT.size : end])
        at = end
    return _NUMBER.unpack_from(message)[0], tables
