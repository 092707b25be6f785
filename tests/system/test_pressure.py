"""Memory pressure: sizes, namespaces and sessions share tiers, no page leaks, every client progresses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.cli.admin import connect
from tierd.client import Client, NamespaceSpec
from tierd.core.formats.model import HANDLE
from tierd.testing import chain, content_of, is_content

MIB = 1 << 20
SIZES = (4096, 128 * 1024, 2 * MIB)
DEADLINE_S = 60.0
CONFIG = """\
[[host]]
capacity = "32 MiB"
segment = "2 MiB"
eviction = "lru"

[[nvme]]
capacity = "128 MiB"
segment = "8 MiB"
"""
BURST = """\
[server]
clock = "replay"
[[host]]
capacity = "32 MiB"
segment = "2 MiB"
high_watermark = 0.3
low_watermark = 0.25
[[nvme]]
capacity = "128 MiB"
segment = "8 MiB"
"""
"""With a replay clock, only Quiesce demotes blocks."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with host memory of 16 segments above a store four times as large."""
    with Daemon(CONFIG) as running:
        yield running


def _put(client: RawClient, namespace: int, hashes: np.ndarray, *, length: int) -> int:
    """Writes and commits the blocks that get a page. Returns the number of blocks held afterwards."""
    reservation, handles = client.reserve(namespace, hashes, length=length)
    for handle, name in zip(handles, hashes, strict=True):
        if handle["status"] == pb.BLOCK_STATUS_RESERVED:
            client.page(handle, writable=True)[:] = content_of(name, length).tobytes()
    if reservation:
        client.call(client.cache.Commit, pb.CommitRequest(reservation=reservation))
    held = (pb.BLOCK_STATUS_RESERVED, pb.BLOCK_STATUS_EXISTS)
    return int(np.isin(handles["status"], held).sum())


def _get(client: RawClient, namespace: int, hashes: np.ndarray) -> int:
    """Checks every byte served. Returns the number of blocks."""
    group = pb.Group(namespace=namespace, hashes=hashes.tobytes())
    reply = client.call(client.cache.Acquire, pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST))
    if not reply.lease:
        return 0
    handles = np.frombuffer(reply.groups[0].handles, dtype=HANDLE)
    for handle, name in zip(handles, hashes[: len(handles)], strict=True):
        assert is_content(client.page(handle, writable=False), name)
    client.call(client.cache.Release, pb.ReleaseRequest(leases=[reply.lease]))
    return len(handles)


def _host(client: RawClient) -> apb.TierInfo:
    return client.call(client.admin.Tiers, apb.TiersRequest()).tiers[0]


