"""Messages between the daemon and its GPU process, over a pair of stream sockets.

Both ends have one version, since one starts the other. A message of more than MESSAGE_BYTES is
neither sent nor taken. Received descriptors are close-on-exec, and each is taken or closed. A frame
is a little-endian head {u4 bytes of the body, u4 descriptors}, then the body, a msgpack map. The
descriptors are sent with the head's first byte. A request is {id, verb, ...}, an answer {id, ...}
or {id, error: [class, text]}, the class one of tierd.errors. The last message is {lost: text}: the
GPU's context is lost and the process ends.

    begin {}                                 -> {facts}
    adopt {slab, length} + descriptor        -> {}
    make {slab, length}                      -> {} + descriptor
    drop {slab}, detach {host}               -> {}
    attach {host, length} + descriptor       -> {notices}
    load, sums {pieces: PIECE[n] as bytes}   -> {counts: u4[n], sums: u8[], both as bytes}
    store {pieces}                           -> {}
    load_coded {pieces, coding}              -> {counts, sums}, of the payloads
    store_coded {pieces, coding}             -> {counts, sums, errors: f4[n, 2] as bytes}
    probe {} + descriptor                    -> {way}
    open_file {file} + descriptor            -> {}
    close_file {file}                        -> {}
    read {reads: READ[n] as bytes}           -> {counts, sums, faults: [row, text][]}
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.model import StructArray
from tierd.errors import InvalidArgument, TierFailed
from tierd.units import format_bytes

PIECE = np.dtype(
    [
        ("slab", "<u4"),
        ("host", "<u4"),
        ("slab_offset", "<u8"),
        ("host_offset", "<u8"),
        ("length", "<u4"),
        ("layers", "<u4"),
    ]
)
"""One block's page on both sides of a copy: slab, host memory, offsets and length in bytes. The
layers are as in `tierd.core.formats.block.slice_lengths`."""
READ = np.dtype(
    [
        ("file", "<u4"),
        ("slab", "<u4"),
        ("file_offset", "<u8"),
        ("slab_offset", "<u8"),
        ("length", "<u4"),
        ("layers", "<u4"),
        ("room", "<u4"),
    ]
)
"""One block's payload in a file and its page, as in PIECE. room: the length in whole 4 KiB."""
PIECES_MAX = 4096
"""The limit of one call."""
MESSAGE_BYTES = 32 << 20
"""Of a body: slice tables of PIECES_MAX blocks are half of it."""
DESCRIPTORS_MAX = 4
RECEIVE_BYTES = 1 << 20
INT = np.dtype(np.intc)
HEAD = struct.Struct("<II")

SliceTable = NDArray[np.uint64]
"""xxh3-64 of each slice of a block, in order."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts of the process and its GPU. exports: the form in which slabs leave it (`vmm`:
    descriptors).
    hashes: sums are made by `kernel`, or by `host` after a copy to host memory.
    notices: shortcomings, as sentences for people. uuid: the GPU's id in every process.
    gather_load_bytes, gather_store_bytes: the longest pages that a kernel copies, measured; 0:
    none."""

    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    granularity: int = 0
    exports: str = ""
    hashes: str = ""
    notices: tuple[str, ...] = ()
    uuid: str = ""
    gather_load_bytes: int = 0
    gather_store_bytes: int = 0

    @property
    def copying(self) -> str:
        """The way that pages are copied, in words."""
        both = ((self.gather_load_bytes, "to"), (self.gather_store_bytes, "from"))
        limits = [f"{format_bytes(limit)} {way} it" for limit, way in both if limit]
        return (
            f"pages up to {' and '.join(limits)} copied by a kernel" if limits else "pages copied by its copy engines"
        )


@dataclass(frozen=True, slots=True)
class Coding:
    """The codec of blocks and their shape. version: as in an encoded block's header. tokens: of a
    block; the rest as in `tierd.core.formats.block.KVGeometry`."""

    codec: str
    version: int
    layers: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str
    layout: str


