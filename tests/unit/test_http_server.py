"""The HTTP server's bounds, over real connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tierd import http_server
from tierd.http_server import REQUESTS, HttpServer

SOON_S = 15.0
GET = b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n"


def hello(_environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


@pytest.fixture
def server() -> Iterator[HttpServer]:
    running = HttpServer("127.0.0.1", 0)
    running.set_app(hello)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join(SOON_S)


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=SOON_S)


def whole(client: socket.socket) -> bytes:
    """All bytes until the server closes."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def test_more_than_eight_are_refused(server: HttpServer) -> None:
    """While eight connections are open the ninth gets 503; when one has ended the next is served."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(REQUESTS)]
        for client in slow:
            client.sendall(GET[:-2])
        with connect(server) as ninth:
            ninth.sendall(GET)
            assert whole(ninth).startswith(b"HTTP/1.0 503 ")
        slow[0].sendall(b"\r\n")
        assert whole(slow[0]).endswith(b"hello")
        with connect(server) as next_one:
            next_one.sendall(GET)
            assert whole(next_one).endswith(b"hello")


def test_a_drip_of_bytes_ends_in_time(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends after its whole time, although each of its bytes comes soon after the other."""
    monkeypatch.setattr(http_server, "LONGEST_S", 0.2)
    ended = threading.Event()
    with connect(server) as client:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.02):
                    client.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        with contextlib.suppress(ConnectionError):
            whole(client)  # hangs until the test's timeout if nobody ends it
        ended.set()
        dripping.join(SOON_S)
    assert server._open == {}


def test_clients_that_go_leave_nothing(server: HttpServer) -> None:
    """Connections that end at any byte of a request free their places."""
    for length in range(len(GET)):
        with connect(server) as client:
            client.sendall(GET[:length])
            client.shutdown(socket.SHUT_WR)
            whole(client)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=SOON_S) as reply:
        assert reply.read() == b"hello"
