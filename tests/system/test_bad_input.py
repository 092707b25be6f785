"""Bad input gets a named error, loses nothing and leaves the daemon serving."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import grpc
import msgpack
import numpy as np
import pytest

from tests.depth import count
from tests.system.raw import BLOCK_BYTES, RawClient, ask, connect, hello, put_blocks
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.core.formats.model import COMMIT_BLOCK, HANDLE
from tierd.core.formats.versions import PROTO_VERSION
from tierd.errors import ERROR_KEY
from tierd.testing import SMALL, chain, content_of, is_content

KEPT = chain(7, 4)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon that gets all the bad input of this file."""
    with Daemon(SMALL.replace("[server]", "[server]\nmax_batch_blocks = 4096")) as running:
        yield running


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[RawClient]:
    """A session. Afterwards the daemon must serve the earlier blocks byte for byte."""
    with RawClient(daemon.target) as client:
        _keep_blocks(client)
        yield client
    with RawClient(daemon.target) as client:
        _check_kept(client)


def _keep_blocks(client: RawClient) -> None:
    reservation, handles = client.reserve(client.open_namespace(model="kept"), KEPT)
    for handle, name in zip(handles, KEPT, strict=True):
        if handle["status"] == pb.BLOCK_STATUS_RESERVED:
            client.page(handle, writable=True)[:] = content_of(name, BLOCK_BYTES).tobytes()
    if reservation:
        client.call(client.cache.Commit, pb.CommitRequest(reservation=reservation))


def _check_kept(client: RawClient) -> None:
    group = pb.Group(namespace=client.open_namespace(model="kept"), hashes=KEPT.tobytes())
    reply = client.call(client.cache.Acquire, pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST))
    assert reply.tokens == 64
    for handle, name in zip(np.frombuffer(reply.groups[0].handles, dtype=HANDLE), KEPT, strict=True):
        assert is_content(client.page(handle, writable=False), name)
    client.call(client.cache.Release, pb.ReleaseRequest(leases=[reply.lease]))


def _group(**fields: object) -> pb.Group:
    return pb.Group(**({"namespace": 1, "hashes": KEPT.tobytes()} | fields))


@pytest.mark.parametrize(
    ("group", "error"),
    [
        (_group(namespace=0), "NotFound"),
        (_group(namespace=4_000_000_000), "NotFound"),
        (_group(hashes=b"x" * 31), "InvalidArgument"),
        (_group(tokens=1 << 60), "InvalidArgument"),
        (_group(tokens_per_block=1 << 31), "InvalidArgument"),
        (_group(ranks=[5]), "InvalidArgument"),
        (_group(need=99), "InvalidArgument"),
        (_group(hashes=bytes(32) * 5000), "InvalidArgument"),
    ],
)
@pytest.mark.parametrize("verb", ["Lookup", "Acquire", "Prefetch"])
def test_bad_group(raw: RawClient, verb: str, group: pb.Group, error: str) -> None:
    """Every verb over groups refuses unknown namespaces, wrong sizes and oversized batches by name."""
    tier = {} if verb == "Lookup" else {"tier": pb.TIER_KIND_HOST}
    request = getattr(pb, f"{verb}Request")(groups=[group], **tier)
    assert raw.error_of(getattr(raw.cache, verb), request) == error


@pytest.mark.parametrize("tier", [pb.TIER_KIND_DEVICE, pb.TIER_KIND_NVME, pb.TIER_KIND_ARCHIVE])
def test_tier_that_cannot_be_mapped(raw: RawClient, tier: int) -> None:
    """The daemon refuses handles into a tier that is absent or not memory."""
    assert raw.error_of(raw.cache.Acquire, pb.AcquireRequest(groups=[_group()], tier=tier)) == "InvalidArgument"


@pytest.mark.parametrize(
    "blocks",
    [
        put_blocks(KEPT, length=BLOCK_BYTES + 1).tobytes(),
        put_blocks(KEPT, length=0).tobytes(),
        put_blocks(KEPT, tokens=17).tobytes(),
        put_blocks(KEPT, tokens=1).tobytes(),
        put_blocks(np.tile(KEPT, (1100, 1))).tobytes(),
        b"y" * 39,
    ],
)
def test_bad_reserve(raw: RawClient, blocks: bytes) -> None:
    """A Reserve beyond the namespace's lengths, tokens or batch is refused and reserves no page."""
    namespace = raw.open_namespace()
    request = pb.ReserveRequest(groups=[pb.PutGroup(namespace=namespace, blocks=blocks)], tier=pb.TIER_KIND_HOST)
    assert raw.error_of(raw.cache.Reserve, request) == "InvalidArgument"
    assert raw.call(raw.admin.Status, apb.StatusRequest()).reservations == 0


