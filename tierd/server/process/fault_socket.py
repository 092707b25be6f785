"""A socket for tests that arms fault points of a running daemon, and reports its memory.

`FaultSocket` exists only if TIERD_FAILPOINT_SOCKET was set at start, never in production. Its own
thread answers even if the event loop hangs. The path lies in a directory of the test's. One request
per datagram, `verb word...`; the reply is JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping

import numpy as np

from tierd import failpoint
from tierd.errors import InvalidArgument

REQUEST_BYTES = 4096
NUMPY_KEEPS, NUMPY_KEEPS_BELOW_BYTES = 7, 1024
"""Freed arrays that numpy keeps of each length: 3.6 MiB in all, reached after hours, as lengths
come up."""
NAMES = 40_000
"""Names to fill CPython's caches once.

Ten times the entries of its attribute cache, each of which keeps its last name: 0.3 MiB. Also more
names than fit its table of interned strings, which doubles once after as many have come and gone:
0.9 MiB."""


class FaultSocket:
    """Serves one tester at a time. path: of the socket; an existing one is replaced."""

    def __init__(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.bind(path)
        os.chmod(path, 0o600)
        self._socket.listen(4)
        threading.Thread(target=self._serve, name="tierd-faults", daemon=True).start()

    def close(self) -> None:
        """Ends the thread at its next request."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                while request := peer.recv(REQUEST_BYTES):
                    peer.send(json.dumps(answer(request.decode())).encode())


def answer(request: str) -> object:
    """arm NAME FAULT | disarm [NAME] | hits | await NAME COUNT SECONDS | memory | threads."""
    verb, *words = request.split()
    try:
        match verb, words:
            case "arm", [name, fault]:
                failpoint.arm(name, fault)
            case "disarm", names:
                failpoint.disarm(*names[:1])
            case "hits", []:
                return failpoint.hits()
            case "await", [name, count, seconds]:
                return failpoint.await_hits(name, count=int(count), timeout_s=float(seconds))
            case "memory", []:
                return allocated_bytes()
            case "threads", []:
                return [thread.name for thread in threading.enumerate()]
            case _:
                return {"error": f"{request!r}: not understood"}
    except InvalidArgument as error:
        return {"error": str(error)}
    return True


class _MallInfo(ctypes.Structure):
    """mallinfo2 of glibc 2.33 and newer, over all its arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def allocated_bytes() -> int:
    """Bytes in use from malloc, after a collection. Includes Python's own objects only under
    PYTHONMALLOC=malloc."""
    fill_caches()
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


@functools.cache
def fill_caches() -> None:
    """Fills the caches of numpy and CPython once, so that their growth is not mistaken for a leak."""
    for length_bytes in range(1, NUMPY_KEEPS_BELOW_BYTES):
        _ = [np.empty(length_bytes, dtype=np.uint8) for _ in range(NUMPY_KEEPS)]
    for i in range(NAMES):
        sys.intern(f"comes and goes {i}")
    names = [f"no attribute {i:08}" for i in range(NAMES)]
    _ = [hasattr(gc, name) for name in names]


@contextlib.contextmanager
def fault_socket(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Opens the socket if the environment asks for it, and arms TIERD_FAILPOINTS."""
    failpoint.arm_from(environ)
    path = environ.get("TIERD_FAILPOINT_SOCKET")
    if not path:
        yield
        return
    opened = FaultSocket(path)
    try:
        yield
    finally:
        opened.close()
