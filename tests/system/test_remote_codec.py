"""A codec on the wire: blocks cross TCP in fewer bytes and arrive unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.noise import bf16_noise
from tests.system.raw import put_blocks
from tests.system.relay import Damage, Relay
from tests.system.sdk import BIG, await_nothing_held, put, right
from tests.system.tcp import SECRET, free_port, remote_config
from tests.system.warm import Daemon
from tierd._proto import cache_pb2 as pb
from tierd._proto import cache_pb2_grpc
from tierd.checksum import record_checksum
from tierd.client import AsyncClient, Client, NamespaceSpec
from tierd.core.formats.model import ROOT
from tierd.errors import ERROR_KEY, CorruptRecord, Unsupported
from tierd.testing import chain

COUNT = 3
NOISE = NamespaceSpec(model="noise", tokens_per_block=16, block_bytes=(1 << 20) + (1 << 19) + 2)
"""Longer than a chunk, and no multiple of one."""
SIZE = COUNT * NOISE.block_bytes
SHORTER = 0.9
"""On the wire, blocks of noise must take less than this share of their bytes."""


def noise(seed: int) -> list[np.ndarray]:
    """Blocks of a chain."""
    return [bf16_noise(100 * seed + i, NOISE.block_bytes) for i in range(COUNT)]


class Remote:
    """A daemon, its port, and a relay in front that counts and damages bytes."""

    def __init__(self, daemon: Daemon, port: int, secret: Path, relay: Relay) -> None:
        self.daemon, self.port, self.secret, self.relay = daemon, port, str(secret), relay

    def place(self, codec: str, *, relay: Relay | None = None) -> dict[str, str]:
        """The options of a client through a relay: the daemon's own, or another."""
        options = f"?codec={codec}" if codec else ""
        target = f"127.0.0.1:{(relay or self.relay).port}{options}"
        return {"target": target, "credential_file": self.secret}


def _remotes(root: Path, **options: dict[str, str]) -> Iterator[Remote]:
    port = free_port()
    own = f'\n[identity]\ntenants = {{"{os.geteuid()}" = "remote"}}\n'
    with (
        Daemon(remote_config(root, port) + own, **options) as daemon,
        Relay(("127.0.0.1", 0), ("127.0.0.1", port)) as relay,
    ):
        yield Remote(daemon, port, root / "secret", relay)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A daemon whose local clients have the same tenant as its remote clients."""
    yield from _remotes(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A daemon that cannot import lz4."""
    root = tmp_path_factory.mktemp("bare")
    (root / "without").mkdir()
    (root / "without" / "lz4.py").write_text("raise ImportError('none here')")
    path = os.pathsep.join([str(root / "without"), *filter(None, [os.environ.get("PYTHONPATH")])])
    yield from _remotes(root, env={"PYTHONPATH": path})


@pytest.mark.parametrize("getter", ["lz4", ""])
@pytest.mark.parametrize("putter", ["lz4", ""])
def test_there_and_back(remote: Remote, putter: str, getter: str) -> None:
    """Blocks come back unchanged with a codec on either side or none; the codec reduces bytes on the wire."""
    seed, relay = 1 + 2 * bool(putter) + bool(getter), remote.relay
    blocks, names = noise(seed), chain(seed, COUNT)
    with Client(**remote.place(putter)) as writer, Client(**remote.place(getter)) as reader:
        space = writer.open_namespace(NOISE)
        before = relay.passed
        assert writer.put(space, names, blocks, durable=False).stored == COUNT
        put_bytes, before = relay.passed - before, relay.passed
        got = reader.get(reader.open_namespace(NOISE), names)
        get_bytes = relay.passed - before
        assert got.blocks == COUNT and all(map(np.array_equal, got.views, blocks))
        out = np.zeros((COUNT, NOISE.block_bytes), dtype=np.uint8)
        assert reader.get(reader.open_namespace(NOISE), names, out=out).blocks == COUNT
        assert np.array_equal(out, blocks)
    with Client(remote.daemon.target) as local:
        assert all(map(np.array_equal, local.get(local.open_namespace(NOISE), names).views, blocks))
    for codec, passed in ((putter, put_bytes), (getter, get_bytes)):
        assert passed < SHORTER * SIZE if codec else passed >= SIZE


async def test_of_an_async_client(remote: Remote) -> None:
    """AsyncClient accepts a codec as Client does."""
    blocks, names = noise(9), chain(9, COUNT)
    client, before = AsyncClient(**remote.place("lz4")), remote.relay.passed
    async with client:
        space = await client.open_namespace(NOISE)
        assert (await client.put(space, names, blocks)).stored == COUNT
        got = await client.get(space, names)
    assert got.blocks == COUNT and all(map(np.array_equal, got.views, blocks))
    assert remote.relay.passed - before < SHORTER * 2 * SIZE


