"""Faults for a running daemon: arms its fault points over the socket that `Daemon(faults=True)` lets it serve.

Purpose: what `tierd.failpoint` offers, from another process. Invariant: every wait has a deadline.
"""

from __future__ import annotations

import json
import socket
from typing import Any, Self

from tierd.errors import InvalidArgument

REPLY_BYTES = 1 << 16


class Faults:
    """A connection to a daemon's fault socket; it ends with the daemon's life. Use as a context manager, or `close`."""

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
        """Lets go; what is armed stays."""
        self._socket.close()

    def arm(self, point: str, fault: str) -> None:
        """Sets a fault, written as `tierd.failpoint` says: kill, error:EIO@3, delay:0.5x1, count. Raises InvalidArgument."""
        self._ask(f"arm {point} {fault}")

    def disarm(self, point: str = "") -> None:
        """Takes one fault away, or all."""
        self._ask(f"disarm {point}")

    def hits(self) -> dict[str, int]:
        """How often each armed point was passed."""
        return dict(self._ask("hits"))

    def await_hits(self, point: str, count: int = 1) -> bool:
        """Waits until the armed point was passed so often; False if time ran out. A daemon killed by it raises ConnectionError."""
        return bool(self._ask(f"await {point} {count} {self._timeout_s * 0.8:g}"))

    def allocated_bytes(self) -> int:
        """What the daemon has from malloc, garbage collected; of Python's own objects only if it runs under PYTHONMALLOC=malloc."""
        return int(self._ask("memory"))

    def threads(self) -> list[str]:
        """Names of the daemon's threads that Python knows: a pool's end in a number, and come as they are needed."""
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
