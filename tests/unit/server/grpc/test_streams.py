"""Put and Get streams whose lease or reservation ends during the stream."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.unit.cache.world import BLOCK_BYTES, SOON_S, World, opened
from tierd._proto import cache_pb2 as pb
from tierd.checksum import record_checksum
from tierd.core.formats.model import EXTENT, BlockStatus
from tierd.errors import CorruptRecord, InvalidArgument, StaleHandle, TierdError
from tierd.server.grpc import streams
from tierd.server.grpc.caller import Caller
from tierd.tcp.chunks import CHUNK_BYTES, Chunk
from tierd.tcp.codecs import WIRE_CODECS, Bytes, Lz4Planes
from tierd.testing import chain, content_of

HALF = BLOCK_BYTES // 2
NAMES = chain(1, 2)
LZ4 = Lz4Planes()


def _caller(world: World) -> Caller:
    return Caller(world.session, "t", is_admin=False, request="r", deadline=asyncio.get_running_loop().time() + SOON_S)


def _chunk(index: int, offset: int, *, wrong: int = 0) -> streams.PutChunk:
    data = content_of(NAMES[index], BLOCK_BYTES)[offset : offset + HALF].tobytes()
    return Chunk(pb.PutChunk(index=index, offset=offset, checksum=record_checksum(data) ^ wrong), memoryview(data))


def _encoded(index: int, offset: int, *, wrong: int = 0) -> streams.PutChunk:
    """The same chunk encoded by lz4, even if that is longer."""
    plain = _chunk(index, offset)
    plain.head.plain_length = HALF
    data = bytearray(LZ4.encode(plain.data))
    data[-1] ^= wrong
    return Chunk(plain.head, memoryview(bytes(data)))


def _head(**fields: Any) -> streams.PutChunk:
    return Chunk(pb.PutChunk(**fields), memoryview(b""))


async def _put(world: World, chunks: AsyncIterator[streams.PutChunk], *, codec: str = "") -> list[int]:
    first = _head(checksum=record_checksum(b""), codec=codec)
    statuses = await streams.put(world.cache, _caller(world), world.put_query(NAMES), first=first, chunks=chunks)
    return statuses.tolist()


async def test_put_then_get() -> None:
    """A Get stream returns the bytes of a Put stream, and no page stays pinned."""

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


async def _got(world: World) -> tuple[bytes, int]:
    """The bytes of all blocks by a Get with lz4, and the number of encoded chunks."""
    sent = streams.get(world.cache, _caller(world), world.query(NAMES), first=0, codec="lz4")
    chunks = [pb.GetChunk.FromString(raw) async for raw in sent][1:]
    plain = [LZ4.decode(c.data, length=c.plain_length) if c.plain_length else memoryview(c.data) for c in chunks]
    assert [record_checksum(each) for each in plain] == [chunk.checksum for chunk in chunks]
    return b"".join(plain), sum(bool(chunk.plain_length) for chunk in chunks)


async def test_put_then_get_by_a_codec() -> None:
    """With a codec a Get returns the plain bytes of a Put; only chunks that shrink are encoded."""

    async def chunks() -> AsyncIterator[streams.PutChunk]:
        for chunk in (_encoded(0, 0), _chunk(0, HALF), _encoded(1, 0), _encoded(1, HALF)):
            yield chunk

    async with opened() as world:
        assert await _put(world, chunks(), codec="lz4") == [BlockStatus.READY] * 2
        assert await _got(world) == (b"".join(content_of(name, BLOCK_BYTES).tobytes() for name in NAMES), 0)
        assert world.pins == 0


@pytest.mark.parametrize("codec", ["zip", "lz4"])
async def test_a_codec_that_is_not_there_sets_nothing_aside(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """A codec that is unknown or lacks its package is refused before any reservation, lease or chunk."""
    monkeypatch.setitem(sys.modules, "lz4", None)

    async def chunks() -> AsyncIterator[streams.PutChunk]:
        pytest.fail("a chunk was asked for")
        yield _chunk(0, 0)

    async with opened() as world:
        with pytest.raises(TierdError, match="the daemon"):
            await _put(world, chunks(), codec=codec)
        with pytest.raises(TierdError, match="the daemon"):
            await anext(streams.get(world.cache, _caller(world), world.query(NAMES), first=0, codec=codec))
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
    """A Put of a block without a hash and a Get of two ranks are refused and reserve nothing."""

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


@pytest.mark.parametrize("fault", ["byte", "length", "old daemon"])
async def test_a_chunk_that_does_not_decode_ends_the_put(fault: str) -> None:
    """A broken encoded chunk, one of wrong length, or one without a codec is CorruptRecord; no page leaks."""

    async def chunks() -> AsyncIterator[streams.PutChunk]:
        chunk = _encoded(0, 0, wrong=fault == "byte")
        if fault == "length":
            chunk.head.plain_length = CHUNK_BYTES + 1
        if fault == "old daemon":
            chunk.head.ClearField("plain_length")
        yield chunk

    async with opened() as world:
        with pytest.raises(CorruptRecord):
            await _put(world, chunks(), codec="" if fault == "old daemon" else "lz4")
        assert world.pins == 0
        assert world.cache.lookup(world.session, [world.query(NAMES)]).tokens == 0


class Busy(Lz4Planes):
    """Calls `meanwhile` before each chunk, and records the threads."""

    name = "busy"
    threads: ClassVar[set[int]] = set()
    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def encode(self, plain: Bytes) -> bytes:
        self.threads.add(threading.get_ident())
        type(self).meanwhile()
        return super().encode(plain)

    def decode(self, data: Bytes, *, length: int) -> memoryview:
        self.threads.add(threading.get_ident())
        type(self).meanwhile()
        return super().decode(data, length=length)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> type[Busy]:
    """A codec whose work a test can choose."""
    monkeypatch.setitem(WIRE_CODECS, Busy.name, Busy)
    monkeypatch.setattr(Busy, "threads", set())
    monkeypatch.setattr(Busy, "meanwhile", staticmethod(lambda: None))
    return Busy


async def test_the_loop_goes_on_while_a_chunk_is_encoded_or_decoded(busy: type[Busy]) -> None:
    """The daemon's event loop runs other work while the codec encodes or decodes a chunk."""
    loop, turns = asyncio.get_running_loop(), []
    busy.meanwhile = staticmethod(lambda: asyncio.run_coroutine_threadsafe(_note(turns), loop).result(SOON_S))

    async def chunks() -> AsyncIterator[streams.PutChunk]:
        for chunk in (_encoded(0, 0), _encoded(0, HALF), _encoded(1, 0), _encoded(1, HALF)):
            yield chunk

    async with opened() as world:
        assert await _put(world, chunks(), codec=busy.name) == [BlockStatus.READY] * 2
        assert len(turns) == 4
        _ = [
            raw async for raw in streams.get(world.cache, _caller(world), world.query(NAMES), first=0, codec=busy.name)
        ]
        assert len(turns) == 6
    assert threading.get_ident() not in busy.threads