def test_random_bytes_go_as_they_are(remote: Remote) -> None:
    """Incompressible blocks take at most 1 % more than their bytes and come back right."""
    with Client(**remote.place("lz4")) as client:
        space, before = client.open_namespace(BIG), remote.relay.passed
        assert put(client, space, 20, COUNT).stored == COUNT
        assert right(client.get(space, chain(20, COUNT)).views, 20) == COUNT
        assert remote.relay.passed - before < 1.01 * 2 * COUNT * BIG.block_bytes
    await_nothing_held(remote.daemon, "streams by a codec")


@pytest.mark.parametrize("verb", ["put", "get"])
def test_damage(remote: Remote, verb: str) -> None:
    """A bit flip in an encoded chunk raises CorruptRecord in a put and ends the prefix of a get."""
    names, blocks = chain(30 + (verb == "get"), COUNT), noise(30)
    damage = Damage(blocks[1][0 : 1 << 20 : 2])  # mantissas, which stay plain inside an encoded message
    with (
        Relay(("127.0.0.1", 0), ("127.0.0.1", remote.port), change=damage) as relay,
        Client(**remote.place("lz4")) as good,
        Client(**remote.place("lz4", relay=relay)) as client,
    ):
        space, other = client.open_namespace(NOISE), good.open_namespace(NOISE)
        if verb == "put":
            with pytest.raises(CorruptRecord):
                client.put(space, names, blocks)
            assert good.lookup(other, names[1:2]).tokens == 0
        else:
            assert good.put(other, names, blocks)
            assert client.get(space, names).blocks == 1
        assert damage.done == 1
        assert client.put(space, names, blocks)
        assert all(map(np.array_equal, client.get(space, names).views, blocks))
        assert good.get(other, names).blocks == COUNT


# -- unknown codecs


def test_daemon_without_the_package(bare: Remote) -> None:
    """A daemon without lz4 refuses its use with the remedy and stores nothing; other clients are served."""
    names, blocks = chain(1, COUNT), noise(1)
    with Client(**bare.place("lz4")) as client, Client(**bare.place("")) as plain:
        space, other = client.open_namespace(NOISE), plain.open_namespace(NOISE)
        with pytest.raises(Unsupported, match=r"the daemon does not have .* pip install 'tierd\[lz4\]'"):
            client.put(space, names, blocks)
        assert plain.lookup(other, names).tokens == 0
        assert plain.put(other, names, blocks).stored == COUNT
        with pytest.raises(Unsupported, match="lz4"):
            client.get(space, names)
        assert plain.get(other, names).blocks == COUNT
    with Client(**bare.place("lz4"), best_effort=True) as careless:
        assert not careless.get(careless.open_namespace(NOISE), names)
    await_nothing_held(bare.daemon, "streams that were refused")


def test_codec_that_the_daemon_does_not_know(remote: Remote) -> None:
    """The daemon refuses unknown codecs and encoded data without a named codec, and stores nothing."""
    metadata = (("authorization", f"Bearer {SECRET}"),)
    name, data = chain(40, 1), bytes(4096)
    with grpc.insecure_channel(f"127.0.0.1:{remote.port}") as channel:
        stub = cache_pb2_grpc.CacheStub(channel)
        spec = pb.OpenNamespaceRequest(model="raw", tokens_per_block=16, block_bytes=4096)
        opened = stub.OpenNamespace(spec, metadata=metadata, timeout=15)
        assert opened.codecs == ["lz4"]
        group = pb.PutGroup(namespace=opened.namespace, parent=ROOT, blocks=put_blocks(name).tobytes())
        of_raw = pb.Group(namespace=opened.namespace, hashes=name.tobytes(), tokens_per_block=16, tokens=16)
        good = pb.PutChunk(data=b"no such thing", checksum=record_checksum(data), plain_length=4096)
        for first, error in (
            (pb.PutChunk(group=group, checksum=record_checksum(b""), codec="zip"), "InvalidArgument"),
            (pb.PutChunk(group=group, checksum=record_checksum(b"")), "CorruptRecord"),
            (pb.PutChunk(group=group, checksum=record_checksum(b""), codec="lz4"), "CorruptRecord"),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                stub.Put(iter([first, good]), metadata=metadata, timeout=15)
            assert dict(raised.value.trailing_metadata())[ERROR_KEY] == error
        assert stub.Lookup(pb.LookupRequest(groups=[of_raw]), metadata=metadata, timeout=15).tokens == 0
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Get(pb.GetRequest(group=of_raw, codec="zip"), metadata=metadata, timeout=15))
        assert dict(raised.value.trailing_metadata())[ERROR_KEY] == "InvalidArgument"
    await_nothing_held(remote.daemon, "streams that were refused")
