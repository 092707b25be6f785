"""The protocol without I/O."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.noise import bf16_noise
from tests.unit.client.conftest import CLASS_BYTES, SPEC
from tierd import errors
from tierd._proto import cache_pb2 as pb
from tierd.chunks import CHUNK_BYTES
from tierd.client import protocol
from tierd.client.protocol import Assembly, LeasedGroup, error_of, put_chunks, valid_blocks
from tierd.client.values import About, EventKind, OpenedNamespace, PutGroup, PutResult
from tierd.core.block import NamespaceSpec
from tierd.core.model import HANDLE, BlockStatus
from tierd.errors import ERROR_KEY, GRPC_STATUS, InvalidArgument, OperatorError, TierdError
from tierd.wire_codecs import open_codec, shortest

NS = OpenedNamespace(SPEC, id=7, digest=bytes(32), epoch=1)


@pytest.mark.parametrize("kind", GRPC_STATUS)
def test_every_error_comes_back(kind):
    """The name in the trailing metadata gives the very class back, with its words."""
    error = error_of(kind.__name__, "thing: fault", status=GRPC_STATUS[kind])
    assert (type(error), str(error)) == (kind, "thing: fault")


@pytest.mark.parametrize("name", [None, "", "Exception", "ERROR_KEY", "GRPC_STATUS", "annotations", "NoSuchError"])
def test_foreign_names_are_no_classes(name):
    """A name that is no error of ours falls back to the status, and what is unknown is for an operator."""
    assert type(error_of(name, "m", status="UNAVAILABLE")) is errors.Unavailable
    assert type(error_of(name, "m", status="INTERNAL")) is OperatorError
    assert ERROR_KEY == "tierd-error"


LZ4 = open_codec("lz4", whose="this test")


@pytest.mark.parametrize("codec", [None, LZ4], ids=["plain", "lz4"])
@given(lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=6), step=st.integers(1, 4000), data=st.data())
def test_assembly(codec, lengths, step, data):
    """Blocks come out whole and right; one damaged, missing or repeated chunk ends the prefix before its block, never later. So it is where some come encoded."""
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
        assembly.take(protocol.GET.decode(chunk.SerializeToString()))
    for got, block in zip(assembly.whole, blocks, strict=False):
        if fault != "length":
            assert np.array_equal(got, block)
    if fault == "none":
        assert len(assembly.whole) == len(blocks)
    elif fault not in ("twice", "length"):
        assert len(assembly.whole) <= index


def test_put_chunks():
    """A put's chunks cover every byte once, in order, at most a chunk's size each, with checksums that hold."""
    pieces = [np.arange(n, dtype=np.uint32).view(np.uint8) for n in (10, 600_000)]
    sent = put_chunks(pb.PutGroup(namespace=7), pieces, durable=True)
    first, *rest = map(pb.PutChunk.FromString, sent)
    assert (first.group.namespace, first.durability, first.data) == (7, 1, b"")
    for index, piece in enumerate(pieces):
        mine = [chunk for chunk in rest if chunk.index == index]
        assert b"".join(chunk.data for chunk in mine) == piece.tobytes()
        assert [chunk.offset for chunk in mine] == [i * protocol.CHUNK_BYTES for i in range(len(mine))]
    assert all(xxhash.xxh3_64_intdigest(chunk.data) == chunk.checksum for chunk in rest)


def test_put_chunks_of_a_codec():
    """The first chunk names the codec, each that is shorter so is encoded and says its length, and checksums are of what was put."""
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
    """Chunks of an encoding that was not asked for, and broken ones, end the prefix, whatever their checksum says."""
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
            assembly.take(protocol.GET.decode(each.SerializeToString()))
        assert assembly.whole == []


@pytest.mark.parametrize(("codecs", "agreed"), [([], None), (["other"], None), (["other", "lz4"], LZ4)])
def test_a_codec_is_what_both_sides_know(codecs, agreed):
    """What the daemon does not name is not asked of it, and a client that wants none gets none."""
    reply = pb.OpenNamespaceReply(codecs=codecs)
    assert protocol.agreed_codec(LZ4, reply) is agreed
    assert protocol.agreed_codec(None, reply) is None


def test_lengths_follow_tokens():
    """A short block's length is its share of a full one's unless it is given."""
    group = PutGroup(NS, np.zeros((3, 32), dtype=np.uint8), tokens=33)
    assert protocol.put_lengths(group).tolist() == [CLASS_BYTES, CLASS_BYTES, CLASS_BYTES // 16]


@pytest.mark.parametrize(
    ("said", "priorities", "retention_s"),
    [
        ({}, [], []),
        ({"priority": 90}, [90], []),
        ({"priority": 0, "retention_s": 0.25}, [0], [1]),
        ({"priority": [1, 2, 3], "retention_s": 60}, [1, 2, 3], [60]),
        ({"priority": np.array([7, 8, 9]), "retention_s": [None, 1.5, 60]}, [7, 8, 9], [0, 2, 60]),
    ],
)
def test_what_is_said_of_blocks_travels(said, priorities, retention_s):
    """A value for all or one for each; time is rounded up to seconds, None is for good."""
    message = protocol.put_group_message(PutGroup(NS, np.zeros((3, 32), dtype=np.uint8), **said))
    assert (list(message.priorities), list(message.retention_s)) == (priorities, retention_s)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"priority": 101}, "priority: 101 is no integer from 0 to 100"),
        ({"priority": -1}, "priority: -1 is no integer"),
        ({"priority": 1.5}, "priority: 1.5 is no integer"),
        ({"priority": float("nan")}, "priority: nan is no integer"),
        ({"priority": [1, 2]}, "priority: 2 for 3 blocks"),
        ({"retention_s": 5}, "retention_s: 5 of no priority"),
        ({"priority": 1, "retention_s": 0}, "retention_s: 0 is not above 0"),
        ({"priority": 1, "retention_s": [1, 2, -3]}, "retention_s: -3 is not above 0"),
        ({"priority": 1, "retention_s": 4e8}, "retention_s: 400000000.0 is not above 0 and at most 316224000"),
        ({"priority": 1, "retention_s": [1]}, "retention_s: 1 for 3 blocks"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(said, told):
    """The field, the value and the limit, before anything is sent."""
    with pytest.raises(InvalidArgument, match=told):
        protocol.put_group_message(PutGroup(NS, np.zeros((3, 32), dtype=np.uint8), **said))


@pytest.mark.parametrize(
    ("good", "blocks"),
    [([1, 1, 1, 1, 1, 1], 3), ([1, 1, 1, 1, 0, 1], 1), ([0, 1, 1, 1, 1, 1], 0), ([1, 1, 0, 1, 1, 0], 2)],
)
def test_a_block_is_good_on_every_rank(good, blocks):
    """A block that one rank has lost is lost, with all after it."""
    group = LeasedGroup(0, np.zeros((2, 3), dtype=HANDLE))
    assert valid_blocks([group], np.array(good, dtype=np.bool_)) == blocks


def test_groups_are_good_or_not():
    """Of several groups either all is good or nothing."""
    groups = [LeasedGroup(0, np.zeros((1, 2), dtype=HANDLE)), LeasedGroup(1, np.zeros((1, 1), dtype=HANDLE))]
    assert valid_blocks(groups, np.array([True, True, True])) == 2
    assert valid_blocks(groups, np.array([True, True, False])) == 0


@pytest.mark.parametrize("data", [bytes(39), bytes(41), bytes(80)])
def test_malformed_handles(data):
    """A reply that is not what the protocol promises is an operator's business, not an index error."""
    with pytest.raises(OperatorError, match="versions differ"):
        protocol.handles_of(data, count=1)


