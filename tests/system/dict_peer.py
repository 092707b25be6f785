"""A worker of the peer benchmark. Its peer keeps the blocks in a dict.

    python -m tests.system.dict_peer HOW NAME COUNT BLOCK_BYTES

HOW: `honest`; `wrong`, which returns other bytes; or the path of a FIFO. With a FIFO, the worker
dies at its first get, and its child process holds the FIFO open.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np

from tools.bench.peers import worker
from tools.bench.peers.known import KNOWN, Known
from tools.bench.peers.peer import Blocks


class DictPeer:
    """Blocks by key."""

    def __init__(self, how: str) -> None:
        self.pids: list[int] = []
        self._how, self._held = how, dict[str, Blocks]()

    def memory(self, size: int) -> Blocks:
        return np.empty(size, dtype=np.uint8)

    def make_room(self, size: int) -> None:
        """The dict has no limit."""

    def put(self, key: str, blocks: Blocks) -> None:
        self._held[key] = blocks.copy()

    def get(self, key: str, out: Blocks) -> None:
        if self._how.startswith("/"):
            with open(self._how, "wb") as fifo:
                subprocess.Popen(["sleep", "600"], stdout=fifo)
            os.kill(os.getpid(), signal.SIGKILL)
        out[:] = self._held[key]
        out[-1, -1] ^= self._how == "wrong"

    def close(self) -> None:
        """Nothing needs closing."""


if __name__ == "__main__":
    asked = sys.argv.pop(1)
    KNOWN[sys.argv[1]] = Known((), lambda _: DictPeer(asked))
    worker.main()
