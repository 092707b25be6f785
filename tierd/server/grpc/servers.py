"""The gRPC servers: the unix socket, and TCP on loopback if configured.

Sockets are made 0660 and only under the instance's lock, so a stale one may be removed. TCP needs a
credential. Messages are bounded, since block bytes only travel in chunks.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from tierd._proto import admin_pb2_grpc, cache_pb2_grpc
from tierd.config import ServerConfig
from tierd.errors import ConfigError
from tierd.server.grpc import streams
from tierd.server.grpc.admin import AdminService
from tierd.server.grpc.call_errors import OVER
from tierd.server.grpc.guard import Guard
from tierd.server.grpc.public_services import Health, PublicServices
from tierd.server.grpc.service import CacheService
from tierd.server.grpc.unauthenticated import Unauthenticated

SERVICES = ("tierd.v1.Cache", "tierd.v1.Admin")
OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 5000),
)
GRPC_LOG = "grpc._cython.cygrpc"
"""The logger of grpc.aio for errors of handlers, and for unary replies that it could not send
outside the guard."""
STREAMS_FACTOR = 4
"""Calls of one connection in the server, as a multiple of a session's credits. The credits refuse
first, and a connection can leave no more replies unread."""
CONNECTIONS_FACTOR = 4
"""Connections, as a multiple of the sessions that may be open."""
BACKLOG = 16
"""Calls in each server, as a multiple of the queue. So the guard answers, not gRPC."""
SPARE = 1024
"""Further calls in each server: endless or refused ones, unread replies. Also further TCP
connections, which unauthenticated.py keeps free."""


def is_news(record: logging.LogRecord) -> bool:
    """Whether to log a line of grpc's. Not if the client gave up before the reply, nor if a header
    is not text."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UnicodeDecodeError):  # a client's header
        return False
    return not (isinstance(error, grpc.aio.InternalError) and any(said in str(error) for said in OVER))


class Rpc:
    """Two gRPC servers over the same services. Exhausting one leaves room in the other."""

    def __init__(self, cache: CacheService, admin: AdminService, *, guard: Guard, limits: ServerConfig) -> None:
        logging.getLogger(GRPC_LOG).addFilter(is_news)
        self.guard = guard
        self.health = Health(SERVICES)
        self._cache, self._admin, self._limits = cache, admin, limits
        self._servers: list[grpc.aio.Server] = []

    def _build(self, *, spare: int) -> grpc.aio.Server:
        limits = self._limits
        options = (
            *OPTIONS,
            ("grpc.max_concurrent_streams", STREAMS_FACTOR * limits.session_credits),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS_FACTOR * limits.session_limit + spare),
        )
        most = limits.queue_limit * BACKLOG + SPARE
        server = grpc.aio.server(interceptors=[self.guard], options=options, maximum_concurrent_rpcs=most)
        cache_pb2_grpc.add_CacheServicer_to_server(self._cache, streams.Recoded(server, self._cache))
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin, server)
        unnamed = PublicServices(server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, unnamed)
        reflection_servicer = ReflectionServicer([*SERVICES, reflection.SERVICE_NAME, HEALTH_NAME])
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection_servicer, unnamed)
        self._servers.append(server)
        return server

    def listen_unix(self, path: Path) -> None:
        """Binds the unix socket, 0660. Raises ConfigError."""
        path.unlink(missing_ok=True)
        self._bind(f"unix:{path}", spare=0)
        path.chmod(0o660)

    def listen_tcp(self, address: str) -> Unauthenticated:
        """Binds a loopback address. Raises ConfigError."""
        port = self._bind(address, spare=SPARE)
        newcomers = Unauthenticated(port, limit=CONNECTIONS_FACTOR * self._limits.session_limit)
        self.guard.admit_peer = newcomers.admit
        return newcomers

    async def start(self) -> None:
        """Starts serving."""
        for server in self._servers:
            await server.start()
        self.health.set_status(serving=True)

    async def stop(self, *, grace_s: float) -> None:
        """Refuses new calls, lets those in progress finish within the grace, cancels the rest."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    def _bind(self, address: str, *, spare: int) -> int:
        """spare: connections beyond the expected ones."""
        try:
            return int(self._build(spare=spare).add_insecure_port(address))
        except RuntimeError as error:
            raise ConfigError(f"listen {address}: {error}; is another program using it?") from error
