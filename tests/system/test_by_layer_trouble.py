"""Leases by layer among other blocks, other clients, other stores, ends and faults."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.system.blocks import SOON_S, await_true, connected
from tests.system.shim.iofault import READS, IoFaults
from tests.system.test_by_layer import (
    BLOCKS,
    CONFIG,
    FIRST_HIT,
    KEPT,
    LAYERS,
    NAMES,
    ORDERED,
    SPEC,
    blocks_of,
    by_layer,
    far,
    held,
    loaded_until,
)
from tests.system.test_encoded_stores import evict
from tests.system.test_epoch import bump
from tests.system.warm import Daemon
from tierd.client import BlockStatus, Client, Group, KVGeometry, Lease, NamespaceSpec, PutGroup
from tierd.core.formats.model import ROOT, StructArray
from tierd.errors import TierdError
from tierd.testing import chain

LEVEL_0 = FIRST_HIT.replace("[[nvme]]", '[[nvme]]\nlevel = 0\ncapacity = "128 MiB"\nsegment = "32 MiB"\n\n[[nvme]]', 1)
UNALIGNED = NamespaceSpec("u", 16, 5 * (600 << 10) + 5 * 2048, geometry=KVGeometry(5, 1, 602 << 4, "float16"))
"""Its layers begin within pages of 4 KiB."""
OPAQUE = NamespaceSpec("o", 16, 2 << 20)
RANKED = NamespaceSpec("r", 16, SPEC.block_bytes, rank_count=2, geometry=SPEC.geometry)


@pytest.fixture
def io(tmp_path: Path) -> IoFaults:
    return IoFaults(tmp_path)


def kept_of(spec: NamespaceSpec, count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, spec.block_bytes, np.uint8) for _ in range(count)]


def await_all(lease: Lease, kept: Sequence[np.ndarray], layers: int = LAYERS) -> None:
    """Waits for each layer and compares it, then checks and releases."""
    views = lease.views()
    assert len(views) == len(kept)
    for layer in range(layers):
        assert lease.await_layer(layer, timeout_s=SOON_S)
        for view, block in zip(views, kept, strict=True):
            end = len(block) * (layer + 1) // layers if len(block) % layers == 0 else len(block)
            assert np.array_equal(view[:end], block[:end])
    assert lease.await_layer(timeout_s=SOON_S)
    assert [bool(np.array_equal(view, block)) for view, block in zip(views, kept, strict=True)] == [True] * len(kept)
    assert lease.check() > 0
    del view, views
    lease.release()


def pending(lease: Lease) -> StructArray:
    return np.asarray(lease.handles["status"] == BlockStatus.PENDING)


@pytest.mark.parametrize("config", [FIRST_HIT, CONFIG.format(verify="sampled"), LEVEL_0])
@pytest.mark.parametrize("spec", [SPEC, UNALIGNED, OPAQUE], ids=lambda spec: spec.model)
def test_blocks_of_any_shape_come(config: str, spec: NamespaceSpec) -> None:
    """Blocks with aligned, unaligned or no layers, with a short last one, come right from any level."""
    layers = spec.geometry.layers or 1
    kept = kept_of(spec, 6)
    kept[5] = kept[5][: spec.block_bytes * 3 // 16 // layers * layers]
    names, tokens = chain(3, 6), 5 * 16 + 3
    with Daemon(config) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(spec)
        group = PutGroup(space, names, tokens)
        assert (client.put(space, group, kept, durable=True).statuses == BlockStatus.READY).all()
        evict(daemon)
        lease = client.acquire_by_layer(Group(space, names, tokens))
        assert pending(lease).all()
        await_all(lease, kept, layers)


def test_pages_to_be_verified_at_each_hit_come_whole() -> None:
    """Under verify = "always" a lease by layer has no pending page, and its bytes are right."""
    with far(CONFIG.format(verify="always")) as (_, client):
        lease = by_layer(client)
        assert not pending(lease).any()
        await_all(lease, KEPT)


@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_blocks_that_a_store_keeps_encoded_come(codec: str) -> None:
    """Encoded blocks come whole, also beside blocks that are not encoded."""
    values = [np.random.default_rng(i).standard_normal(SPEC.block_bytes // 2) for i in range(BLOCKS)]
    kept = [value.astype(np.float16).view(np.uint8) for value in values]
    kept[7] = KEPT[7]  # has no short form
    config = FIRST_HIT.replace('admission = "all"', f'admission = "all"\ncodec = "{codec}"')
    with Daemon(config) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC, error_limit=float("inf"))
        assert (client.put(space, NAMES, kept, durable=True).statuses == BlockStatus.READY).all()
        evict(daemon)
        lease = client.acquire_by_layer(Group(space, NAMES))
        assert pending(lease).any()
        assert lease.await_layer(timeout_s=SOON_S)
        assert lease.check() == BLOCKS
        found = [np.array(view) for view in lease.views()]
        with client.acquire(Group(space, NAMES)) as whole:
            assert [bool(np.array_equal(a, b)) for a, b in zip(found, whole.views(), strict=True)] == [True] * BLOCKS
        lease.release()


def test_near_and_far_blocks_come_together() -> None:
    """Only far pages are pending; the near ones are right at once."""
    with far() as (_, client):
        client.acquire(Group(client.open_namespace(SPEC), NAMES[:6])).release()
        lease = by_layer(client)
        assert pending(lease).tolist() == [False] * 6 + [True] * (BLOCKS - 6)
        await_all(lease, KEPT)


def test_several_groups_and_ranks_come_together() -> None:
    """A lease on two groups, one of them with two ranks, has every layer of every page."""
    with far() as (daemon, client):
        space, kept = client.open_namespace(RANKED), [kept_of(RANKED, 4, seed=rank) for rank in (1, 2)]
        names = chain(9, 4)
        for rank, blocks in enumerate(kept):
            client.put(space, PutGroup(space, names, rank=rank), blocks, durable=True)
        evict(daemon)
        groups = [Group(client.open_namespace(SPEC), NAMES[:4]), Group(space, names, ranks=(0, 1))]
        lease = client.acquire_by_layer(groups)
        assert pending(lease).all() and len(lease) == 12
        await_all(lease, [*KEPT[:4], *kept[0], *kept[1]])


def test_many_wait_for_one_load(io: IoFaults) -> None:
    """Two clients by layer, one that waits for whole blocks, and a prefetch share one load."""
    with far(ORDERED, env=io.env) as (daemon, one), Client(daemon.target) as other:
        with held(io, 2):
            first, second = by_layer(one), by_layer(other)
            assert one.prefetch(blocks_of(one)) == 0
            assert first.await_layer(1, timeout_s=SOON_S) and second.await_layer(1, timeout_s=SOON_S)
            assert not first.await_layer(2, timeout_s=0.0) and not second.await_layer(2, timeout_s=0.0)
        with other.acquire(blocks_of(other)) as whole:
            assert len(whole) == BLOCKS
        await_all(second, KEPT)
        await_all(first, KEPT)


def test_a_prefetch_before_is_shared(io: IoFaults) -> None:
    """A lease by layer on blocks that a prefetch already brings has all of them in the end."""
    with far(ORDERED, env=io.env) as (_, client):
        with held(io, 0):
            assert client.prefetch(blocks_of(client)) == BLOCKS
            lease = by_layer(client)
            assert pending(lease).all()
        await_all(lease, KEPT)


def test_a_load_above_the_capacity_ends() -> None:
    """Of more blocks than host memory holds, a lease by layer has as many as fit, and they are right."""
    config = FIRST_HIT.replace('"128 MiB"', '"64 MiB"', 1)
    with Daemon(config) as daemon, Client(daemon.target) as client:
        space, names = client.open_namespace(SPEC), chain(5, 40)
        kept = kept_of(SPEC, 40)
        for i in range(0, 40, 8):
            parent = names[i - 1].tobytes() if i else ROOT
            client.put(
                space, PutGroup(space, names[i : i + 8], parent=parent, position=i), kept[i : i + 8], durable=True
            )
            evict(daemon)
        lease = client.acquire_by_layer(Group(space, names))
        assert 0 < len(lease) < 40 and not lease.whole
        await_all(lease, kept[: len(lease)])


def test_a_client_that_dies_leaves_nothing(io: IoFaults) -> None:
    """After SIGKILL to a client during its load, nothing stays pinned and the blocks are intact."""
    with far(ORDERED, env=io.env) as (daemon, client), connected(daemon) as raw:
        command = [sys.executable, "-m", "tests.system.by_layer_victim", daemon.target]
        with held(io, 2):
            assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
        await_true(lambda: not raw.tiers()["host.0"].pages_pinned, "no page pinned")
        await_all(by_layer(client), KEPT)
        evict(daemon)
        assert not raw.tiers()["host.0"].pages_ready


def test_a_stop_during_a_load_is_in_time(io: IoFaults) -> None:
    """The daemon ends in good order during a load, and its client gets no layer."""
    with far(env=io.env) as (daemon, client):
        with io.armed(READS, "delay:0.1", "*.slots"):
            lease = by_layer(client)
            assert daemon.stop() == 0
        assert not lease.await_layer(0, timeout_s=SOON_S)
        assert "could not be settled" not in daemon.log
        lease.detach()


def test_a_restart_during_a_load_loses_no_block(io: IoFaults) -> None:
    """After a kill during a load, the same client gets every block from the next daemon, by layer."""
    with far(ORDERED, env=io.env) as (daemon, client):
        with loaded_until(client, io, 4) as lost:
            daemon.kill()
        daemon.start()
        await_all(by_layer(client), KEPT)
        lost.detach()


def test_a_hung_disk_gives_no_layer(io: IoFaults) -> None:
    """While the disk hangs, no layer is there, others' memory hits go on; later the blocks come."""
    with far(env=io.env) as (_, client):
        space, near = client.open_namespace(SPEC), chain(8, 1)
        client.put(space, near, KEPT[:1])
        with io.armed(READS, "hang", "*.slots"):
            lease = by_layer(client)
            assert not lease or not lease.await_layer(0, timeout_s=0.5)
            with client.acquire(Group(space, near)) as hit:
                assert len(hit) == 1
            if lease:
                assert lease.check() == 0
                lease.release()
        deadline = time.monotonic() + 4 * SOON_S
        while time.monotonic() < deadline:
            again = by_layer(client)
            if len(again) == BLOCKS and again.await_layer(timeout_s=SOON_S):
                break
            again.release()
        await_all(again, KEPT)


def test_an_ended_epoch_gives_no_late_layer(io: IoFaults) -> None:
    """An epoch that ends during a load takes the pages that are not there; what is there is right."""
    with far(ORDERED, env=io.env) as (daemon, client):
        with loaded_until(client, io, 2) as lease:
            bump(daemon, SPEC.model)
        lease.await_layer(timeout_s=SOON_S)
        good = lease.check()
        assert [bool(np.array_equal(v, b)) for v, b in zip(lease.views()[:good], KEPT, strict=False)] == [True] * good
        lease.release()


def test_a_negative_layer_is_refused() -> None:
    """A negative layer raises an error: no page would be waited for."""
    with far() as (_, client), by_layer(client) as lease, pytest.raises(TierdError, match="layer -1"):
        lease.await_layer(-1, timeout_s=SOON_S)