@pytest.mark.parametrize(
    "spec",
    [
        {"model": "", "tokens_per_block": 16, "block_bytes": 4096},
        {"model": "m", "tokens_per_block": 0, "block_bytes": 4096},
        {"model": "m", "tokens_per_block": 16, "block_bytes": 0},
        {"model": "m", "tokens_per_block": 16, "block_bytes": 1 << 30},
        {"model": "m", "tokens_per_block": 16, "block_bytes": 1 << 63},
        {"model": "m", "tokens_per_block": 16, "block_bytes": 4096, "rank_count": 1 << 31},
    ],
)
def test_bad_namespace(raw: RawClient, spec: dict[str, object]) -> None:
    """A namespace whose blocks fit no tier is refused."""
    assert raw.error_of(raw.cache.OpenNamespace, pb.OpenNamespaceRequest(**spec)) == "InvalidArgument"


def test_foreign_lease_and_reservation(raw: RawClient, daemon: Daemon) -> None:
    """A session cannot commit, abort, report on or release another session's pages."""
    namespace = raw.open_namespace()
    reservation, _ = raw.reserve(namespace, chain(8, 2))
    with RawClient(daemon.target) as other:
        assert other.error_of(other.cache.Commit, pb.CommitRequest(reservation=reservation)) == "NotFound"
        other.error_of(other.cache.Abort, pb.AbortRequest(reservation=reservation))
        other.call(other.cache.Release, pb.ReleaseRequest(leases=[1, 2, 3, 1 << 63]))
    assert raw.call(raw.admin.Status, apb.StatusRequest()).reservations == 1
    raw.call(raw.cache.Abort, pb.AbortRequest(reservation=reservation))


@pytest.mark.parametrize(
    "change",
    [{"index": 2}, {"index": 1 << 31}, {"length": BLOCK_BYTES * 2}, {"length": 0}, {"tokens": 0}, {"hash": 0}],
)
def test_bad_commit(raw: RawClient, change: dict[str, int]) -> None:
    """A commit beyond its reservation, or without a hash, is refused, and the reservation stays."""
    reservation, _ = raw.reserve(raw.open_namespace(), chain(9, 2))
    blocks = np.zeros(1, dtype=COMMIT_BLOCK)
    blocks["hash"], blocks["tokens"], blocks["length"] = chain(9, 1), 16, BLOCK_BYTES
    for name, value in change.items():
        blocks[name] = value
    request = pb.CommitRequest(reservation=reservation, blocks=pb.CommitGroup(blocks=blocks.tobytes()))
    assert raw.error_of(raw.cache.Commit, request) == "InvalidArgument"
    raw.call(raw.cache.Abort, pb.AbortRequest(reservation=reservation))


@pytest.mark.parametrize("token", ["", "nonsense", "0.0", "ffff.0123456789abcdef0123456789abcdef", "f" * 200])
def test_unknown_token(raw: RawClient, token: str) -> None:
    """A call without a good token is refused before its handler runs."""
    raw.metadata = (("tierd-session", token),)
    assert raw.error_of(raw.cache.Lookup, pb.LookupRequest(groups=[_group()])) == "SessionLost"


@pytest.mark.parametrize(
    "message",
    [
        b"garbage",
        b"\xc1",
        b"\x00" * 4000,
        b"\x91" * 4000,
        b"x" * 60_000,
        msgpack.packb([1, 2]),
        msgpack.packb({}),
        msgpack.packb({"op": None}),
        msgpack.packb({"op": "map", "tier": 0, "segment": 0}),
        msgpack.packb(hello(proto=PROTO_VERSION - 1)),
        msgpack.packb(hello(proto=PROTO_VERSION + 1)),
        msgpack.packb(hello(name=5)),
        msgpack.packb(hello(credential="wrong")),
        msgpack.packb(hello(credential={"a": []})),
    ],
)
def test_garbage_on_the_session_socket(raw: RawClient, daemon: Daemon, message: bytes) -> None:
    """A message before a good hello gets a named refusal, and the daemon closes the connection."""
    with connect(daemon.target) as connection:
        reply, _ = ask(connection, message)
        assert reply["ok"] is False and reply["error"] and reply["message"]
        assert connection.recv(10) == b""


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "map", "tier": 0, "segment": 1 << 31},
        {"op": "map", "tier": 1, "segment": 1},
        {"op": "map", "tier": 900, "segment": 1},
        {"op": "forget", "session": 1},
    ],
)
def test_unknown_segment(raw: RawClient, request_: dict[str, object]) -> None:
    """A request for an unknown segment or verb is refused by name, without a descriptor."""
    reply, fds = ask(raw.socket, request_)
    assert reply["ok"] is False and reply["error"] == "NotFound" and not fds


