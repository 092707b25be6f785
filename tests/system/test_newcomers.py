"""Connections without the credential end after seconds and do not block clients that have it."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.depth import slow
from tests.system.blocks import await_true
from tests.system.sdk import SMALL, put
from tests.system.tcp import free_port, remote_config
from tests.system.warm import Daemon
from tierd._proto import cache_pb2, cache_pb2_grpc
from tierd.client import Client

COUNT = 150
ENDS_S = 30.0
"""Generous: 5 s, the next check, and a busy machine."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The port and credential file of a daemon for at most 16 sessions."""
    root, port = tmp_path_factory.mktemp("newcomers"), free_port()
    config = remote_config(root, port).replace("[server]\n", "[server]\nsession_limit = 16\n")
    with Daemon(config):
        yield port, str(root / "secret")


def _is_served(remote: tuple[int, str], seed: int) -> bool:
    with Client(f"127.0.0.1:{remote[0]}", credential_file=remote[1]) as client:
        return put(client, client.open_namespace(SMALL), seed, 1).stored == 1


@pytest.mark.parametrize("said", [*slow(b"", PREFACE[:9]), PREFACE + SETTINGS])
def test_silent_connections(remote: tuple[int, str], said: bytes) -> None:
    """150 connections that send nothing or a bare HTTP/2 preface block no client, and all of them end."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", remote[0]))) for _ in range(COUNT)]
        for one in silent:
            with contextlib.suppress(OSError):  # the daemon has already ended it
                one.sendall(said)
        for turn in range(3):
            assert _is_served(remote, 100 * len(said) + turn)
        deadline = time.monotonic() + ENDS_S
        for one in silent:
            assert _ends(one, deadline)
        assert _is_served(remote, 100 * len(said) + 9)


def _ends(connection: socket.socket, deadline: float) -> bool:
    with contextlib.suppress(ConnectionError):
        waiting = select.poll()  # select.select takes no descriptor above 1,023
        waiting.register(connection, select.POLLIN)
        while waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
            if not connection.recv(4096):
                return True
        return False
    return True


def _wrong(channel: grpc.Channel) -> None:
    call = cache_pb2_grpc.CacheStub(channel).Lookup
    with contextlib.suppress(grpc.RpcError):
        call(cache_pb2.LookupRequest(), metadata=(("authorization", "Bearer wrong"),), timeout=15)


def _watching(channel: grpc.Channel) -> None:
    next(iter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())))


@pytest.mark.parametrize("call", [_wrong, *slow(_watching)])
def test_calls_without_the_credential(remote: tuple[int, str], call: Callable[[grpc.Channel], None]) -> None:
    """A connection with wrong credentials or a health watch ends; an idle authenticated one stays open."""
    states: dict[str, list[grpc.ChannelConnectivity]] = {"right": [], "wrong": []}
    options = [("grpc.use_local_subchannel_pool", 1)]
    with (
        grpc.insecure_channel(f"127.0.0.1:{remote[0]}", options) as right,
        grpc.insecure_channel(f"127.0.0.1:{remote[0]}", options) as wrong,
    ):
        right.subscribe(states["right"].append)
        wrong.subscribe(states["wrong"].append)
        bearer = (("authorization", f"Bearer {Path(remote[1]).read_text().strip()}"),)
        cache_pb2_grpc.CacheStub(right).OpenNamespace(
            cache_pb2.OpenNamespaceRequest(model="m", tokens_per_block=16, block_bytes=4096), metadata=bearer
        )
        call(wrong)
        ready = grpc.ChannelConnectivity.READY
        await_true(lambda: ready in states["wrong"] and states["wrong"][-1] is not ready, "the end", within_s=ENDS_S)
        assert states["right"][-1] is ready
        assert states["right"].count(ready) == 1
