"""Arms fault points of a running daemon over the socket of `Daemon(faults=True)`.

It offers `tierd.failpoint` to another process. Every wait has a deadline.
"""

from __future__ import annotations

import json
import socket
from typing import Any, Self

from tierd.errors import InvalidArgument

REPLY_BYTES = 1 << 16


class Faults:
    """A connection to a daemon's fault socket. It ends with the daemon. Use it as a context
    manager, or call `close`."""

    def __init__(self, path: str, *, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        self._socket.connect(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Armed faults stay."""
        self._socket.close()

    def arm(self, point: str, fault: str) -> None:
        """Arms a fault, written as in `tierd.failpoint`: kill, error:EIO@3, delay:0.5x1, count.
        Raises InvalidArgument."""
        self._ask(f"arm {point} {fault}")

    def disarm(self, point: str = "") -> None:
        """Disarms one fault, or all."""
        self._ask(f"disarm {point}")

    def hits(self) -> dict[str, int]:
        """How often each armed point was passed."""
        return dict(self._ask("hits"))

    def await_hits(self, point: str, count: int = 1) -> bool:
        """Waits until the armed point was passed `count` times. False on timeout. Raises
        ConnectionError if it kills the daemon."""
        return bool(self._ask(f"await {point} {count} {self._timeout_s * 0.8:g}"))

    def allocated_bytes(self) -> int:
        """Bytes in use from malloc, after a collection. Includes Python's own objects only under
        PYTHONMALLOC=malloc."""
        return int(self._ask("memory"))

    def threads(self) -> list[str]:
        """Names of the daemon's threads that Python knows. Threads of a pool start when needed, and
        their names end in a number."""
        return list(self._ask("threads"))

    def _ask(self, request: str) -> Any:
        self._socket.send(request.encode())
        raw = self._socket.recv(REPLY_BYTES)
        if not raw:
            raise ConnectionError("the daemon has ended")
        reply = json.loads(raw)
        if isinstance(reply, dict) and "error" in reply:
            raise InvalidArgument(reply["error"])
        return reply
