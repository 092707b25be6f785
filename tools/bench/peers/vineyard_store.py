"""Vineyard: a blob of shared memory for each block, made and sealed in a call a batch where its client offers that; the oldest batches leave."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.peers.peer import CAPACITY_BYTES, Blocks, Server, found

ROOM = 5 / 4
"""Of the server's memory over what is kept: its allocator needs some."""


class VineyardStore:
    """vineyardd and its IPC client. Names of batches are kept here, as its users keep ids in objects."""

    def __init__(self, directory: Path) -> None:
        vineyard: Any = importlib.import_module("vineyard")
        path = str(directory / "vineyard.sock")
        size = str(int(CAPACITY_BYTES * ROOM))
        self._server = Server(
            [found("vineyardd"), "--socket", path, "--size", size, "--meta", "local", "--rpc=false"], directory
        )
        self._client = self._server.connected(lambda: vineyard.connect(path))
        self._batches: OrderedDict[str, list[Any]] = OrderedDict()
        self._used = 0
        self.pids = [self._server.pid]

    def memory(self, size: int) -> Blocks:
        return np.empty(size, dtype=np.uint8)

    def make_room(self, size: int) -> None:
        self._used += size
        while self._used > CAPACITY_BYTES:
            _, ids = self._batches.popitem(last=False)
            self._used -= size
            self._client.delete(ids)

    def put(self, key: str, blocks: Blocks) -> None:
        builders = self._client.create_blob([blocks.shape[1]] * len(blocks))
        for builder, block in zip(builders, blocks, strict=True):
            np.copyto(np.frombuffer(memoryview(builder), dtype=np.uint8), block)
        self._batches[key] = [builder.seal(self._client).id for builder in builders]

    def get(self, key: str, out: Blocks) -> None:
        if key not in self._batches:
            raise LookupError(key)
        self._batches.move_to_end(key)
        for target, blob in zip(out, self._client.get_blobs(self._batches[key]), strict=True):
            np.copyto(target, np.frombuffer(memoryview(blob), dtype=np.uint8))

    def close(self) -> None:
        self._client.close()
        self._server.close()
