"""Vineyard: a blob of shared memory for each block; the least recently used batches are deleted.

One call makes the blobs of a batch, and one gets them; its client seals each in a separate call.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.peers.peer import CAPACITY_BYTES, MEMORY_BYTES, Blocks, Server, found


class VineyardStore:
    """vineyardd and its IPC client. This object keeps names of batches, as users keep ids in
    objects."""

    def __init__(self, directory: Path) -> None:
        vineyard: Any = importlib.import_module("vineyard")
        path = str(directory / "vineyard.sock")
        command = [found("vineyardd"), "--socket", path, "--size", str(MEMORY_BYTES), "--meta", "local", "--rpc=false"]
        self._server = Server(command, directory)
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
