"""Put and get over TCP: chunks with checksums instead of handles, encoded on request.

This is for clients that share no memory with the daemon. tierd/tcp/chunks.py defines the format of
a chunk. A block counts only if all its chunks are intact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierd._proto import cache_pb2 as pb
from tierd.client.blocks import buffers
from tierd.client.connect.calls import insisted, left_s
from tierd.client.connect.link import Link
from tierd.client.transport import replies, requests
from tierd.client.values import GetResult, Group, PutGroup, PutResult
from tierd.core.formats.model import BlockStatus, Durability, Need
from tierd.errors import CorruptRecord, OperatorError, Unsupported
from tierd.tcp.chunks import CHUNK_BYTES, Chunk, Codec
from tierd.tcp.codecs import WireCodec, shortest

_PUT: Codec[pb.PutChunk] = Codec(pb.PutChunk)


def put(link: Link, group: PutGroup, sources: Sequence[buffers.Bytes], deadline: float, *, durable: bool) -> PutResult:
    """Sends blocks."""
    message, codec = requests.put_group_message(group), link.codec

    def push() -> Any:
        chunks = put_chunks(message, sources, durable=durable, codec=codec)
        return link.transport.push("Put", chunks, timeout_s=left_s(deadline))

    reply = insisted(push, deadline)
    return PutResult(replies.statuses_of(reply.statuses, count=len(sources)))


def get(link: Link, group: Group, out: Any, deadline: float) -> tuple[GetResult, list[int]]:
    """Receives the servable prefix, into `out` or new arrays, and the lengths of its blocks. Raises
    Unsupported if the group needs anything but a prefix."""
    if group.need is not Need.PREFIX:
        raise Unsupported(
            f"get: over TCP a group can need a prefix, not {group.need.name}, since blocks travel in order; ask for"
            " a prefix, or run a daemon on this machine"
        )
    assembly = Assembly(_Targets(out, length_max=group.namespace.spec.block_bytes), codec=link.codec)
    request = pb.GetRequest(group=requests.group_message(group), codec=link.codec.name if link.codec else "")
    insisted(lambda: link.transport.pull("Get", request, timeout_s=left_s(deadline), take=assembly.take), deadline)
    blocks = len(assembly.whole)
    covered = group.namespace.block_tokens(len(group.hashes), tokens=group.tokens)
    for array in assembly.whole if out is None else ():
        array.flags.writeable = False
    views = tuple(assembly.whole) if out is None else ()
    return GetResult(int(covered[:blocks].sum()), blocks, views), list(map(len, assembly.whole))


class _Targets:
    """Destinations of blocks: new memory, a list of buffers, or one buffer filled in order."""

    def __init__(self, out: Any, *, length_max: int) -> None:
        self._out = out if out is None or isinstance(out, list | tuple) else buffers.flat(out, writable=True)
        self._length_max = length_max
        self._used = 0

    def __call__(self, index: int, length: int) -> NDArray[np.uint8]:
        if length > self._length_max:
            raise OperatorError(
                f"daemon: block {index} of {length} bytes is above the namespace's {self._length_max}; "
                "use one tierd on both sides"
            )
        if self._out is None:
            return np.empty(length, dtype=np.uint8)
        if isinstance(self._out, list | tuple):
            return buffers.pieces(list(self._out[index : index + 1]), [length], writable=True)[0]
        begin, self._used = self._used, self._used + length
        return buffers.pieces(self._out[begin:], [length], writable=True)[0]


def put_chunks(
    message: pb.PutGroup, pieces: Sequence[NDArray[np.uint8]], *, durable: bool, codec: WireCodec | None = None
) -> Iterator[bytes]:
    """A Put's encoded messages: the group, then each block's bytes in order, with checksums."""
    durability = (Durability.DURABLE if durable else Durability.MEMORY).value
    first = pb.PutChunk(group=message, durability=durability, checksum=xxhash.xxh3_64_intdigest(b""))  # type: ignore[arg-type]
    if codec is not None:
        first.codec = codec.name
    yield first.SerializeToString()
    for index, piece in enumerate(pieces):
        for offset in range(0, len(piece), CHUNK_BYTES):
            data: Any = piece[offset : offset + CHUNK_BYTES].data
            head = pb.PutChunk(index=index, offset=offset, checksum=xxhash.xxh3_64_intdigest(data))
            if codec is not None:
                data, head.plain_length = shortest(codec, data)
            yield _PUT.encode(head, data)


class Assembly:
    """Assembles blocks from a Get's chunks. It checks every chunk, in order, and stops at the first fault."""

    def __init__(self, target: Callable[[int, int], NDArray[np.uint8]], *, codec: WireCodec | None = None) -> None:
        """target: from a block's number and length to its destination. codec: for encoded chunks."""
        self.whole: list[NDArray[np.uint8]] = []
        self._target, self._codec = target, codec
        self._current: NDArray[np.uint8] | None = None
        self._filled = 0
        self._is_broken = False

    def take(self, chunk: Chunk[pb.GetChunk]) -> None:
        """Takes the next chunk. An unfit or corrupt one ends the prefix, so no wrong byte is served."""
        head = chunk.head
        if self._is_broken or not (chunk.data or head.status):
            return
        data = self._plain(chunk) if self._fits(head, head.plain_length or len(chunk.data)) else None
        self._is_broken = data is None or xxhash.xxh3_64_intdigest(data) != head.checksum
        if data is None or self._is_broken or self._current is None:
            return
        self._filled = head.offset + len(data)
        buffers.copy_all([self._current[head.offset : self._filled]], [np.frombuffer(data, dtype=np.uint8)])
        if self._filled == len(self._current):
            self.whole.append(self._current)
            self._current = None

    def _plain(self, chunk: Chunk[pb.GetChunk]) -> memoryview | None:
        """The chunk's bytes, decoded. None: they cannot be decoded, or this client wants no codec."""
        if not chunk.head.plain_length:
            return chunk.data
        try:
            return None if self._codec is None else self._codec.decode(chunk.data, length=chunk.head.plain_length)
        except CorruptRecord:
            return None

    def _fits(self, head: pb.GetChunk, length: int) -> bool:
        """Whether the chunk continues the block in progress, or begins the next one."""
        if head.status != BlockStatus.READY or head.index != len(self.whole):
            return False
        if self._current is None:
            self._current, self._filled = self._target(head.index, head.length), 0
        return head.offset == self._filled and self._filled + length <= len(self._current)
