"""Redis and Valkey: one pipeline of SETs a batch, one MGET, over a unix socket, nothing kept on disk."""

from __future__ import annotations

import importlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.peers.peer import CAPACITY_BYTES, Blocks, Server, found


class RedisServer:
    """A server of either kind, and its client."""

    def __init__(self, directory: Path, *, module: str, program: str) -> None:
        client: Any = importlib.import_module(module)
        path = str(directory / "redis.sock")
        options = {"port": "0", "unixsocket": path, "save": "", "appendonly": "no", "daemonize": "no"}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._server = Server([found(program), *words], directory)
        make = client.Redis if module == "redis" else client.Valkey
        self._client = make(unix_socket_path=path)
        self._server.connected(self._client.ping)
        self.pids = [self._server.pid]
        self._batches: deque[tuple[str, int, int]] = deque()
        self._bytes = 0

    def memory(self, size: int) -> Blocks:
        return np.empty(size, dtype=np.uint8)

    def make_room(self, size: int) -> None:
        # Its own eviction takes what is not old: it counts age in seconds.
        while self._batches and self._bytes + size > CAPACITY_BYTES:
            key, count, its = self._batches.popleft()
            self._client.delete(*(f"{key}/{i}" for i in range(count)))
            self._bytes -= its

    def put(self, key: str, blocks: Blocks) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for i, block in enumerate(blocks):
            pipeline.set(f"{key}/{i}", memoryview(block))
        pipeline.execute()
        self._batches.append((key, len(blocks), blocks.nbytes))
        self._bytes += blocks.nbytes

    def get(self, key: str, out: Blocks) -> None:
        for i, each in enumerate(self._client.mget([f"{key}/{i}" for i in range(len(out))])):
            if each is None:
                raise LookupError(f"{key}/{i}")
            out[i] = np.frombuffer(each, dtype=np.uint8)

    def close(self) -> None:
        self._client.close()
        self._server.close()
