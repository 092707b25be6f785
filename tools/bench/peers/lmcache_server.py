"""LMCache's server over ZMQ with its shared memory, as an engine's worker uses it. A put is prepare
and commit; a get is lookup, wait, prepare and commit."""

from __future__ import annotations

import importlib
import os
import secrets
import socket
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.peers.peer import CAPACITY_BYTES, MEMORY_BYTES, Blocks, Server

CHUNK_TOKENS, INSTANCE, MODEL, HERE = 16, 1, "bench", "127.0.0.1"
SEQUENCE_TOKENS = 4096  # at most, of a batch: token ids of batches differ by it, and must stay below 2^32
WAIT_S = 10.0
_MULTIPROCESS = "lmcache.v1.multiprocess"


class LMCacheServer:
    """The server and a client; each block is one chunk of a sequence, a batch one sequence."""

    def __init__(self, directory: Path) -> None:
        port, http = _free_port(), _free_port()
        name = f"bench-{secrets.token_hex(4)}"
        command = [str(Path(sys.executable).parent / "lmcache"), "server", "--host", HERE, "--port", str(port)]
        command += ["--transport", "zmq", "--shm-name", name, "--supported-transfer-mode", "engine_driven"]
        command += ["--l1-size-gb", str(MEMORY_BYTES / 2**30), "--eviction-policy", "LRU"]
        command += ["--chunk-size", str(CHUNK_TOKENS), "--http-host", HERE, "--http-port", str(http)]
        quiet = os.environ | {"LMCACHE_LOG_LEVEL": "WARNING"}
        self._server = Server(command, directory, env=quiet)
        factory: Any = importlib.import_module(f"{_MULTIPROCESS}.transport.factory").RequestClientFactory
        self._types: Any = importlib.import_module(f"{_MULTIPROCESS}.custom_types")
        self._client = factory.create(f"tcp://{HERE}:{port}")
        self._server.connected(lambda: self._client.get_chunk_size().result(timeout=1.0))
        self._memory: shared_memory.SharedMemory | None = None
        self._calls = self._used = 0
        self.pids = [self._server.pid]

    def memory(self, size: int) -> Blocks:
        return np.empty(size, dtype=np.uint8)

    def make_room(self, size: int) -> None:
        """Waits: eviction checks a watermark once a second, and then takes a fifth of the memory."""
        self._used += size
        if self._used > CAPACITY_BYTES / 2:
            time.sleep(size / (CAPACITY_BYTES / 8))

    def put(self, key: str, blocks: Blocks) -> None:
        self._register(blocks.shape[1])
        name = self._key(key, len(blocks))
        told = self._client.prepare_store(name, INSTANCE).result(timeout=WAIT_S).context
        slots = told.get("slots") or []
        if len(slots) != len(blocks):
            raise RuntimeError(f"lmcache: {len(slots)} slots for {len(blocks)} blocks")
        for slot, index in zip(slots, told["chunk_indices"], strict=True):
            np.copyto(self._slot(slot), blocks[index])
        if not self._client.commit_store(name, INSTANCE, b"").result(timeout=WAIT_S):
            raise RuntimeError(f"lmcache: {key} was not committed")

    def get(self, key: str, out: Blocks) -> None:
        name = self._key(key, len(out))
        self._client.lookup(name.no_worker_id_version(), 1).result(timeout=WAIT_S)
        held = self._client.wait_prefetch_status(name.request_id, WAIT_S).result(timeout=WAIT_S)
        told = self._client.prepare_retrieve(name, INSTANCE).result(timeout=WAIT_S)
        slots = told.context.get("slots", []) if told.success else []
        if len(slots) != len(out):
            raise LookupError(f"{key}: {held} chunks were found, {len(slots)} given")
        for slot, target in zip(slots, out, strict=True):
            np.copyto(target, self._slot(slot))
        self._client.commit_retrieve(name, INSTANCE).result(timeout=WAIT_S)
        self._client.end_session(name.request_id)

    def close(self) -> None:
        self._client.close()
        self._server.close()

    def _register(self, block_bytes: int) -> None:
        """Once: two halves (K and V) of one layer of bf16."""
        if self._memory is None:
            width = block_bytes // (2 * CHUNK_TOKENS * 2)
            payload = self._types.RegisterEngineDrivenContextPayload(
                INSTANCE, MODEL, 1, CHUNK_TOKENS, 1, width, "bfloat16", use_mla=False, num_physical_slots=CHUNK_TOKENS
            )
            told = self._client.register_kv_cache_engine_driven_context(payload).result(timeout=WAIT_S)
            self._memory = shared_memory.SharedMemory(name=told.shm_name.lstrip("/"))
            resource_tracker.unregister(f"/{self._memory.name}", "shared_memory")  # it is the server's

    def _slot(self, slot: dict[str, Any]) -> Blocks:
        assert self._memory is not None
        return np.frombuffer(self._memory.buf, dtype=np.uint8, count=slot["length"], offset=slot["offset"])

    def _key(self, key: str, blocks: int) -> Any:
        self._calls += 1
        first, count = int(key) * SEQUENCE_TOKENS, blocks * CHUNK_TOKENS
        return self._types.IPCCacheServerKey.from_token_ids(
            MODEL, 1, 0, list(range(first, first + count)), 0, count, f"request-{self._calls}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])
