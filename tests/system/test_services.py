"""What tools that know nothing of tierd can ask of its socket."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tierd.testing import Daemon


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
