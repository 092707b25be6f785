"""A small HTTP server with bounds on connections and on their time, for WSGI applications.

A reader that is slow or silent costs one of REQUESTS threads for LONGEST_S at most. Each connection
has one request. The server runs in a thread of its own, beside the event loop.
"""

from __future__ import annotations

import contextlib
import socket
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

REQUESTS = 8
"""Connections at one time."""
LONGEST_S = 10.0
"""From the connection to its end."""
REFUSAL_S = 0.05
"""Time for one connection's 503; meanwhile the others wait."""


class Reader(WSGIRequestHandler):
    """A request: it has a thread, only for as long as the request takes."""

    timeout = 5.0
    """Seconds for each read and write; LONGEST_S is for the whole request."""

    def handle(self) -> None:
        """Serves the request; a request that times out ends with its connection."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Logs nothing for a request."""


class HttpServer(ThreadingMixIn, WSGIServer):
    """A thread for each of at most REQUESTS connections; more get 503. Raises OSError if the address
    is taken."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._open: dict[socket.socket, float] = {}
        super().__init__((str(address[0]), port), Reader)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the connection's thread, or refuses the connection."""
        if len(self._open) >= REQUESTS:
            request.settimeout(REFUSAL_S)
            with contextlib.suppress(OSError):
                request.recv(4096)  # closing with unread bytes would reset the connection
                request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\n\r\n")
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The end of a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends connections that last too long. The server's thread calls it twice a second."""
        for request, begun in list(self._open.items()):
            if time.monotonic() - begun > LONGEST_S:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)
