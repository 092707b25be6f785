"""Put and Get as chunk streams, for clients that share no memory with the daemon.

The daemon acts for the client: it reserves, writes and commits, or acquires, reads and releases.
Every chunk's checksum is verified on receipt and computed on sending. A broken stream holds
nothing. Blocks with missing bytes are not committed. Threads encode and decode chunks, never in a
page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.cache.cache import Cache
from tierd.cache.commit import CommitQuery
from tierd.cache.puts import ANSWER_SHARE
from tierd.checksum import record_checksum
from tierd.core.formats.model import COMMIT_BLOCK, BlockStatus, Durability, StructArray, TierKind
from tierd.core.plan import Codes, GroupQuery, PutQuery, Reserved
from tierd.errors import CorruptRecord, InvalidArgument
from tierd.server.grpc import messages
from tierd.server.grpc.caller import Caller
from tierd.tcp.chunks import CHUNK_BYTES, Chunk, Codec
from tierd.tcp.codecs import Bytes, WireCodec, open_codec, shortest
from tierd.tiers import staged
from tierd.tiers.arena.holds import HoldKind
from tierd.tiers.tier import is_mapped

PUT: Codec[pb.PutChunk] = Codec(pb.PutChunk)
GET: Codec[pb.GetChunk] = Codec(pb.GetChunk)
PutChunk = Chunk[pb.PutChunk]


class Recoded:
    """A gRPC server for the generated code. It replaces protobuf's codecs of Put and Get by its
    own."""

    def __init__(self, server: Any, service: Any) -> None:
        self._server, self._service = server, service

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Does nothing: the registered handlers are the same."""

    def add_registered_method_handlers(self, name: str, handlers: Mapping[str, Any]) -> None:
        """Adds all of a service's methods, by name."""
        put = grpc.stream_unary_rpc_method_handler(self._service.Put, PUT.decode, pb.PutReply.SerializeToString)
        # Chunks of a Get come encoded, by the step that reads the page.
        get = grpc.unary_stream_rpc_method_handler(self._service.Get, pb.GetRequest.FromString, bytes)
        handlers = {**handlers, "Put": put, "Get": get}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        self._server.add_registered_method_handlers(name, handlers)


async def first_chunk(chunks: AsyncIterator[PutChunk]) -> PutChunk:
    """The chunk that names the group. Raises InvalidArgument for an empty stream."""
    async for chunk in chunks:
        if not chunk.head.HasField("group"):
            raise InvalidArgument("put: the first chunk names no group; send it with the group and the durability")
        return chunk
    raise InvalidArgument("put: no chunk was sent; the first one carries the group")


async def put(
    cache: Cache, caller: Caller, group: PutQuery, *, first: PutChunk, chunks: AsyncIterator[PutChunk]
) -> Codes:
    """Puts a group's blocks. Returns BlockStatus u2[n]."""
    if len(group.blocks) and not group.blocks["hash"].any(axis=1).all():
        raise InvalidArgument("put: a block without a hash; name every block of a stream")
    durability, wire_codec = (
        messages.durability(first.head.durability),
        open_codec(first.head.codec, whose="the daemon"),
    )
    reserved = await cache.reserve(
        caller.session, [group], kind=TierKind.HOST, durability=durability, timeout_s=caller.left_s * ANSWER_SHARE
    )
    if not reserved.reservation:
        return reserved.statuses[0]
    incoming = Incoming(cache, caller.session, group, reserved)
    try:
        incoming.take(first if wire_codec is None else await _plain(first, wire_codec))
        async for chunk in chunks:
            incoming.take(chunk if wire_codec is None else await _plain(chunk, wire_codec))
        return await _commit(cache, caller, incoming, durability=durability)
    except BaseException:
        cache.abort(caller.session, reserved.reservation)
        raise


async def _plain(chunk: PutChunk, codec: WireCodec) -> PutChunk:
    """The chunk before its encoding. Raises CorruptRecord."""
    length = chunk.head.plain_length
    if not length:
        return chunk
    return Chunk(chunk.head, await asyncio.to_thread(codec.decode, chunk.data, length=length))


