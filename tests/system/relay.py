"""A relay between a client and the daemon's gRPC socket. It counts the bytes or damages them."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

PART_BYTES = 1 << 16


class Relay:
    """Listens at `listen` and connects to `forward`, each a path or (host, port); port 0: any.

    passed: bytes in both directions so far. change: maps each received part to the part that it
    sends.
    """

    def __init__(
        self, listen: str | tuple[str, int], forward: str | tuple[str, int], *, change: Callable[[bytes], bytes] = bytes
    ) -> None:
        self.passed = 0
        self._forward = forward
        self._change = change
        self._sockets: list[socket.socket] = []
        self._cut: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = _socket(listen)
        self._listener.bind(listen)
        self._listener.listen()
        self._start(self._accept)

    @property
    def port(self) -> int:
        """The port of a relay over TCP."""
        return int(self._listener.getsockname()[1])

    def turn(self, forward: str | tuple[str, int]) -> None:
        """Later connections go to `forward`. Cuts current connections off."""
        self._forward, connected = forward, self._sockets
        self._sockets = []
        for each in connected:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._cut += connected

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in (self._listener, *self._sockets, *self._cut):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = _socket(self._forward)
                self._sockets += [near, far]
                far.connect(self._forward)
                self._start(lambda near=near, far=far: self._pass(near, far))
                self._start(lambda near=near, far=far: self._pass(far, near))

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(PART_BYTES):
                self.passed += len(part)
                target.sendall(self._change(part))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()


class Damage:
    """Flips one bit of one block's bytes in transit, once."""

    def __init__(self, content: np.ndarray) -> None:
        self.done = 0
        self._marks = [content[at : at + 8].tobytes() for at in range(64 * 1024, 512 * 1024, 8 * 1024)]

    def __call__(self, part: bytes) -> bytes:
        for mark in self._marks if not self.done else ():
            at = part.find(mark)
            if at >= 0:
                self.done += 1
                return part[:at] + bytes([part[at] ^ 0x10]) + part[at + 1 :]
        return part


class LocalRelay(Relay):
    """A target with a relay as its gRPC socket and the daemon's own session socket."""

    def __init__(self, target: str) -> None:
        self.target = tempfile.mkdtemp(prefix="tierd-relay-")
        os.symlink(f"{target}/session.sock", f"{self.target}/session.sock")
        super().__init__(f"{self.target}/tierd.sock", f"{target}/tierd.sock")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for path in Path(self.target).iterdir():
            path.unlink()
        Path(self.target).rmdir()


def _socket(address: str | tuple[str, int]) -> socket.socket:
    return socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
