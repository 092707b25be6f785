"""TCP: checksummed chunks for clients without shared memory, with a credential, only if configured."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.system.relay import Damage, Relay
from tests.system.sdk import BIG, HOST, HOST_BYTES, await_nothing_held, churn, empty, put, right
from tests.system.tcp import SECRET, free_port, has_ipv6, remote_config
from tests.system.warm import Daemon
from tierd._proto import admin_pb2, cache_pb2
from tierd.client import Client, NamespaceSpec, PutGroup
from tierd.core.formats.model import BlockStatus
from tierd.errors import ERROR_KEY, CorruptRecord, NotPermitted, TierdError, Unavailable
from tierd.testing import chain, content_of, is_content

COUNT = 4
ODD = NamespaceSpec(model="odd", tokens_per_block=16, block_bytes=(1 << 20) + 17 * 4096 + 1)
"""Longer than a chunk, and no multiple of a page."""
METHODS = [
    (f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
    for service in (*cache_pb2.DESCRIPTOR.services_by_name.values(), *admin_pb2.DESCRIPTOR.services_by_name.values())
    for method in service.methods
]
WRONG = {
    "none": {},
    "empty": {"authorization": "Bearer "},
    "wrong": {"authorization": "Bearer " + "x" * len(SECRET)},
    "begins right": {"authorization": f"Bearer {SECRET[:-1]}"},
    "goes on": {"authorization": f"Bearer {SECRET}x"},
    "other scheme": {"authorization": f"Basic {SECRET}"},
    "the daemon's own session": {"tierd-session": "1."},
    "made up": {"tierd-session": "1." + "0" * 32},
}


class Remote:
    """A daemon and its port."""

    def __init__(self, daemon: Daemon, port: int, secret: Path) -> None:
        self.daemon, self.port, self.secret = daemon, port, str(secret)

    def client(self, port: int | None = None) -> Client:
        """A client over TCP, optionally through a relay's port."""
        return Client(f"127.0.0.1:{port or self.port}", credential_file=self.secret)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A daemon whose local clients have the same tenant as its remote clients."""
    root, port = tmp_path_factory.mktemp("remote"), free_port()
    own = f'\n[identity]\ntenants = {{"{os.geteuid()}" = "remote"}}\n'
    with Daemon(remote_config(root, port) + own) as daemon:
        yield Remote(daemon, port, root / "secret")


def listening(pid: int) -> set[str]:
    """Addresses in /proc/net/tcp and tcp6 on which a process listens, as written there."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


# -- listening addresses


def test_no_tcp_by_default() -> None:
    """A daemon with the default configuration listens on no TCP port."""
    with Daemon(HOST) as daemon:
        assert not listening(daemon.pid)


def test_loopback_alone(remote: Remote) -> None:
    """With tcp_listen the daemon listens only on that address."""
    (address,) = listening(remote.daemon.pid)
    assert address.endswith(f"0100007F:{remote.port:04X}"), "127.0.0.1, as IPv6 sockets write it or not"


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 on its loopback")
def test_ipv6(tmp_path: Path) -> None:
    """A daemon listens on [::1] for calls, metrics and KV events, and serves a client there."""
    port, at = free_port("::1"), [free_port("::1") for _ in range(3)]
    config = remote_config(tmp_path, port, address="[::1]").replace(
        "[server]", f'[server]\nmetrics_listen = "[::1]:{at[0]}"', 1
    )
    events = f'\n[events]\nenabled = true\nbind = "tcp://[::1]:{at[1]}"\nreplay_bind = "tcp://[::1]:{at[2]}"\n'
    with (
        Daemon(config + events) as daemon,
        Client(f"[::1]:{port}", credential_file=str(tmp_path / "secret")) as client,
    ):
        namespace = client.open_namespace(BIG)
        assert put(client, namespace, 1, COUNT)
        assert client.get(namespace, chain(1, COUNT)).blocks == COUNT
        assert {int(address.rpartition(":")[2], 16) for address in listening(daemon.pid)} == {port, *at}


# -- bytes


