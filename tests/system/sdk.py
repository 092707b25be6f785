"""Shared code of the SDK's system tests: namespaces, self-describing blocks, and counts of held pages."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.system.blocks import SOON_S, await_true
from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import Client, NamespaceSpec, OpenedNamespace, PutResult
from tierd.client.transport.local import LocalTransport
from tierd.testing import chain, content_of, is_content

MIB = 1 << 20
BIG = NamespaceSpec(model="big", tokens_per_block=16, block_bytes=2 * MIB)
SMALL = NamespaceSpec(model="small", tokens_per_block=16, block_bytes=4096)
HOST_BYTES = 32 * MIB
HOST = '[[host]]\ncapacity = "32 MiB"\nsegment = "4 MiB"\n'
"""Host memory alone: evicted blocks are lost."""
TENFOLD = 10 * HOST_BYTES


def put(client: Client, namespace: OpenedNamespace, seed: int, count: int) -> PutResult:
    """Stores a chain, each block with the content of its hash."""
    hashes, size = chain(seed, count), namespace.spec.block_bytes
    return client.put(namespace, hashes, [content_of(name, size) for name in hashes])


def right(views: Sequence[np.ndarray], seed: int) -> int:
    """The number of views with the bytes of this seed's chain."""
    hashes = chain(seed, len(views))
    return sum(is_content(np.ascontiguousarray(view), name) for view, name in zip(views, hashes, strict=True))


def churn(client: Client, *, seed: int, total: int = TENFOLD, byte: int = 0xEE) -> int:
    """Stores 2 MiB blocks of one repeated byte, `total` bytes of them; the number of blocks.

    A put stores nothing while all evictable blocks are still on their way to NVMe. A later put
    succeeds.
    """
    namespace = client.open_namespace(BIG)
    block, stored, turns = np.full(BIG.block_bytes, byte, dtype=np.uint8), 0, itertools.count()
    while stored * BIG.block_bytes < total:
        stored += _store(client, namespace, block, names=(chain(seed * 100_000 + turn, 4) for turn in turns))
    return stored


def _store(client: Client, namespace: OpenedNamespace, block: np.ndarray, names: Iterator[np.ndarray]) -> int:
    """Puts four blocks until the daemon stores some of them; their number."""
    begun = time.monotonic()
    while not (stored := client.put(namespace, next(names), [block] * 4).stored):
        assert time.monotonic() - begun < SOON_S, f"no block was stored for {SOON_S:g} s"
    return int(stored)


def count_calls(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts this process's later calls by name."""
    found, inner = Counter[str](), LocalTransport.call

    def call(self: LocalTransport, method: str, request: Any, **how: Any) -> Any:
        found[method] += 1
        return inner(self, method, request, **how)

    patch.setattr(LocalTransport, "call", call)
    return found


def held(daemon: Daemon) -> tuple[int, int, int, int]:
    """Leases, reservations, pinned pages and reserved pages."""
    with RawClient(daemon.target) as client:
        return _held(client)


def _held(client: RawClient) -> tuple[int, int, int, int]:
    status = client.call(client.admin.Status, apb.StatusRequest())
    tiers = client.call(client.admin.Tiers, apb.TiersRequest()).tiers
    pages = (sum(tier.pages_pinned for tier in tiers), sum(tier.pages_reserved for tier in tiers))
    return (status.leases, status.reservations, *pages)


NOTHING = (0, 0, 0, 0)


def leases_of(client: RawClient) -> int:
    """The daemon's number of leases."""
    return int(client.call(client.admin.Status, apb.StatusRequest()).leases)


def session_names(daemon: Daemon) -> set[str]:
    """Names of all sessions that the daemon knows."""
    with RawClient(daemon.target) as client:
        return {session.name for session in client.call(client.admin.Sessions, apb.SessionsRequest()).sessions}


def await_nothing_held(daemon: Daemon, after: str) -> float:
    """Waits until the daemon counts no lease, reservation or pin; the seconds that it took."""
    gc.collect()
    with RawClient(daemon.target) as client:
        return await_true(lambda: _held(client) == NOTHING, f"everything given back after {after}")


def empty(daemon: Daemon, after: str) -> None:
    """Waits until nothing is held and evicts every block, so that another test can use the daemon."""
    await_nothing_held(daemon, after)
    with RawClient(daemon.target) as client:
        assert client.call(client.admin.Evict, apb.EvictRequest()).pinned == 0


def arena_files(daemon: Daemon) -> list[Path]:
    """The files of the segments and catalogues."""
    config = (daemon.root / "tierd.toml").read_text()
    arena = config.split('arena_dir = "')[1].split('"')[0]
    return [path for path in Path(arena).rglob("*") if path.is_file()]
