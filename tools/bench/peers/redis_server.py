"""Redis and Valkey over a unix socket, nothing kept on disk: a pipeline of SETs a batch, one MGET.

A single block is a SET and a GET. The client's extension in C reads the answers. It does not write
the commands: puts of 2 MiB took four times as long with it as with the client's own Python.
"""

from __future__ import annotations

import importlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.peers.peer import CAPACITY_BYTES, Blocks, Server, found

LARGE_BYTES = 6000
"""Values from this size on are sent without a copy: the clients' own figure."""


class RedisServer:
    """A server of either kind, and its client."""

    def __init__(self, directory: Path, *, module: str, program: str) -> None:
        client: Any = importlib.import_module(module)
        connection: Any = importlib.import_module(f"{module}.connection")
        path = str(directory / "redis.sock")
        options = {"port": "0", "unixsocket": path, "save": "", "appendonly": "no", "daemonize": "no"}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._server = Server([found(program), *words], directory)
        writer = connection.PythonRespSerializer(LARGE_BYTES, connection.Encoder("utf-8", "strict", False).encode)
        pool = client.ConnectionPool(
            connection_class=connection.UnixDomainSocketConnection, path=path, command_packer=writer
        )
        make = client.Redis if module == "redis" else client.Valkey
        self._client = make(connection_pool=pool)
        self._server.connected(self._client.ping)
        self.pids = [self._server.pid]
        self._batches: deque[tuple[str, int, int]] = deque()
        self._bytes = 0

    def memory(self, size: int) -> Blocks:
        return np.empty(size, dtype=np.uint8)

    def make_room(self, size: int) -> None:
        # Its own eviction takes blocks that are not old: it counts age in seconds.
        while self._batches and self._bytes + size > CAPACITY_BYTES:
            key, count, its = self._batches.popleft()
            self._client.delete(*(f"{key}/{i}" for i in range(count)))
            self._bytes -= its

    def put(self, key: str, blocks: Blocks) -> None:
        if len(blocks) > 1:
            pipeline = self._client.pipeline(transaction=False)
            for i, block in enumerate(blocks):
                pipeline.set(f"{key}/{i}", memoryview(block))
            pipeline.execute()
        else:
            self._client.set(f"{key}/0", memoryview(blocks[0]))
        self._batches.append((key, len(blocks), blocks.nbytes))
        self._bytes += blocks.nbytes

    def get(self, key: str, out: Blocks) -> None:
        names = [f"{key}/{i}" for i in range(len(out))]
        for i, each in enumerate(self._client.mget(names) if len(names) > 1 else [self._client.get(names[0])]):
            if each is None:
                raise LookupError(f"{key}/{i}")
            out[i] = np.frombuffer(each, dtype=np.uint8)

    def close(self) -> None:
        self._client.close()
        self._server.close()
