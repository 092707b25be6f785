"""Put and Get streams whose lease or reservation ends under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.cache.world import BLOCK_BYTES, SOON_S, World, opened
from tierd._proto import cache_pb2 as pb
from tierd.chunks import Chunk
from tierd.core.model import EXTENT, BlockStatus
from tierd.errors import CorruptRecord, InvalidArgument, StaleHandle
from tierd.server import streams
from tierd.server.guard import Caller
from tierd.testing import chain, content_of
from tierd.tiers.checksum import record_checksum

HALF = BLOCK_BYTES // 2
NAMES = chain(1, 2)


def _caller(world: World) -> Caller:
    return Caller(world.session, "t", is_admin=False, request="r", deadline=asyncio.get_running_loop().time() + SOON_S)


def _chunk(index: int, offset: int, *, wrong: int = 0) -> streams.PutChunk:
    data = content_of(NAMES[index], BLOCK_BYTES)[offset : offset + HALF].tobytes()
    return Chunk(pb.PutChunk(index=index, offset=offset, checksum=record_checksum(data) ^ wrong), memoryview(data))


def _head(**fields: Any) -> streams.PutChunk:
    return Chunk(pb.PutChunk(**fields), memoryview(b""))


async def _put(world: World, chunks: AsyncIterator[streams.PutChunk]) -> list[int]:
    first = _head(checksum=record_checksum(b""))
    statuses = await streams.put(world.cache, _caller(world), world.put_query(NAMES), first=first, chunks=chunks)
    return statuses.tolist()


async def test_put_then_get() -> None:
    """What a Put stream sent, a Get stream gives; and nothing stays held."""

    async def chunks() -> AsyncIterator[streams.PutChunk]:
        for i in range(2):
            for offset in (0, HALF):
                yield _chunk(i, offset)

    async with opened() as world:
        assert await _put(world, chunks()) == [BlockStatus.READY] * 2
        sent = streams.get(world.cache, _caller(world), world.query(NAMES), first=1)
        got = [pb.GetChunk.FromString(raw) async for raw in sent]
        assert got[0].tokens == 32
        assert b"".join(c.data for c in got) == content_of(NAMES[1], BLOCK_BYTES).tobytes()
        assert world.pins == 0


@pytest.mark.parametrize(("sent", "fault"), [([], "no chunk"), ([_head()], "names no group")])
async def test_a_stream_begins_with_its_group(sent: list[streams.PutChunk], fault: str) -> None:
    """An empty Put stream, and one that begins with bytes alone, are refused by name."""

    async def chunks() -> AsyncIterator[streams.PutChunk]:
        for chunk in sent:
            yield chunk

    with pytest.raises(InvalidArgument, match=fault):
        await streams.first_chunk(chunks())


async def test_streams_are_of_named_blocks_of_one_rank() -> None:
    """A Put of a block without a hash and a Get of two ranks are refused, and nothing is set aside for them."""

    async def no_chunks() -> AsyncIterator[streams.PutChunk]:
        for chunk in ():
            yield chunk

    async with opened() as world:
        group, query = world.put_query(NAMES), world.query(NAMES)
        group.blocks["hash"][1] = 0
        with pytest.raises(InvalidArgument, match="without a hash"):
            await streams.put(world.cache, _caller(world), group, first=_head(), chunks=no_chunks())
        query = replace(query, namespaces=query.namespaces * 2)
        with pytest.raises(InvalidArgument, match="2 ranks"):
            await anext(streams.get(world.cache, _caller(world), query, first=0))
        assert world.pins == 0


async def test_incomplete_block_is_not_committed() -> None:
    """A block whose bytes did not all arrive is FAILED; the one before it is stored."""

    async def chunks() -> AsyncIterator[streams.PutChunk]:
        for chunk in (_chunk(0, 0), _chunk(0, HALF), _chunk(1, 0)):
            yield chunk

    async with opened() as world:
        assert await _put(world, chunks()) == [BlockStatus.READY, BlockStatus.FAILED]
        assert world.pins == 0


async def test_wrong_checksum_ends_the_put() -> None:
    """A chunk that does not hold costs the whole Put, and no page."""

    async def chunks() -> AsyncIterator[streams.PutChunk]:
        yield _chunk(0, 0, wrong=1)

    async with opened() as world:
        with pytest.raises(CorruptRecord):
            await _put(world, chunks())
        assert world.pins == 0


@pytest.mark.parametrize("end", ["abort", "end_session"])
async def test_put_writes_to_no_page_that_it_has_lost(end: str) -> None:
    """A Put whose reservation has ended writes nothing more, though its chunks still come in."""
    async with opened() as world:
        pages = []

        async def chunks() -> AsyncIterator[streams.PutChunk]:
            yield _chunk(0, 0)
            tier = world.cache.tiers[0]
            for segment in world.cache.core.segments(0):
                reserved = np.zeros(1, dtype=EXTENT)[0]
                reserved["segment"], reserved["length"] = segment.segment, BLOCK_BYTES
                pages.append(tier.view(reserved))
            if end == "end_session":
                world.cache.end_session(world.session)
            else:
                (reservation,) = world.cache.core._sessions.get(world.session).reservations
                world.cache.abort(world.session, reservation)
            pages[0][:] = bytes(len(pages[0]))
            yield _chunk(0, HALF)

        with pytest.raises(StaleHandle):
            await _put(world, chunks())
        assert not any(pages[0])
        assert world.pins == 0


@pytest.mark.parametrize("taken", [1, 2])
async def test_get_that_is_not_read_to_its_end_holds_nothing(taken: int) -> None:
    """A Get that is left after any chunk gives its lease back."""
    async with opened() as world:
        await world.put(NAMES)
        async with aclosing(streams.get(world.cache, _caller(world), world.query(NAMES), first=0)) as stream:
            for _ in range(taken):
                await anext(stream)
            assert world.pins
        assert world.pins == 0


async def test_get_reads_no_page_that_it_has_lost() -> None:
    """A Get whose lease has ended sends no more bytes: they could be another block's."""
    async with opened() as world:
        await world.put(NAMES)
        async with aclosing(streams.get(world.cache, _caller(world), world.query(NAMES), first=0)) as stream:
            await anext(stream)
            world.cache.end_session(world.session)
            with pytest.raises(StaleHandle):
                await anext(stream)
