"""The gRPC servers: the unix socket, and TCP on loopback where it is configured.

Purpose: build, bind, refuse, finish. Non-purpose: what a call does. Invariants: sockets are made 0660 and only under the instance's
lock, so a stale one may be removed; TCP is bound only with a credential; messages are bounded, since block bytes never ride in them but
in chunks.
"""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME
from grpc_reflection.v1alpha import reflection

from tierd._proto import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc
from tierd.config import ServerConfig
from tierd.errors import ConfigError
from tierd.server import streams
from tierd.server.admin import AdminService
from tierd.server.guard import OVER, Guard
from tierd.server.service import CacheService

SERVICES = ("tierd.v1.Cache", "tierd.v1.Admin")
OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.so_reuseport", 0),
)
GRPC_LOG = "grpc._cython.cygrpc"
"""Where grpc.aio writes what a handler has raised, and that the reply of a unary call could not be sent: it sends that outside the guard."""
STREAMS_FACTOR = 4
"""Calls that one connection may have in the server, as a multiple of a session's credits: so that the credits are what refuses, and no
connection can leave more than this unread."""
CONNECTIONS_FACTOR = 4
"""Connections, as a multiple of the sessions that may be open."""
BACKLOG = 16
"""Calls in the server, as a multiple of the queue: so that the guard is what answers."""


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of grpc's own is worth one of ours: not where the reply of a call met the end of that call, which its client has given up."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, grpc.aio.InternalError) and any(said in str(error) for said in OVER))


class Rpc:
    """One or two gRPC servers over the same services."""

    def __init__(self, cache: CacheService, admin: AdminService, *, guard: Guard, limits: ServerConfig) -> None:
        logging.getLogger(GRPC_LOG).addFilter(is_news)
        self.guard = guard
        self.health = HealthServicer()
        options = (
            *OPTIONS,
            ("grpc.max_concurrent_streams", STREAMS_FACTOR * limits.session_credits),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS_FACTOR * limits.session_limit),
        )
        most = limits.queue_limit * BACKLOG + 1024
        self._server = grpc.aio.server(interceptors=[guard], options=options, maximum_concurrent_rpcs=most)
        cache_pb2_grpc.add_CacheServicer_to_server(cache, streams.Recoded(self._server, cache))
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        names = [
            module.DESCRIPTOR.services_by_name[n].full_name
            for module, n in ((cache_pb2, "Cache"), (admin_pb2, "Admin"))
        ]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME, HEALTH_NAME], self._server)

    def listen_unix(self, path: Path) -> None:
        """Binds the unix socket, 0660. Raises ConfigError."""
        path.unlink(missing_ok=True)
        self._bind(f"unix:{path}")
        path.chmod(0o660)

    def listen_tcp(self, address: str) -> int:
        """Binds a loopback address; the port. Raises ConfigError."""
        return self._bind(address)

    async def start(self) -> None:
        """Begins to serve."""
        await self._server.start()
        await self.set_serving(serving=True)

    async def set_serving(self, *, serving: bool) -> None:
        """What health checks are told."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *SERVICES):
            await self.health.set(name, status)

    async def stop(self, *, grace_s: float) -> None:
        """Refuses new calls, lets those in progress finish within the grace, cancels the rest."""
        await self._server.stop(grace_s)

    def _bind(self, address: str) -> int:
        try:
            return int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise ConfigError(f"listen {address}: {error}; is another program using it?") from error
