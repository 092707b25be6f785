"""The session socket: a listener beside gRPC for identity and descriptors, which gRPC cannot carry.

AF_UNIX, SOCK_SEQPACKET. It has its own accept loop, because asyncio's servers refuse SEQPACKET. It
also shows a client's end. The number of connections without a hello has a limit.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from tierd.errors import ConfigError, Overloaded
from tierd.server.session.session_connection import Connection, Identify
from tierd.server.session.sessions import Session, Sessions

log = structlog.get_logger(__name__)

BACKLOG = 128
GREETING_LIMIT = 64
"""Connections at one time without a hello."""
ACCEPT_PAUSE_S = 0.2
"""Wait before the next accept if the process is out of descriptors."""


class SessionSocket:
    """The listener. greeting: part of the reply to every accepted hello (daemon, instance, tiers,
    ...). mode: of the socket's file."""

    def __init__(
        self,
        path: str | Path,
        *,
        sessions: Sessions,
        identify: Identify,
        greeting: Mapping[str, Any],
        mode: int = 0o660,
    ) -> None:
        self.path = str(path)
        self.sessions = sessions
        self.identify = identify
        self.open_line: Callable[[Session], socket.socket] | None = None
        """Returns the client's end of a new line."""
        self.greeting = greeting
        self._mode = mode
        self._listener: socket.socket | None = None
        self._connections: dict[Connection, None] = {}  # in the order in which they came
        self._resume: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Binds and listens. Replaces an existing file, so call it under the instance's lock.
        Raises ConfigError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            Path(self.path).unlink(missing_ok=True)
            listener.bind(self.path)
            Path(self.path).chmod(self._mode)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"session socket: {self.path} cannot be bound ({error}); choose another server.runtime_dir"
            ) from error
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def refuse_new(self) -> None:
        """Refuses later hellos with Unavailable."""
        self.sessions.is_refusing = True

    def close(self) -> None:
        """Closes every connection and the listener, and removes the socket's file. Sessions stay;
        see `Sessions.close`."""
        if self._resume:
            self._resume.cancel()
        for connection in list(self._connections):
            connection.close()
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            Path(self.path).unlink(missing_ok=True)

    def drop(self, connection: Connection) -> None:
        """Forgets a connection that has closed itself."""
        self._connections.pop(connection, None)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError, InterruptedError):
            return
        except OSError as error:
            self._pause(error)
            return
        accepted.setblocking(False)
        connection = Connection(accepted, self)
        self._connections[connection] = None
        waiting = [c for c in self._connections if c.session is None]
        if len(waiting) > GREETING_LIMIT:
            # The one silent for longest: clients say hello at once.
            waiting[0].close(
                Overloaded(f"session socket: {GREETING_LIMIT} newer connections wait for their hello; connect again")
            )

    def _pause(self, error: OSError) -> None:
        """Pauses when out of descriptors or memory, since accepting again at once would only spin."""
        log.error("session socket cannot accept", error=str(error))
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        loop.remove_reader(self._listener)
        self._resume = loop.call_later(ACCEPT_PAUSE_S, loop.add_reader, self._listener, self._accept)