def test_garbage_on_the_grpc_socket(raw: RawClient, daemon: Daemon) -> None:
    """Bytes that are not HTTP/2 end only their connection."""
    noise = np.random.default_rng(1)
    for size in (0, 1, 24, 5000):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{daemon.target}/tierd.sock")
            connection.sendall(noise.bytes(size))
            connection.shutdown(socket.SHUT_WR)


def test_mutated_messages(raw: RawClient) -> None:
    """Random bytes as a request to any method get an answer or a named error, never a fault of the daemon."""
    noise, rounds = np.random.default_rng(2), count(test=20, nightly=20, weekly=200)
    seed = pb.AcquireRequest(groups=[_group(ranks=[0], tokens=64)], tier=1).SerializeToString()
    for verb in (
        "OpenNamespace",
        "Lookup",
        "Acquire",
        "Release",
        "Reserve",
        "Commit",
        "Abort",
        "Prefetch",
        "ReportAttention",
    ):
        method = raw._channel.unary_unary(f"/tierd.v1.Cache/{verb}")
        for _ in range(rounds):
            data = bytearray(seed)
            for place in noise.integers(0, len(data), size=8):
                data[place] = noise.integers(0, 256)
            fault = _fault_of(method, bytes(data), raw.metadata)
            assert not fault, f"{verb}: {fault}"


def _fault_of(method: grpc.UnaryUnaryMultiCallable, message: bytes, metadata: tuple[tuple[str, str], ...]) -> str:
    """Empty for an answer or an error that the daemon names."""
    try:
        method(message, metadata=metadata, timeout=15)
    except grpc.RpcError as error:
        return "" if ERROR_KEY in dict(error.trailing_metadata() or ()) else f"{error.code()} {error.details()}"
    return ""


def test_oversized_message(raw: RawClient) -> None:
    """The transport refuses a message above the limit."""
    huge = pb.LookupRequest(groups=[_group(hashes=bytes(9 << 20))])
    assert "RESOURCE_EXHAUSTED" in raw.error_of(raw.cache.Lookup, huge)


def test_broken_put_stream(raw: RawClient) -> None:
    """A chunk with a wrong checksum, out of order or beyond its block is refused, and its pages are freed."""
    namespace, name = raw.open_namespace(), chain(10, 1)
    group = pb.PutGroup(namespace=namespace, blocks=put_blocks(name).tobytes())
    for chunk in (
        pb.PutChunk(data=b"x", checksum=1),
        pb.PutChunk(data=b"x", offset=1),
        pb.PutChunk(data=b"x" * (BLOCK_BYTES + 1)),
        pb.PutChunk(index=3),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            raw.cache.Put(iter([pb.PutChunk(group=group), chunk]), metadata=raw.metadata, timeout=15)
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS)
    assert raw.call(raw.admin.Status, apb.StatusRequest()).reservations == 0


def test_bad_operator(raw: RawClient) -> None:
    """The daemon refuses an operator's bad arguments by name."""
    assert raw.error_of(raw.admin.Inspect, apb.InspectRequest(hash="zz")) == "InvalidArgument"
    assert raw.error_of(raw.admin.Inspect, apb.InspectRequest(hash="0" * 64)) == "NotFound"
    assert raw.error_of(raw.admin.Evict, apb.EvictRequest(tier="host.9")) == "NotFound"
    assert raw.error_of(raw.admin.Blocks, apb.BlocksRequest(sort="nonsense")) == "InvalidArgument"
    assert raw.error_of(raw.admin.BumpEpoch, apb.BumpEpochRequest(model="nonsense")) == "NotFound"
