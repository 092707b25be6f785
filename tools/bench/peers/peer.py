"""What a peer must do to be measured: take batches of blocks in, and copy them out into the caller's buffers.

Purpose: the interface, and a server in a process of its own. Non-purpose: timing (worker.py). Invariant: what was started is ended, and its files are gone.
Nothing here needs more than numpy, since it runs in the peer's own environment.
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
"""What each keeps; the oldest leave."""
MEMORY_BYTES = CAPACITY_BYTES * 5 // 4
"""What each may take: its allocator and its eviction need more than what is kept."""
Blocks = NDArray[np.uint8]


class Peer(Protocol):
    """A client and what it talks to. key: names a batch; its blocks are named by their number in it."""

    pids: list[int]

    def memory(self, size: int) -> Blocks:
        """Memory of the caller as this peer likes it best: uint8 [size]."""
        ...

    def make_room(self, size: int) -> None:
        """Before a put of so many bytes, and not timed: whatever this peer needs in order to have room for them."""
        ...

    def put(self, key: str, blocks: Blocks) -> None:
        """Takes uint8 [n, block_bytes] in."""
        ...

    def get(self, key: str, out: Blocks) -> None:
        """Copies a batch out; raises LookupError if it is not all there."""
        ...

    def close(self) -> None:
        """Ends what was started."""
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
        """What connect gives once it gives something. Raises RuntimeError with the program's log when it has ended, or takes too long."""
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
    """A program that a package of this environment has brought, in a folder of that name. Raises FileNotFoundError."""
    paths = [path for path in Path(sys.prefix).rglob(f"{folder}/{program}".lstrip("/")) if path.is_file()]
    if not paths:
        raise FileNotFoundError(f"{program}: not in {sys.prefix}; install the package that brings it")
    paths[0].chmod(paths[0].stat().st_mode | 0o100)
    return str(paths[0])
