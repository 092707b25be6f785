"""What the daemon and its hash process say to each other, over a pair of SEQPACKET sockets.

Purpose: messages as bytes. Non-purpose: what becomes of them. Invariants: both ends are of one version, since one starts the other; a message fits into a socket's buffer;
pages are answered in the order in which they were asked for. Little-endian; the standard library alone, so that the process begins at once.

    attach   "A" {u8 memory, u8 bytes}, with a descriptor
    detach   "D" {u8 memory}
    hash     "H" {u8 number, u8 board, u4 word, u4 tag}, then PAGE for each page
    written  "W" {u8 number}
    drop     "X" {u8 number}
    sums     {u8 number}, then for each page {u2 count, u8 sums[count]}; of no page: the process is ready

A memory is a segment, or a session's board, on which its client says how many blocks of a put are written: a page is hashed when word `word` there has the put's tag as its upper half
and a lower half above the page's index, or `written` has come; where no board is given, at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

MESSAGE_BYTES = 32 << 10
"""Of a message to the process at most."""
ANSWER_BYTES = 64 << 10
"""More than the longest answer: SLICE_WORDS_MAX sums behind a message that was almost full."""
ATTACH, DETACH, HASH, WRITTEN, DROP = b"A", b"D", b"H", b"W", b"X"

_NUMBER, _ATTACHED, _COUNT = struct.Struct("<Q"), struct.Struct("<QQ"), struct.Struct("<H")
WORD, SUM_BYTES = struct.Struct("<Q"), 8
"""Of a board; and of a sum in an answer."""
ALL = 1 << 32
"""Above every index."""
TAG_BITS = 32
TAG_MASK = (1 << TAG_BITS) - 1
_HEAD, _PAGE = struct.Struct("<QQII"), struct.Struct("<QQ5I")
PAGE_SIZES = (8, 8, 4, 4, 4, 4, 4)
"""Bytes of the fields of a Page."""
PAGES_MAX = (MESSAGE_BYTES - 1 - _HEAD.size) // _PAGE.size
"""Of one hash message."""


class Page(NamedTuple):
    """Which block of its put it is, where it lies, and how it is cut, which is `tierd.core.block.Cut`."""

    segment: int
    offset: int
    block: int
    piece: int
    pieces: int
    last: int
    layers: int

    @property
    def lengths(self) -> list[int]:
        """Of its slices, in order."""
        return ([self.piece] * (self.pieces - 1) + [self.last]) * self.layers


class Word(NamedTuple):
    """Where a client says how many blocks of a put are written, and with which tag he says it of this one; of board 0: all are."""

    board: int
    word: int
    tag: int


NOWHERE = Word(0, 0, 0)


def blocks_written(said: int, tag: int) -> int:
    """Before which index the blocks are, as a word says of the put with this tag; nothing of another one."""
    return said & TAG_MASK if said >> TAG_BITS == tag else 0


def attach(memory: int, length_bytes: int) -> bytes:
    """To be sent with a descriptor."""
    return ATTACH + _ATTACHED.pack(memory, length_bytes)


def attached(message: bytes) -> tuple[int, int]:
    """Memory, bytes."""
    return _ATTACHED.unpack_from(message, 1)


def detach(memory: int) -> bytes:
    """Of memory that has ended."""
    return DETACH + _NUMBER.pack(memory)


def written(number: int) -> bytes:
    """All pages that were asked for by this number are."""
    return WRITTEN + _NUMBER.pack(number)


def drop(number: int) -> bytes:
    """Nobody wants their sums."""
    return DROP + _NUMBER.pack(number)


def subject(message: bytes) -> int:
    """What `detach`, `written` and `drop` speak of."""
    return int(_NUMBER.unpack_from(message, 1)[0])


def ask(number: int, pages: bytes, *, where: Word = NOWHERE) -> bytes:
    """pages: at most PAGES_MAX of them, as they are sent."""
    return HASH + _HEAD.pack(number, *where) + pages


class Question(NamedTuple):
    """What `ask` says. where: it is said how far the pages are written."""

    number: int
    where: Word
    pages: list[Page]


def asked(message: bytes) -> Question:
    """What was asked."""
    number, *where = _HEAD.unpack_from(message, 1)
    return Question(number, Word(*where), [Page(*its) for its in _PAGE.iter_unpack(message[1 + _HEAD.size :])])


def answer(number: int, tables: Sequence[Sequence[int]]) -> bytes:
    """The sums of each page."""
    return _NUMBER.pack(number) + b"".join(_COUNT.pack(len(its)) + struct.pack(f"<{len(its)}Q", *its) for its in tables)


READY = _NUMBER.pack(0)


def answered(message: bytes) -> tuple[int, list[bytes]]:
    """Number, and each page's sums as bytes."""
    tables, at = list[bytes](), _NUMBER.size
    while at < len(message):
        end = at + _COUNT.size + 8 * _COUNT.unpack_from(message, at)[0]
        tables.append(message[at + _COUNT.size : end])
        at = end
    return _NUMBER.unpack_from(message)[0], tables
