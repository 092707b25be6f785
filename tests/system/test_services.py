"""Standard gRPC services on tierd's socket, for tools that do not know tierd."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.system.tcp import free_port, remote_config
from tests.unit.server.grpc.test_public_services import WATCH, beginning, call
from tierd.testing import Daemon

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_and_reflection() -> None:
    """Health checks and reflection are answered without a session, for both services."""
    with Daemon() as daemon, grpc.insecure_channel(f"unix:{daemon.target}/tierd.sock") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "tierd.v1.Cache", "tierd.v1.Admin"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=15)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]), timeout=15)
        assert {"tierd.v1.Cache", "tierd.v1.Admin"} <= {s.name for s in reply.list_services_response.service}


def test_who_watches_is_told_of_the_end() -> None:
    """A health watch gets SERVING, then NOT_SERVING at the daemon's end, even if another was cancelled."""
    with Daemon() as daemon, grpc.insecure_channel(f"unix:{daemon.target}/tierd.sock") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        first, second = (watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(2))
        assert [next(first).status, next(second).status] == [SERVING, SERVING]
        first.cancel()
        daemon.terminate()
        assert [reply.status for reply in second] == [NOT_SERVING]
        assert daemon.await_end() == 0


def test_who_watches_and_does_not_read_keeps_no_end(tmp_path: Path) -> None:
    """A TCP health watch whose client reads nothing does not keep the daemon from an orderly end."""
    port = free_port()
    config = remote_config(tmp_path, port).replace("[server]", '[server]\nshutdown_deadline = "1 s"')
    with Daemon(config) as daemon, socket.create_connection(("127.0.0.1", port)) as unread:
        unread.sendall(beginning() + call(1, WATCH))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:  # takes as long as the watch needs to arrive
            assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == SERVING
        assert daemon.stop() == 0