@pytest.mark.parametrize("spec", [BIG, ODD], ids=["even", "odd"])
def test_bytes_there_and_back(remote: Remote, spec: NamespaceSpec) -> None:
    """A get over TCP returns the bytes put, in arrays or buffers; the tenant's local clients read
    the same."""
    seed = spec.block_bytes
    with remote.client() as client, Client(remote.daemon.target) as local:
        namespace = client.open_namespace(spec)
        assert put(client, namespace, seed, COUNT)
        got = client.get(namespace, chain(seed, COUNT + 1))
        assert (got.tokens, right(got.views, seed)) == (16 * COUNT, COUNT)
        assert not any(view.flags.writeable for view in got.views)
        out = np.zeros((COUNT, spec.block_bytes), dtype=np.uint8)
        assert client.get(namespace, chain(seed, COUNT), out=out).blocks == COUNT
        assert right(list(out), seed) == COUNT
        assert right(local.get(local.open_namespace(spec), chain(seed, COUNT)).views, seed) == COUNT


def test_local_bytes_over_tcp(remote: Remote) -> None:
    """A remote client gets a local client's bytes unchanged; existing blocks are not stored again."""
    with remote.client() as client, Client(remote.daemon.target) as local:
        assert put(local, local.open_namespace(BIG), 31, COUNT)
        namespace = client.open_namespace(BIG)
        assert right(client.get(namespace, chain(31, COUNT)).views, 31) == COUNT
        assert put(client, namespace, 31, COUNT).statuses.tolist() == [BlockStatus.EXISTS] * COUNT


def test_nothing_stays_held(remote: Remote) -> None:
    """Streams that end early or late hold no lease and no reservation."""
    with remote.client() as client:
        namespace = client.open_namespace(BIG)
        assert put(client, namespace, 32, COUNT)
        assert client.get(namespace, chain(32, COUNT))
        for timeout_s in (0.001, 0.003, 0.01, 0.02):
            for call in (
                lambda limit=timeout_s: client.get(namespace, chain(32, COUNT), timeout_s=limit),
                lambda limit=timeout_s: client.put(
                    namespace, chain(33, COUNT), [bytes(BIG.block_bytes)] * COUNT, timeout_s=limit
                ),
            ):
                with contextlib.suppress(TierdError):
                    call()
    await_nothing_held(remote.daemon, "streams")


# -- permissions


def _error_of(channel: grpc.Channel, method: tuple[str, bool, bool], metadata: dict[str, str]) -> str:
    """The error's class name of a call with an empty message, or "" if it succeeds."""
    path, sends_many, gets_many = method
    kind = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[sends_many, gets_many]
    sent: Any = iter([b""]) if sends_many else b""
    try:
        reply = kind(path)(sent, metadata=tuple(metadata.items()), timeout=15)
        for _ in reply if gets_many else ():
            break
    except grpc.RpcError as error:
        return str(dict(error.trailing_metadata() or ()).get(ERROR_KEY, f"unnamed {error.code()}"))
    return ""


@pytest.mark.parametrize("given", WRONG)
def test_every_method_wants_the_credential(remote: Remote, given: str) -> None:
    """Over TCP every method of every service refuses a call without the right credential."""
    with grpc.insecure_channel(f"127.0.0.1:{remote.port}") as channel:
        answers = {method[0]: _error_of(channel, method, WRONG[given]) for method in METHODS}
    assert len(answers) > 20
    assert set(answers.values()) == {"SessionLost" if "tierd-session" in WRONG[given] else "NotPermitted"}, answers


def test_operators_are_local(remote: Remote) -> None:
    """Over TCP the credential allows no Admin method and no method that maps memory."""
    local = {f"/tierd.v1.Cache/{verb}" for verb in ("Acquire", "Release", "Reserve", "Commit", "Abort")}
    with grpc.insecure_channel(f"127.0.0.1:{remote.port}") as channel:
        for method in METHODS:
            if "Admin" in method[0] or method[0] in local:
                error = _error_of(channel, method, {"authorization": f"Bearer {SECRET}"})
                assert error == ("NotPermitted" if "Admin" in method[0] else "Unsupported"), method


