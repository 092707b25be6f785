"""Chunks on the wire decode and encode as protobuf does it, for any fields in between."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from tierd._proto import cache_pb2 as pb
from tierd.tcp.chunks import FIELDS_MAX, Codec

PUT: Codec[pb.PutChunk] = Codec(pb.PutChunk)
FIELDS = st.sampled_from(
    [
        pb.PutChunk(index=7).SerializeToString(),
        pb.PutChunk(offset=1 << 40).SerializeToString(),
        pb.PutChunk(checksum=(1 << 64) - 1).SerializeToString(),
        pb.PutChunk(data=b"x" * 200).SerializeToString(),
        b"\x2a\x00",
        pb.PutChunk(group=pb.PutGroup(namespace=3, blocks=b"b" * 50)).SerializeToString(),
        pb.PutChunk(data=b"other").SerializeToString(),
        b"\x2a\x83\x80\x80\x80\x80\x80\x00abc",
        b"\x2a\x83\x00abc",  # bytes with an overlong length
        b"\xaa\x00\x03abc",  # and an overlong tag
        b"\x28\x05",  # their field number as a varint
        b"\xfa\x7f\x02ab",  # an unknown field
        b"\xf5\x7f\x00\x00\x00\x00",
        b"\x2b\x2c",  # a group
    ]
)
FAULTS = st.sampled_from(
    [
        b"",
        b"\x07",  # an invalid wire type
        b"\x02\x00",  # a field without a number
        b"\x80" * 11,
        b"\x2a\x05abc",
        b"\xaa\x80\x80\x80\x80\x00\x03abc",  # a tag of six bytes
    ]
)


@example([], b"\xaa\x80\x80\x80\x80\x00\x03abc", 0)
@example([b"\x2a\x01a", b"\x18\x07", b"\x2a\x01b"], b"", 0)
@example([b"\x2a\x83\x80\x80\x80\x00abc", b"\x18\x07"], b"", 0)
@given(st.lists(FIELDS, max_size=FIELDS_MAX + 2), FAULTS, st.integers(0, 5))
def test_decodes_as_protobuf_does(fields: list[bytes], fault: bytes, cut: int) -> None:
    """Fields in any order, repeated, unknown or cut off: the codec agrees with protobuf."""
    raw = b"".join([*fields, fault])
    raw = raw[: len(raw) - cut] if cut < len(raw) else raw
    try:
        expected = pb.PutChunk.FromString(raw)
    except DecodeError:
        with pytest.raises(DecodeError):
            PUT.decode(raw)
        return
    chunk = PUT.decode(raw)
    assert bytes(chunk.data) == expected.data
    expected.ClearField("data")
    assert chunk.head == expected


@given(st.integers(0, 300), st.integers(0, 1 << 31))
def test_encodes_what_protobuf_reads(length: int, index: int) -> None:
    """A head and bytes become the message that holds both; numpy's bytes too."""
    data = np.arange(length, dtype=np.uint8 if length < 256 else np.uint16).view(np.uint8)
    message = pb.PutChunk.FromString(PUT.encode(pb.PutChunk(index=index, checksum=5), data))
    assert message == pb.PutChunk(index=index, checksum=5, data=data.tobytes())


def test_bytes_are_read_where_they_arrived() -> None:
    """A decoded chunk holds no copy of its bytes."""
    raw = PUT.encode(pb.PutChunk(index=1), b"y" * 1000)
    assert PUT.decode(raw).data.obj is raw


def test_a_message_of_many_fields_is_left_to_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client can keep the daemon counting fields in Python."""
    seen = []
    real = Codec._left_to_protobuf
    monkeypatch.setattr(Codec, "_left_to_protobuf", lambda self, raw: seen.append(len(raw)) or real(self, raw))
    PUT.decode(pb.PutChunk(index=1).SerializeToString() * FIELDS_MAX)
    assert seen == []
    assert PUT.decode(pb.PutChunk(index=9).SerializeToString() * 100_000).head.index == 9
    assert seen == [200_000]
