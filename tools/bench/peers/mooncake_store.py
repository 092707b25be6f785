"""Mooncake Store: a master, a standalone client that owns the memory, a thin client that shares it.

A batch needs one call to put or get it, with the caller's registered memory. A single get uses the
call for one block, which takes a fifth less time. Its programs load libibverbs, which the
distribution installs (Debian: libibverbs1).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.peers.peer import CAPACITY_BYTES, MEMORY_BYTES, Blocks, Server, found

POOL_BYTES = 512 << 20
"""The thin client shares this with the owner of the memory: it has the caller's buffers."""
HERE = "127.0.0.1"


class MooncakeStore:
    """Two servers and a client, over loopback TCP and shared memory."""

    def __init__(self, directory: Path) -> None:
        store: Any = importlib.import_module("mooncake.store")
        master, metrics, owner = (_free_port() for _ in range(3))
        at = f"{HERE}:{master}"
        ports = [f"-rpc_port={master}", f"-metrics_port={metrics}", f"-rpc_address={HERE}", f"-metrics_host={HERE}"]
        self._servers = [Server([found("mooncake_master", "mooncake"), *ports], directory)]
        owns = [f"-host={HERE}", f"-port={owner}", f"-master_server_address={at}", "-metadata_server=P2PHANDSHAKE"]
        owns += [f"-global_segment_size={MEMORY_BYTES}", "-protocol=tcp"]
        environment = os.environ | {"MC_STORE_MEMCPY": "1"}
        self._servers[0].connected(lambda: socket.create_connection((HERE, master), 1).close())
        self._servers.append(Server([found("mooncake_client", "mooncake"), *owns], directory, env=environment))
        self._store = store.MooncakeDistributedStore()
        self._servers[1].connected(lambda: self._connect(f"{HERE}:{owner}"))
        self._batches: OrderedDict[str, list[str]] = OrderedDict()
        self._used = 0
        self.pids = [server.pid for server in self._servers]

    def memory(self, size: int) -> Blocks:
        """Of the pool: uint8 [size]."""
        address = self._store.alloc_from_mem_pool(size)
        if not address or self._store.register_buffer(address, size):
            raise MemoryError(f"mooncake: no {size} bytes left in its pool of {POOL_BYTES}")
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8)

    def make_room(self, size: int) -> None:
        """Removes the oldest batch by name. Its own eviction takes unread batches, which are still
        to be read here."""
        self._used += size
        while self._used > CAPACITY_BYTES:
            _, names = self._batches.popitem(last=False)
            self._used -= size
            self._store.batch_remove(names, True)

    def put(self, key: str, blocks: Blocks) -> None:
        names, addresses, sizes = _named(key, blocks)
        done = self._store.batch_put_from(names, addresses, sizes)
        if any(done):
            raise RuntimeError(f"mooncake: put of {key} gave {set(done)}")
        self._batches[key] = names

    def get(self, key: str, out: Blocks) -> None:
        names, addresses, sizes = _named(key, out)
        if len(names) > 1:
            done = self._store.batch_get_into(names, addresses, sizes)
        else:
            done = [self._store.get_into(names[0], addresses[0], sizes[0])]
        if set(done) != {out.shape[1]}:
            raise LookupError(f"{key}: {set(done)}")

    def close(self) -> None:
        self._store.close()
        for server in reversed(self._servers):
            server.close()

    def _connect(self, owner: str) -> None:
        if self._store.setup_dummy(POOL_BYTES, 0, owner):
            raise ConnectionError(owner)


def _named(key: str, blocks: Blocks) -> tuple[list[str], list[int], list[int]]:
    """Names, addresses and sizes."""
    size = blocks.shape[1]
    first = blocks.ctypes.data
    return (
        [f"{key}/{i}" for i in range(len(blocks))],
        [first + i * size for i in range(len(blocks))],
        [size] * len(blocks),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])
