"""Put and Get as chunk streams, for clients that share no memory with the daemon.

Purpose: the daemon stands in for the client: it reserves, writes, commits, or acquires, reads, releases. Invariants: every chunk's
checksum is verified on receipt and made on sending; a stream that breaks off leaves nothing behind; blocks whose bytes did not all
arrive are not committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.cache.cache import Cache
from tierd.core.model import COMMIT_BLOCK, BlockStatus, Durability, StructArray, TierKind
from tierd.core.plan import Codes, GroupQuery, PutQuery, Reserved
from tierd.errors import CorruptRecord, InvalidArgument
from tierd.server import wire
from tierd.server.guard import Caller
from tierd.tiers.checksum import record_checksum

CHUNK_BYTES = 1 << 20


async def first_chunk(chunks: AsyncIterator[pb.PutChunk]) -> pb.PutChunk:
    """The chunk that says what is put. Raises InvalidArgument for an empty stream."""
    async for chunk in chunks:
        if not chunk.HasField("group"):
            raise InvalidArgument("put: the first chunk names no group; send it with the group and the durability")
        return chunk
    raise InvalidArgument("put: no chunk was sent; the first one carries the group")


async def put(
    cache: Cache, caller: Caller, group: PutQuery, *, first: pb.PutChunk, chunks: AsyncIterator[pb.PutChunk]
) -> Codes:
    """Takes a group's blocks in; BlockStatus u2[n]."""
    if len(group.blocks) and not group.blocks["hash"].any(axis=1).all():
        raise InvalidArgument("put: a block without a hash; name every block of a stream")
    durability = wire.durability(first.durability)
    reserved = await cache.reserve(
        caller.session, [group], kind=TierKind.HOST, durability=durability, timeout_s=caller.left_s * 0.8
    )
    if not reserved.reservation:
        return reserved.statuses[0]
    try:
        arrived = await _receive(cache, group, reserved, first=first, chunks=chunks)
    except BaseException:
        cache.abort(caller.session, reserved.reservation)
        raise
    return await _commit(cache, caller, group, reserved, arrived=arrived, durability=durability)


async def _receive(
    cache: Cache, group: PutQuery, reserved: Reserved, *, first: pb.PutChunk, chunks: AsyncIterator[pb.PutChunk]
) -> StructArray:
    """Bytes that arrived per block, in order and each with its checksum."""
    arrived = np.zeros(len(group.blocks), dtype=np.int64)
    await _take(cache, first, group, reserved, arrived)
    async for chunk in chunks:
        await _take(cache, chunk, group, reserved, arrived)
    return arrived


async def _take(cache: Cache, chunk: pb.PutChunk, group: PutQuery, reserved: Reserved, arrived: StructArray) -> None:
    i, end = chunk.index, chunk.offset + len(chunk.data)
    if i >= len(arrived):
        raise InvalidArgument(f"chunk.index: {i} is outside the group's {len(arrived)} blocks")
    if chunk.offset != arrived[i] or end > group.blocks["length"][i] or len(chunk.data) > CHUNK_BYTES:
        raise InvalidArgument(
            f"chunk of block {i}: bytes {chunk.offset} to {end} do not follow the {arrived[i]} that are there, of "
            f"{group.blocks['length'][i]}; send a block's chunks in order, {CHUNK_BYTES} bytes at most each"
        )
    if await asyncio.to_thread(record_checksum, chunk.data) != chunk.checksum:
        raise CorruptRecord(f"chunk of block {i} at {chunk.offset}: its checksum does not hold; send the block again")
    arrived[i] = end
    if reserved.statuses[0][i] == BlockStatus.RESERVED and chunk.data:
        view = cache.view(reserved.extents[0][i])
        view[chunk.offset : end] = chunk.data


async def _commit(
    cache: Cache, caller: Caller, group: PutQuery, reserved: Reserved, *, arrived: StructArray, durability: Durability
) -> Codes:
    statuses = reserved.statuses[0].copy()
    written = np.flatnonzero(statuses == BlockStatus.RESERVED)
    whole = written[arrived[written] == group.blocks["length"][written]]
    statuses[np.setdiff1d(written, whole)] = BlockStatus.FAILED
    if not len(whole):
        cache.abort(caller.session, reserved.reservation)
        return statuses
    committed = await cache.commit(
        caller.session,
        reserved.reservation,
        _named(group, whole),
        durability=durability,
        lease=False,
        keep_open=False,
        timeout_s=caller.left_s * 0.8,
    )
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


async def get(cache: Cache, caller: Caller, group: GroupQuery, *, first: int) -> AsyncIterator[pb.GetChunk]:
    """Sends the servable blocks from number `first` on; the first chunk says how many tokens can be served."""
    if len(group.namespaces) != 1:
        raise InvalidArgument(f"get: {len(group.namespaces)} ranks; ask for one rank a call")
    lease = await cache.acquire(caller.session, [group], kind=TierKind.HOST, timeout_s=caller.left_s * 0.8)
    yield pb.GetChunk(tokens=lease.served.tokens, index=first)
    if not lease.lease:
        return
    try:
        served = lease.served.groups[0]
        for i, extent in enumerate(served.extents[0], start=served.first):
            if i >= first:
                async for chunk in _send(cache, i, extent):
                    yield chunk
    finally:
        cache.release(caller.session, [lease.lease])


async def _send(cache: Cache, index: int, extent: StructArray) -> AsyncIterator[pb.GetChunk]:
    length = int(extent["length"])
    view = cache.view(extent)[:length]
    for offset in range(0, length, CHUNK_BYTES):
        data = bytes(view[offset : offset + CHUNK_BYTES])
        yield pb.GetChunk(
            index=index,
            offset=offset,
            data=data,
            checksum=await asyncio.to_thread(record_checksum, data),
            length=length,
            status=BlockStatus.READY,
        )