def test_three_sizes_share_a_tier(daemon: Daemon) -> None:
    """Each of three block sizes in turn gets over 20 of the host tier's 32 MiB, with right bytes."""
    with RawClient(daemon.target) as client:
        names = {size: client.open_namespace(block_bytes=size, model=f"m{size}") for size in SIZES}
        for turn, size in enumerate((*SIZES, *reversed(SIZES))):
            batch = max(1, min(512, 4 * MIB // size))
            chains = [chain(100 * turn + i, batch) for i in range(40 * MIB // (size * batch))]
            for hashes in chains:
                assert _put(client, names[size], hashes, length=size) == len(hashes)
            share = {c.class_bytes: c.pages * c.class_bytes for c in _host(client).classes}
            assert share.get(size, 0) > 20 * MIB, f"{size}: {share}"
            assert _get(client, names[size], chains[-1]) == len(chains[-1])


def test_nothing_leaks(daemon: Daemon) -> None:
    """After puts and gets of all sizes, an eviction of everything empties both tiers and leaks no page."""
    noise = np.random.default_rng(3)
    with RawClient(daemon.target) as client:
        names = {size: client.open_namespace(block_bytes=size, model=f"m{size}") for size in SIZES}
        for seed in range(60):
            size = SIZES[noise.integers(len(SIZES))]
            hashes = chain(seed, max(1, min(64, 4 * MIB // size)))
            _put(client, names[size], hashes, length=size)
            _get(client, names[size], hashes[: len(hashes) // 2 + 1])
        client.call(client.admin.Quiesce, apb.QuiesceRequest(deadline_s=30))
        assert client.call(client.admin.Evict, apb.EvictRequest()).pinned == 0
        for tier in client.call(client.admin.Tiers, apb.TiersRequest()).tiers:
            left = (tier.used_bytes, tier.pages_reserved, tier.pages_ready, tier.pages_retiring, tier.pages_pinned)
            assert left == (0, 0, 0, 0, 0), tier.name
        status = client.call(client.admin.Status, apb.StatusRequest())
        assert (status.blocks, status.leases, status.reservations) == (0, 0, 0)


def test_demoted_blocks_come_back_from_nvme() -> None:
    """NVMe serves every demoted block with the right bytes."""
    # The watermarks keep enough blocks clean for a complete put or get, so no unwritten block is
    # dropped.
    roomy = CONFIG.replace("[[nvme]]", "high_watermark = 0.7\nlow_watermark = 0.5\n\n[[nvme]]")
    with Daemon(roomy) as daemon, RawClient(daemon.target) as client:
        namespace = client.open_namespace(block_bytes=128 * 1024)
        chains = [chain(seed, 32) for seed in range(16)]  # 64 MiB, twice the host tier
        for hashes in chains:
            _put(client, namespace, hashes, length=128 * 1024)
            client.call(client.admin.Quiesce, apb.QuiesceRequest(deadline_s=30))
        for hashes in chains:
            assert _get(client, namespace, hashes) == 32
            client.call(client.admin.Quiesce, apb.QuiesceRequest(deadline_s=30))


def test_headroom_is_free_between_requests() -> None:
    """A tier with `headroom = 0.25` accepts puts and has a quarter free again after Quiesce."""
    with (
        Daemon(CONFIG.replace("[[nvme]]", "headroom = 0.25\n\n[[nvme]]")) as daemon,
        RawClient(daemon.target) as client,
    ):
        namespace = client.open_namespace(block_bytes=128 * 1024)
        chains = [chain(seed, 48) for seed in range(5)]  # 30 MiB of 32
        for hashes in chains:
            assert _put(client, namespace, hashes, length=128 * 1024) == 48
        client.call(client.admin.Quiesce, apb.QuiesceRequest(deadline_s=30))
        assert 0 < _host(client).used_bytes <= 24 * MIB
        assert all(_get(client, namespace, hashes) == 48 for hashes in chains)


@pytest.mark.parametrize("sessions", [2, 8])
def test_asking_for_twice_the_tier(daemon: Daemon, sessions: int) -> None:
    """Sessions that hold pages while asking for more, twice the tier in all, finish by their deadline."""
    length, per_session = 128 * 1024, 2 * 32 * MIB // (128 * 1024) // sessions
    faults: list[BaseException] = []
    left = [per_session] * sessions

    def run(number: int) -> None:
        try:
            with RawClient(daemon.target) as client:
                namespace = client.open_namespace(block_bytes=length)
                deadline = time.monotonic() + DEADLINE_S
                while left[number] and time.monotonic() < deadline:
                    left[number] -= _hold_and_put(client, namespace, number, left[number], length)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S + 15)
    assert not faults and not any(left), (faults, left)


def _hold_and_put(client: RawClient, namespace: int, number: int, wanted: int, length: int) -> int:
    """Holds the pages of a first Reserve during a second, then commits. Returns the blocks stored."""
    hashes = chain(1000 * number + wanted, wanted)
    first, handles = client.reserve(namespace, hashes, length=length)
    granted = handles["status"] == pb.BLOCK_STATUS_RESERVED
    second, _ = client.reserve(namespace, chain(7000 * number + wanted, wanted), length=length)
    if second:
        client.call(client.cache.Abort, pb.AbortRequest(reservation=second))
    if not first:
        return 0
    for handle, name in zip(handles[granted], hashes[granted], strict=True):
        client.page(handle, writable=True)[:] = content_of(name, length).tobytes()
    client.call(client.cache.Commit, pb.CommitRequest(reservation=first))
    return int(granted.sum())


def test_a_burst_beyond_what_is_looked_at_loses_nothing() -> None:
    """A burst larger than one demotion scan loses no block."""
    capacity, burst, each = 8192, 5120, 256
    with Daemon(BURST) as running, Client(running.target) as client, connect(running.target) as operator:
        space = client.open_namespace(NamespaceSpec(model="burst", tokens_per_block=16, block_bytes=4096))
        groups = [chain(number, each) for number in range((capacity + burst) // each)]
        for number, hashes in enumerate(groups):
            if number == capacity // each:
                operator.ask(apb.QuiesceRequest(deadline_s=DEADLINE_S))
            assert client.put(space, hashes, [bytes(4096)] * each).stored == each
        assert [client.lookup(space, hashes).tier_of[0].min() >= 0 for hashes in groups] == [True] * len(groups)