@dataclass(frozen=True, slots=True)
class CodedSums:
    """tables: slice tables of the payloads. errors: f4 [n, 2]: the square of a row's largest error,
    and the largest magnitude of a value. If one is not finite, the payload is useless."""

    tables: list[SliceTable]
    errors: NDArray[np.float32]


@dataclass(slots=True)
class Message:
    """A body with its descriptors; fewer than were sent if this process has no room for more."""

    body: dict[str, Any]
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def frame(body: Mapping[str, Any], *, descriptors: int = 0) -> bytes:
    """A message in its sent form. Raises InvalidArgument if it is too long."""
    packed: bytes = msgpack.packb(body)
    if len(packed) > MESSAGE_BYTES:
        raise InvalidArgument(
            f"message to or from the GPU process: {len(packed)} bytes, the limit is {MESSAGE_BYTES}; send fewer pieces"
        )
    return HEAD.pack(len(packed), descriptors) + packed


class Inbox:
    """Received parts of messages that are not complete. Closed with `close`."""

    def __init__(self) -> None:
        self.is_ended = False
        """The other end is gone."""
        self._received = bytearray()
        self._descriptors: deque[int] = deque()

    def receive(self, peer: socket.socket) -> list[Message]:
        """Receive once; returns complete messages. Raises TierFailed if invalid, OSError."""
        # Not socket.recv_fds, which omits its flags: the descriptors would be inherited.
        room = socket.CMSG_SPACE(DESCRIPTORS_MAX * INT.itemsize)
        data, ancillary, _, _ = peer.recvmsg(RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        came = [int(fd) for level, kind, packed in ancillary for fd in np.frombuffer(packed, INT)]
        self.is_ended = not data
        self._received += data
        self._descriptors += came
        return list(iter(self._whole, None))

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _whole(self) -> Message | None:
        if len(self._received) < HEAD.size:
            return None
        length, count = HEAD.unpack_from(self._received)
        if length > MESSAGE_BYTES or count > DESCRIPTORS_MAX:
            raise TierFailed(f"GPU process: malformed message of {length} bytes and {count} descriptors")
        if len(self._received) < HEAD.size + length:
            return None
        body = _unpacked(bytes(memoryview(self._received)[HEAD.size : HEAD.size + length]))
        del self._received[: HEAD.size + length]
        # The kernel ends a read after bytes that came with descriptors. So those held here are of
        # this message, or all later ones have none.
        return Message(body, [self._descriptors.popleft() for _ in range(min(count, len(self._descriptors)))])


def _unpacked(packed: bytes) -> dict[str, Any]:
    try:
        body = msgpack.unpackb(packed)
    except ValueError as error:
        raise TierFailed(f"GPU process: a message that is not msgpack ({error})") from error
    if not isinstance(body, dict):
        raise TierFailed(f"GPU process: a message that is {type(body).__name__} instead of a map")
    return body


def pack_pieces(pieces: StructArray, dtype: np.dtype[Any] = PIECE) -> bytes:
    """PIECE[n], or READ[n], for a request. Raises InvalidArgument for another dtype, or too many."""
    if pieces.dtype != dtype or pieces.ndim != 1 or len(pieces) > PIECES_MAX:
        raise InvalidArgument(
            f"pieces: {pieces.shape} of {pieces.dtype}; pass one dimension of at most {PIECES_MAX} PIECE"
        )
    return pieces.tobytes()


def unpack_pieces(packed: bytes) -> StructArray:
    """PIECE[n] of a request."""
    return np.frombuffer(packed, PIECE)


def pack_sums(tables: Sequence[SliceTable]) -> dict[str, bytes]:
    """Slice tables for an answer."""
    counts = np.array([len(table) for table in tables], "<u4")
    return {"counts": counts.tobytes(), "sums": b"".join(table.astype("<u8").tobytes() for table in tables)}


def unpack_sums(body: Mapping[str, Any]) -> list[SliceTable]:
    """The slice tables of an answer."""
    counts, sums = np.frombuffer(body["counts"], "<u4"), np.frombuffer(body["sums"], "<u8")
    return np.split(sums, np.cumsum(counts)[:-1]) if len(counts) else []