class Incoming:
    """The blocks of one Put while their bytes arrive. arrived: bytes received of each, int64 [n]."""

    def __init__(self, cache: Cache, session: int, group: PutQuery, reserved: Reserved) -> None:
        self.group = group
        self.reservation = reserved.reservation
        self.statuses = reserved.statuses[0]
        self.arrived = np.zeros(len(group.blocks), dtype=np.int64)
        self._extents = reserved.extents[0]
        self._cache, self._session = cache, session

    def take(self, chunk: PutChunk) -> None:
        """Takes the next chunk, in order and with its checksum. Raises InvalidArgument,
        CorruptRecord, StaleHandle."""
        head, data = chunk.head, chunk.data
        i, end = head.index, head.offset + len(data)
        self._check(head, end)
        if record_checksum(data) != head.checksum:
            raise CorruptRecord(
                f"chunk of block {i} at {head.offset}: its checksum does not match; send the block again"
            )
        self.arrived[i] = end
        if self.statuses[i] == BlockStatus.RESERVED and data:
            # Looked up for every chunk: the reservation may have ended, and its page be reused.
            extent, held = self._extents[i], HoldKind.RESERVATION
            page = self._cache.page(self._session, held, self.reservation, extent)
            tier = self._cache.tiers[int(extent["tier"])]
            if is_mapped(tier) and tier.spec.sealed_puts:
                staged.write(tier, extent, data, at=head.offset)
            else:
                page[head.offset : end] = data

    def _check(self, head: pb.PutChunk, end: int) -> None:
        i, blocks = head.index, self.group.blocks
        if i >= len(blocks):
            raise InvalidArgument(f"chunk.index: {i} is outside the group's {len(blocks)} blocks")
        if head.offset != self.arrived[i] or end > blocks["length"][i] or end - head.offset > CHUNK_BYTES:
            raise InvalidArgument(
                f"chunk of block {i}: bytes {head.offset} to {end} do not follow the {self.arrived[i]} received, of "
                f"{blocks['length'][i]}; send a block's chunks in order, {CHUNK_BYTES} bytes at most each"
            )


async def _commit(cache: Cache, caller: Caller, incoming: Incoming, *, durability: Durability) -> Codes:
    group, statuses = incoming.group, incoming.statuses.copy()
    written = np.flatnonzero(statuses == BlockStatus.RESERVED)
    whole = written[incoming.arrived[written] == group.blocks["length"][written]]
    statuses[np.setdiff1d(written, whole)] = BlockStatus.FAILED
    if not len(whole):
        cache.abort(caller.session, incoming.reservation)
        return statuses
    query = CommitQuery(incoming.reservation, _named(group, whole), durability)
    committed = await cache.commit(caller.session, query, deadline=caller.deadline)
    statuses[whole] = committed.statuses
    return statuses


def _named(group: PutQuery, which: StructArray) -> StructArray:
    """COMMIT_BLOCK of some of a group's blocks."""
    blocks = np.zeros(len(which), dtype=COMMIT_BLOCK)
    parents = np.vstack([np.frombuffer(group.parent, dtype=np.uint8)[None], group.blocks["hash"][:-1]])
    blocks["index"], blocks["position"] = which, group.position + which
    blocks["parent"] = parents[which]
    for name in ("hash", "tokens", "length"):
        blocks[name] = group.blocks[name][which]
    return blocks


async def get(cache: Cache, caller: Caller, group: GroupQuery, *, first: int, codec: str = "") -> AsyncIterator[bytes]:
    """Sends the servable blocks from number `first` on, as GetChunk. The first chunk has the number
    of servable tokens. codec: the wire codec's name."""
    wire_codec = open_codec(codec, whose="the daemon")
    if len(group.namespaces) != 1:
        raise InvalidArgument(f"get: {len(group.namespaces)} ranks; ask for one rank a call")
    lease = await cache.acquire(caller.session, [group], kind=TierKind.HOST, timeout_s=caller.left_s * ANSWER_SHARE)
    try:
        yield pb.GetChunk(tokens=lease.served.tokens, index=first).SerializeToString()
        for served in lease.served.groups:
            for i, extent in enumerate(served.extents[0], start=served.first):
                for offset in range(0, int(extent["length"]) if i >= first else 0, CHUNK_BYTES):
                    # Looked up for every chunk: the lease may have ended, and its page be reused.
                    page = cache.page(caller.session, HoldKind.LEASE, lease.lease, extent)
                    head, end = _head(i, offset, length=int(extent["length"]))
                    if wire_codec is None:
                        yield _message(head, page[offset:end])
                    else:  # copy first: during the await, the page may be reused
                        yield await asyncio.to_thread(_message, head, bytes(page[offset:end]), codec=wire_codec)
    finally:
        cache.release(caller.session, [lease.lease])


def _head(index: int, offset: int, *, length: int) -> tuple[pb.GetChunk, int]:
    """The chunk without its bytes, and their end."""
    head = pb.GetChunk(index=index, offset=offset, length=length, status=BlockStatus.READY)
    return head, min(length, offset + CHUNK_BYTES)


def _message(head: pb.GetChunk, data: Bytes, *, codec: WireCodec | None = None) -> bytes:
    """The chunk on the wire, with its checksum."""
    head.checksum = record_checksum(data)
    if codec is not None:
        data, head.plain_length = shortest(codec, data)
    return GET.encode(head, data)
