"""What the daemon and its GPU process say to each other, over a pair of stream sockets.

Purpose: frames, bounds, the dtype of pieces, and the values in messages. Non-purpose: what a verb does. Invariants: both ends are of one version, since one
starts the other; a message of more than MESSAGE_BYTES is neither sent nor taken; descriptors that come are close-on-exec and each is taken or closed.

A frame is a little-endian head {u4 bytes of the body, u4 descriptors}, then the body, a msgpack map; the descriptors ride with the head's first byte.

    request  {id, verb, ...}: begin {} · adopt {slab, length} + descriptor · make {slab, length} · drop {slab} · attach {host, length} + descriptor ·
             detach {host} · load {pieces} · store {pieces} · sums {pieces}, pieces being PIECE[n] as bytes ·
             probe {} + descriptor · open_file {file} + descriptor · close_file {file} · read {reads}, READ[n] as bytes
    answer   {id, ...}: begin {facts} · make {} + descriptor · attach {notices} · load, sums {counts: u4[n], sums: u8[], both as bytes} ·
             probe {way} · read {counts, sums, faults: [row, text][]} · else {}
             {id, error: [class, text]}, the class one of tierd.errors
    last     {lost: text}: the GPU's context is lost and the process ends
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
"""One block's page, on both sides of a copy: numbers of a slab and of a host memory, offsets and length in bytes, layers as `tierd.core.formats.block.slice_lengths`
takes them."""
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
"""One block's payload in a file and its page on the device, as in PIECE; room: the length rounded up to 4 KiB, which is read."""
PIECES_MAX = 4096
"""In one call."""
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
    """What the process found. exports: how slabs leave it (`vmm`: as descriptors); hashes: what sums device memory (`kernel`, or `host` by way of host memory);
    notices: what is less than the best, as sentences for people. uuid: by which other processes find the GPU, whatever they may see of it. gather_load_bytes,
    gather_store_bytes: up to which length a kernel copies pages, as it was measured; 0: none."""

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
        """By whom pages are copied, in words."""
        both = ((self.gather_load_bytes, "to"), (self.gather_store_bytes, "from"))
        limits = [f"{format_bytes(limit)} {way} it" for limit, way in both if limit]
        return (
            f"pages up to {' and '.join(limits)} copied by a kernel" if limits else "pages copied by its copy engines"
        )


@dataclass(slots=True)
class Message:
    """A body and the descriptors that came with it; fewer than were sent if this process has no room for more."""

    body: dict[str, Any]
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Nobody wants its descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def frame(body: Mapping[str, Any], *, descriptors: int = 0) -> bytes:
    """A message as it is sent. Raises InvalidArgument if it is too long."""
    packed: bytes = msgpack.packb(body)
    if len(packed) > MESSAGE_BYTES:
        raise InvalidArgument(
            f"message to or from the GPU process: {len(packed)} bytes, the limit is {MESSAGE_BYTES}; send fewer pieces"
        )
    return HEAD.pack(len(packed), descriptors) + packed


class Inbox:
    """What has come of messages that are not whole. Closed with `close`."""

    def __init__(self) -> None:
        self.is_ended = False
        """The other end has gone."""
        self._received = bytearray()
        self._descriptors: deque[int] = deque()

    def receive(self, peer: socket.socket) -> list[Message]:
        """Takes what is there, once, and gives the messages that are whole by it. Raises TierFailed for what is no message, OSError of the socket."""
        # Not socket.recv_fds, which leaves its flags out: the descriptors would be inherited.
        room = socket.CMSG_SPACE(DESCRIPTORS_MAX * INT.itemsize)
        data, told, _, _ = peer.recvmsg(RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        came = [int(fd) for level, kind, packed in told for fd in np.frombuffer(packed, INT)]
        self.is_ended = not data
        self._received += data
        self._descriptors += came
        return list(iter(self._whole, None))

    def close(self) -> None:
        """Closes the descriptors that nobody took."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _whole(self) -> Message | None:
        if len(self._received) < HEAD.size:
            return None
        length, count = HEAD.unpack_from(self._received)
        if length > MESSAGE_BYTES or count > DESCRIPTORS_MAX:
            raise TierFailed(f"GPU process: a message of {length} bytes and {count} descriptors; this is no message")
        if len(self._received) < HEAD.size + length:
            return None
        body = _unpacked(bytes(memoryview(self._received)[HEAD.size : HEAD.size + length]))
        del self._received[: HEAD.size + length]
        # The kernel ends a read behind bytes that descriptors came with, so those that are here are of this message or of none that follows.
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
            f"pieces: {pieces.shape} of {pieces.dtype}; one dimension of at most {PIECES_MAX} PIECE is taken"
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