def test_wrong_credential_file(remote: Remote, tmp_path: Path) -> None:
    """A client with a wrong credential gets NotPermitted at its first call; with best effort, a miss."""
    (tmp_path / "other").write_text("x" * 20)
    place = {"target": f"127.0.0.1:{remote.port}", "credential_file": str(tmp_path / "other")}
    with Client(**place) as client, pytest.raises(NotPermitted, match="credential"):
        client.open_namespace(BIG)
    with Client(place["target"]) as client, pytest.raises(NotPermitted, match="credential"):
        client.open_namespace(BIG)
    with Client(**place, best_effort=True) as client:
        assert not client.get(client.open_namespace(BIG), chain(1, 1))


@pytest.mark.parametrize(
    "secret", [b"\xff\xfe" * 20, "p\xe4ssword-of-some-length".encode(), b"two lines\nof some length\n"]
)
def test_credential_that_no_client_can_send(tmp_path: Path, secret: bytes) -> None:
    """A daemon whose credential file is not one line of ASCII does not start, and names the file."""
    config = remote_config(tmp_path, free_port())
    (tmp_path / "secret").write_bytes(secret)
    with pytest.raises(Unavailable) as told:
        Daemon(config).start()
    assert f"server.tcp_credential_file: {tmp_path}/secret" in str(told.value)
    assert "Traceback" not in str(told.value)


# -- damage


@pytest.mark.parametrize("damaged", range(3))
def test_damaged_get(remote: Remote, damaged: int) -> None:
    """A bit flip on the way to the client ends the get before that block; no wrong byte counts."""
    seed = 60 + damaged
    for takes_out in (False, True):
        damage = Damage(content_of(chain(seed, 3)[damaged], BIG.block_bytes))
        with (
            Relay(("127.0.0.1", 0), ("127.0.0.1", remote.port), change=damage) as relay,
            remote.client() as writer,
            remote.client(relay.port) as client,
        ):
            assert put(writer, writer.open_namespace(BIG), seed, 3)
            out = np.zeros((3, BIG.block_bytes), dtype=np.uint8)
            namespace = client.open_namespace(BIG)
            got = client.get(namespace, chain(seed, 3), out=out if takes_out else None)
            given = out[: got.blocks] if takes_out else got.views
            assert (damage.done, got.blocks, got.tokens) == (1, damaged, 16 * damaged)
            assert right(list(given), seed) == damaged
            assert right(client.get(namespace, chain(seed, 3)).views, seed) == 3, "the next get is whole"


def test_damaged_put(remote: Remote) -> None:
    """A bit flip on the way to the daemon raises CorruptRecord, and the damaged block is never served."""
    damage = Damage(content_of(chain(70, 3)[1], BIG.block_bytes))
    with (
        Relay(("127.0.0.1", 0), ("127.0.0.1", remote.port), change=damage) as relay,
        remote.client(relay.port) as client,
    ):
        namespace = client.open_namespace(BIG)
        with pytest.raises(CorruptRecord):
            put(client, namespace, 70, 3)
        assert damage.done == 1
        for view, name in zip(client.get(namespace, chain(70, 3)).views, chain(70, 3), strict=False):
            assert is_content(view, name)
        assert client.lookup(namespace, chain(70, 3)[1:2]).tokens == 0
        assert put(client, namespace, 70, 3)
        assert right(client.get(namespace, chain(70, 3)).views, 70) == 3
    await_nothing_held(remote.daemon, "a put that failed")


def test_what_came_over_tcp_is_in_nobody_elses_pages(tmp_path: Path) -> None:
    """Memory that the daemon wrote for one tenant reaches another tenant's writer without those bytes."""
    port = free_port()
    with Daemon(remote_config(tmp_path, port)) as daemon:
        with Remote(daemon, port, tmp_path / "secret").client() as far:
            assert churn(far, seed=1, total=2 * HOST_BYTES, byte=0xAB)
        empty(daemon, "what came over TCP")
        with Client(daemon.target) as near:
            names = chain(2, HOST_BYTES // BIG.block_bytes // 2)
            with near.reserve(PutGroup(near.open_namespace(BIG), names)) as pages:
                given = [buffer for buffer in pages.buffers() if buffer is not None]
                assert len(given) > 1
                assert not any((buffer == 0xAB).any() for buffer in given)