@pytest.mark.parametrize(("statuses", "stored"), [([], 0), ([1, 3], 2), ([1, 4, 1], 1), ([7], 0)])
def test_stored(statuses, stored):
    """Stored counts the prefix without a gap; a result is true if it is all."""
    result = PutResult(np.array(statuses, dtype=np.uint16))
    assert (result.stored, bool(result)) == (stored, stored == len(statuses))


@pytest.mark.parametrize("data", [b"", bytes(3), bytes(6)])
def test_malformed_statuses(data):
    """Statuses of another number of blocks are an operator's business, not a shorter answer."""
    with pytest.raises(OperatorError, match="versions differ"):
        protocol.statuses_of(data, count=2)


def test_events_come_back():
    """Each event of a message has its hashes, one row each, its kind and its place in the order."""
    name = bytes(range(32))
    sent = pb.Event(sequence=9, kind=pb.Event.KIND_STORED, tier=1, namespace=3, hashes=2 * name, reason="r")
    (event,) = protocol.events_of(pb.Events(events=[sent]))
    assert (event.sequence, event.kind, event.namespace, event.hashes.tobytes()) == (9, EventKind.STORED, 3, 2 * name)
    assert (event.tier, event.reason, event.hashes.shape) == (1, "r", (2, 32))


def test_a_group_of_ones_own_is_put_as_it_is():
    """Who has a PutGroup is not asked for lengths again."""
    group = PutGroup(NS, np.zeros((1, 32), np.uint8), lengths=[5])
    assert protocol.sequence_put(NS, group, lengths=[7, 7]) is group


def _told(about: About, *, tells: bool) -> tuple[int, int, int, int]:
    """Bytes of the engine's hashes, of their parent and of the tokens in a put's message, and hashes per block."""
    space = OpenedNamespace(NamespaceSpec("m", max(1, len(about.tokens)), 64), id=5, digest=bytes(32))
    sent = protocol.put_group_message(PutGroup(space, np.zeros((1, 32), np.uint8), about=about), tells=tells)
    return len(sent.engine_hashes), len(sent.engine_parent), len(sent.token_ids), sent.engine_per_block


def test_what_an_engine_says_is_sent_where_it_fits():
    """A daemon without events is sent nothing of the engine; tokens beyond the bound stay away alone, hashes beyond it with all that goes with them."""
    limit = protocol.ABOUT_BYTES
    full, over = np.zeros(limit // 4, "<u4"), np.zeros(limit // 4 + 1, "<u4")
    assert _told(About([b"one!"], b"zero", full), tells=False) == (0, 0, 0, 0)
    assert _told(About([b"one!"], b"zero", full), tells=True) == (4, 4, limit, 1)
    assert _told(About([b"one!"], b"zero", over), tells=True) == (4, 4, 0, 1)
    assert _told(About([bytes(limit)], b"zero", full), tells=True) == (limit, 4, limit, 1)
    assert _told(About([bytes(limit + 1)], b"zero", full), tells=True) == (0, 0, 0, 0)
    assert _told(About((), b"zero", full), tells=True) == (0, 0, limit, 0)


def test_unopened_namespaces_hash_to_nothing():
    """What no daemon has given a digest to has no hashes."""
    unopened = OpenedNamespace(SPEC)
    assert unopened.hash([1] * 32).shape == unopened.fold([b"x"]).shape == (0, 32)


def test_namespace_replies_are_checked():
    """A digest of the wrong length is refused."""
    reply = pb.OpenNamespaceReply(namespace=1, digest=b"x", epoch=1)
    with pytest.raises(OperatorError):
        protocol.take_namespace(OpenedNamespace(SPEC), reply, link=1)
    assert issubclass(InvalidArgument, TierdError)
