"""Helpers for tests of `TierdTier`: vLLM's connector, prompts, and damage to stored blocks."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.system.blocks import connected
from tests.system.damaged import PAGE_BYTES, Place, paste
from tierd._proto import admin_pb2 as apb
from tierd.testing import Daemon
from tierd.tiers.store.recovery import load_index
from tierd.tiers.store.store_files import slots_path

CHUNK_TOKENS = 64
TOUCH = 1e-4
"""Closer log-probabilities are equal. A prompt in two pieces is summed in another order, which made
1.3e-5 on a processor without AVX-512."""
VERIFIED = """\
[server]
shutdown_deadline = "5 s"
[scrub]
period = "0 s"
[[host]]
capacity = "64 MiB"
segment = "2 MiB"
verify = "always"
[[nvme]]
capacity = "128 MiB"
segment = "4 MiB"
"""
TRUSTING = VERIFIED.replace('verify = "always"', 'verify = "first_hit"')


def connector(
    daemon: Daemon, *, host_bytes: int = 16 << 20, extra: dict[str, Any] | None = None, **tier: Any
) -> dict[str, Any]:
    """kv_transfer_config: vLLM's OffloadingConnector with a host tier, tierd beneath. tier: more options."""
    entry = {
        "type": "TierdTier",
        "module_path": "tierd.integrations.vllm",
        "target": daemon.target,
        "lookup_timeout_s": 10,
        "timeout_s": 30,
    } | tier
    spec = {
        "spec_name": "CpuTiering",
        "spec_module_path": "tests.engines.vllm.cpu_tiering",
        "cpu_bytes_to_use": host_bytes,
    }
    sizes = {"block_size": CHUNK_TOKENS} if extra is None else extra
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": spec | sizes | {"secondary_tiers": [entry]},
    }


def prompt(seed: int, length: int = 400) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


def far_from(first: list[float], second: list[float]) -> float:
    """The largest difference of two rows of log-probabilities."""
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def flushed(daemon: Daemon) -> list[tuple[Place, Any]]:
    """The stored blocks, after all blocks in memory were flushed to disk."""
    with connected(daemon) as client:
        client.call(client.admin.Flush, apb.FlushRequest())
    return stored(daemon)


def stored(daemon: Daemon) -> list[tuple[Place, Any]]:
    """The blocks in the daemon's index, with META. A dropped block's slot keeps its header until reuse."""
    directory = daemon.root / "state" / "nvme-0"
    store = json.loads((directory / "store.json").read_text())["store"]
    index = load_index(directory, store=bytes.fromhex(store)).index
    files = {begun.segment: slots_path(directory, begun.place) for begun in index.segments.values()}
    return [(Place(files[int(meta["segment"])], int(meta["offset"])), meta) for meta in index.metas]


def names(found: list[tuple[Place, Any]]) -> set[bytes]:
    """Hashes of blocks. A restart reuses bad slots, so neither places nor counts identify new blocks."""
    return {meta["hash"].tobytes() for _, meta in found}


def found_bad(daemon: Daemon) -> list[int]:
    """Pages found bad so far, in memory and in the store."""
    with connected(daemon) as client:
        return [client.counter(f'tierd_corrupt_total{{tier="{tier}"}}') for tier in ("host.0", "nvme.0")]


def cold_restart(daemon: Daemon, *, config: str | None = None, failpoints: str = "") -> None:
    """Ends the daemon in order and starts it without its memory, so that all blocks come from the store."""
    daemon.terminate()
    daemon.await_end()
    for path in daemon.arena.iterdir():
        shutil.rmtree(path)
    if config:
        daemon.configure(config)
    daemon.start(failpoints=failpoints)


def spoil(place: Place, length: int) -> None:
    """Overwrites a block with other bytes, finite as floats."""
    paste(place, np.full(length // 4, 0.5, dtype="<f4").tobytes())


def pages_like(daemon: Daemon, data: bytes) -> list[Place]:
    """Places in the daemon's memory at which a page begins with these bytes."""
    found = []
    for path in sorted(Path(daemon.arena).rglob("[0-9]*.data")):
        memory = path.read_bytes()
        found += [Place(path, at) for at in range(0, len(memory), PAGE_BYTES) if memory.startswith(data, at)]
    return found
