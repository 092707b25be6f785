"""Chunks of puts and gets over TCP, without a daemon."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.noise import bf16_noise
from tierd._proto import cache_pb2 as pb
from tierd.client.transport.tcp import Assembly, put_chunks
from tierd.core.formats.model import BlockStatus
from tierd.tcp.chunks import CHUNK_BYTES, Codec
from tierd.tcp.codecs import open_codec, shortest

LZ4 = open_codec("lz4", whose="this test")
GET = Codec(pb.GetChunk)


@pytest.mark.parametrize("codec", [None, LZ4], ids=["plain", "lz4"])
@given(lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=6), step=st.integers(1, 4000), data=st.data())
def test_assembly(codec, lengths, step, data):
    """Blocks arrive whole; one bad, missing or repeated chunk ends the prefix, with or without codec."""
    blocks = [np.random.default_rng(n).integers(0, 1 << n % 9, n, dtype=np.uint8) for n in lengths]
    chunks = []
    for i, block in enumerate(blocks):
        for offset in range(0, len(block), step):
            part = block[offset : offset + step].tobytes()
            chunk = pb.GetChunk(index=i, offset=offset, length=len(block), status=1)
            chunk.data, chunk.plain_length = (part, 0) if codec is None else shortest(codec, part)
            chunk.checksum = xxhash.xxh3_64_intdigest(part)
            chunks.append((i, chunk))
    at = data.draw(st.integers(0, len(chunks) - 1))
    fault = data.draw(
        st.sampled_from(["none", "byte", "checksum", "drop", "twice", "status", "length", "plain_length"])
    )
    index, chunk = chunks[at]
    if fault == "byte":
        chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
    elif fault == "checksum":
        chunk.checksum ^= 1
    elif fault == "status":
        chunk.status = int(BlockStatus.CORRUPT)
    elif fault == "length":
        chunk.length = max(0, chunk.length - step)
    elif fault == "plain_length":
        chunk.plain_length += 1
    elif fault == "drop":
        del chunks[at]
    elif fault == "twice":
        chunks.insert(at, chunks[at])
    assembly = Assembly(lambda _, length: np.zeros(length, dtype=np.uint8), codec=codec)
    for _, chunk in [(0, pb.GetChunk(tokens=5)), *chunks]:
        assembly.take(GET.decode(chunk.SerializeToString()))
    for got, block in zip(assembly.whole, blocks, strict=False):
        if fault != "length":
            assert np.array_equal(got, block)
    if fault == "none":
        assert len(assembly.whole) == len(blocks)
    elif fault not in ("twice", "length"):
        assert len(assembly.whole) <= index


def test_put_chunks():
    """A put's chunks cover every byte once, in order, within the chunk size, with right checksums."""
    pieces = [np.arange(n, dtype=np.uint32).view(np.uint8) for n in (10, 600_000)]
    sent = put_chunks(pb.PutGroup(namespace=7), pieces, durable=True)
    first, *rest = map(pb.PutChunk.FromString, sent)
    assert (first.group.namespace, first.durability, first.data) == (7, 1, b"")
    for index, piece in enumerate(pieces):
        mine = [chunk for chunk in rest if chunk.index == index]
        assert b"".join(chunk.data for chunk in mine) == piece.tobytes()
        assert [chunk.offset for chunk in mine] == [i * CHUNK_BYTES for i in range(len(mine))]
    assert all(xxhash.xxh3_64_intdigest(chunk.data) == chunk.checksum for chunk in rest)


def test_put_chunks_of_a_codec():
    """The first chunk names the codec; chunks that shrink are encoded; checksums are of the plain bytes."""
    noise, random = bf16_noise(1, 3 << 20), np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    first, *rest = map(pb.PutChunk.FromString, put_chunks(pb.PutGroup(), [noise, random], durable=False, codec=LZ4))
    assert (first.codec, first.plain_length, len(rest)) == ("lz4", 0, 6)
    assert [chunk.plain_length for chunk in rest] == 3 * [1 << 20] + 3 * [0]
    plain = [LZ4.decode(c.data, length=c.plain_length) if c.plain_length else memoryview(c.data) for c in rest]
    assert b"".join(plain) == noise.tobytes() + random.tobytes()
    assert [xxhash.xxh3_64_intdigest(each) for each in plain] == [chunk.checksum for chunk in rest]
    assert sum(len(chunk.data) for chunk in rest[:3]) < 0.9 * len(noise)


@pytest.mark.parametrize("form", ["not asked for", "does not decode", "more than a chunk"])
def test_assembly_takes_no_data_that_it_cannot_decode(form):
    """Chunks that are broken or in an unrequested encoding end the prefix, with any checksum."""
    data = bytes(9) if form == "does not decode" else LZ4.encode(bytes(100))
    length = CHUNK_BYTES + 1 if form == "more than a chunk" else 100
    for plain in (bytes(100), b"", data):
        assembly = Assembly(
            lambda _, length: np.zeros(length, dtype=np.uint8), codec=None if form == "not asked for" else LZ4
        )
        chunk = pb.GetChunk(length=length, data=data, plain_length=length, status=1)
        chunk.checksum = xxhash.xxh3_64_intdigest(plain)
        good = pb.GetChunk(length=length, data=bytes(length), status=1)
        good.checksum = xxhash.xxh3_64_intdigest(bytes(length))
        for each in (chunk, good):
            assembly.take(GET.decode(each.SerializeToString()))
        assert assembly.whole == []
