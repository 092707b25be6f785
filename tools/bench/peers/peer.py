"""The interface of a measured peer: puts batches of blocks, and copies them to the caller's
buffers.

Purpose: that interface, and a server in a separate process. Non-purpose: timing (worker.py).
Invariant: started processes are ended, and their files removed. Only numpy is needed, since this
runs in the peer's own environment.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

START_S, END_S, PAUSE_S = 90.0, 10.0, 0.05
CAPACITY_BYTES = 768 << 20
"""Bytes that each keeps; the oldest are dropped."""
MEMORY_BYTES = CAPACITY_BYTES * 5 // 4
"""Memory that each may use: its allocator and its eviction need more than the kept bytes."""
Blocks = NDArray[np.uint8]


class Peer(Protocol):
    """A client and its servers. key: names a batch; its blocks are named by their number in it."""

    pids: list[int]

    def memory(self, size: int) -> Blocks:
        """Memory of the caller in the form that suits this peer: uint8 [size]."""
        ...

    def make_room(self, size: int) -> None:
        """Called untimed before a put of `size` bytes, to make room for them."""
        ...

    def put(self, key: str, blocks: Blocks) -> None:
        """Stores uint8 [n, block_bytes]."""
        ...

    def get(self, key: str, out: Blocks) -> None:
        """Copies a batch out; raises LookupError if a block is missing."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


class Server:
    """A program that serves until it is ended; its output goes to a file of the directory."""

    def __init__(self, command: Sequence[str], directory: Path, *, env: dict[str, str] | None = None) -> None:
        self._log = directory / f"{Path(command[0]).name}.log"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                command, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        """Of the program."""
        return self._process.pid

    def connected(self, connect: Callable[[], Any]) -> Any:
        """The result of connect, retried until it has one. Raises RuntimeError with the program's
        log if it has ended, or takes too long."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return connect()
            except Exception as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = self._log.read_text(errors="replace")[-1500:]
                    self.close()
                    raise RuntimeError(f"{self._log.stem}: not to be reached ({error}); it said:\n{tail}") from error
                time.sleep(PAUSE_S)

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)


def found(program: str, folder: str = "") -> str:
    """A program of a package of this environment, in that folder. Raises FileNotFoundError."""
    paths = [path for path in Path(sys.prefix).rglob(f"{folder}/{program}".lstrip("/")) if path.is_file()]
    if not paths:
        raise FileNotFoundError(f"{program}: not in {sys.prefix}; install the package that brings it")
    paths[0].chmod(paths[0].stat().st_mode | 0o100)
    return str(paths[0])