async def _note(turns: list[None]) -> None:
    turns.append(None)


async def test_a_page_that_is_lost_while_its_chunk_is_encoded(busy: type[Busy]) -> None:
    """A Get encodes the page's bytes at lookup, even if its lease ends and others write to the page."""
    async with opened() as world:
        reserved = await world.reserve(NAMES)
        for extent in reserved.extents[0]:
            world.page(extent)[:] = bytes(range(256)) * (BLOCK_BYTES // 256)
        await world.commit(reserved.reservation)

        def meanwhile() -> None:
            world.page(reserved.extents[0][0])[:] = bytes(BLOCK_BYTES)

        busy.meanwhile = staticmethod(meanwhile)
        async with aclosing(
            streams.get(world.cache, _caller(world), world.query(NAMES), first=0, codec=busy.name)
        ) as stream:
            await anext(stream)
            chunk = pb.GetChunk.FromString(await anext(stream))
        assert 0 < len(chunk.data) < chunk.plain_length == BLOCK_BYTES
        assert LZ4.decode(chunk.data, length=BLOCK_BYTES) == bytes(range(256)) * (BLOCK_BYTES // 256)
        assert world.pins == 0


async def test_a_reservation_that_ends_while_its_chunk_is_decoded(busy: type[Busy]) -> None:
    """A Put whose reservation ends while a chunk is decoded writes nothing."""
    async with opened() as world:
        loop, pages = asyncio.get_running_loop(), []

        async def end() -> None:
            for segment in world.cache.core.segments(0):
                reserved = np.zeros(1, dtype=EXTENT)[0]
                reserved["segment"], reserved["length"] = segment.segment, BLOCK_BYTES
                pages.append(world.cache.tiers[0].view(reserved))
                pages[-1][:] = bytes(BLOCK_BYTES)
            world.cache.end_session(world.session)

        busy.meanwhile = staticmethod(lambda: asyncio.run_coroutine_threadsafe(end(), loop).result(SOON_S))

        async def chunks() -> AsyncIterator[streams.PutChunk]:
            yield _encoded(0, 0)

        with pytest.raises(StaleHandle):
            await _put(world, chunks(), codec=busy.name)
        assert pages and not any(any(page) for page in pages)
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
    """A chunk with a wrong checksum fails the whole Put, and no page leaks."""

    async def chunks() -> AsyncIterator[streams.PutChunk]:
        yield _chunk(0, 0, wrong=1)

    async with opened() as world:
        with pytest.raises(CorruptRecord):
            await _put(world, chunks())
        assert world.pins == 0


@pytest.mark.parametrize("end", ["abort", "end_session"])
async def test_put_writes_to_no_page_that_it_has_lost(end: str) -> None:
    """A Put whose reservation has ended writes nothing more, although its chunks still arrive."""
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
    """A Get that is closed after any chunk releases its lease."""
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
