"""Leases on pages that the daemon still fills from its stores, layer by layer."""

from __future__ import annotations

import contextlib
from bisect import bisect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.system.blocks import SOON_S
from tests.system.shim.iofault import READS, IoFaults
from tests.system.test_encoded_stores import evict
from tests.system.warm import Daemon
from tierd.client import BlockStatus, Client, Group, KVGeometry, Lease, NamespaceSpec
from tierd.errors import StaleHandle, TierdError
from tierd.testing import chain

LAYERS = 8
LAYER_BYTES = 256 << 10
STOPS = tuple(range(1, LAYERS + 1))
"""Layers of each block after each part of a load."""
BLOCKS = 16
CONFIG = """\
[[host]]
capacity = "128 MiB"
segment = "32 MiB"
verify = "{verify}"

[[nvme]]
capacity = "128 MiB"
segment = "32 MiB"
admission = "all"

[scrub]
period = "0 s"
"""
FIRST_HIT = CONFIG.format(verify="first_hit")
ORDERED = FIRST_HIT.replace("[[nvme]]", "[[nvme]]\nqueue_depth = 1")
"""One read follows the other, for `held`."""
SPEC = NamespaceSpec(
    model="m",
    tokens_per_block=16,
    block_bytes=LAYERS * LAYER_BYTES,
    geometry=KVGeometry(LAYERS, 8, 512, "float16"),
)
NAMES = chain(1, BLOCKS)
NOTE = "loads_by_layer.note.before_note"
RNG = np.random.default_rng(0)
KEPT = [RNG.integers(0, 256, SPEC.block_bytes, np.uint8) for _ in range(BLOCKS)]


def held(io: IoFaults, layer: int) -> AbstractContextManager[IoFaults]:
    """Holds a load of all blocks up before the part that has this layer, until the end of the context.
    Needs a daemon that is ORDERED."""
    return io.armed(READS, "hang", "*.slots", first=bisect(STOPS, layer) * BLOCKS + 1)


@contextmanager
def far(config: str = FIRST_HIT, **how: Any) -> Iterator[tuple[Daemon, Client]]:
    """A daemon whose store alone has the blocks, and a client. how: of Daemon."""
    with Daemon(config, **how) as daemon, Client(daemon.target) as client:
        put(client)
        evict(daemon)
        yield daemon, client


@contextmanager
def loaded_until(client: Client, io: IoFaults, layer: int) -> Iterator[Lease]:
    """A lease that has the layers before this one; the load is held up until the end of the context."""
    with held(io, layer):
        lease = by_layer(client)
        assert lease.await_layer(layer - 1, timeout_s=SOON_S)
        yield lease


@pytest.fixture
def io(tmp_path: Path) -> IoFaults:
    return IoFaults(tmp_path)


@pytest.fixture
def daemon(io: IoFaults) -> Iterator[Daemon]:
    """A daemon whose store alone has the blocks."""
    with far(ORDERED, env=io.env, faults=True) as (daemon, _):
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target) as client:
        yield client


def blocks_of(client: Client) -> Group:
    """All blocks."""
    return Group(client.open_namespace(SPEC), NAMES)


def by_layer(client: Client) -> Lease:
    """A lease on all blocks."""
    return client.acquire_by_layer(blocks_of(client))


def put(client: Client) -> None:
    space = client.open_namespace(SPEC)
    assert (client.put(space, NAMES, KEPT, durable=True).statuses == BlockStatus.READY).all()


def layer_of(block: np.ndarray, layer: int) -> np.ndarray:
    return block[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]


def test_each_layer_is_right_when_it_is_there(client: Client) -> None:
    """After await_layer(n) returns True, layer n of every block has the bytes that were put."""
    lease = by_layer(client)
    assert len(lease) == BLOCKS
    views = lease.views()
    for layer in range(LAYERS):
        assert lease.await_layer(layer, timeout_s=SOON_S)
        for view, block in zip(views, KEPT, strict=True):
            assert np.array_equal(layer_of(view, layer), layer_of(block, layer))
    assert lease.check() == BLOCKS
    del view, views
    lease.release()


def test_a_layer_is_told_before_later_ones_are_read(client: Client, io: IoFaults) -> None:
    """While the disk holds the fifth layer back, the first four are there, the fifth not."""
    with loaded_until(client, io, 4) as lease:
        assert lease.check() == 0, "no block is whole yet"
        assert lease.copy_into([bytearray(len(block)) for block in KEPT]) == 0
        assert not lease.await_layer(4, timeout_s=0.0)
    assert lease.await_layer(None, timeout_s=SOON_S)
    assert lease.check() == BLOCKS
    lease.release()


def test_reads_that_come_short_go_on(client: Client, io: IoFaults) -> None:
    """If reads of the store return a part of their bytes, all layers come, and they are right."""
    with io.armed(READS, "short", "*.slots", first=15, times=4), by_layer(client) as lease:
        assert lease.await_layer(timeout_s=SOON_S) and lease.check() == BLOCKS
        assert all(np.array_equal(view, block) for view, block in zip(lease.views(), KEPT, strict=True))


def test_later_clients_find_the_blocks_near(client: Client) -> None:
    """Blocks that were loaded by layer are ordinary host blocks afterwards."""
    with by_layer(client) as lease:
        assert lease.await_layer(timeout_s=SOON_S)
    found = client.lookup(blocks_of(client))
    assert found.tokens == 16 * BLOCKS and found.tier_tokens[0] == 16 * BLOCKS
    with by_layer(client) as lease:
        assert lease.await_layer(timeout_s=0.0), "nothing to wait for"
        assert all(np.array_equal(view, block) for view, block in zip(lease.views(), KEPT, strict=True))


def test_a_damaged_layer_is_never_there(daemon: Daemon, client: Client, io: IoFaults) -> None:
    """If a byte of the store has changed, await_layer ends with False at its layer, and not before it."""
    flip(daemon, KEPT[5], at=4 * LAYER_BYTES + 77)
    with held(io, 6):
        lease = by_layer(client)
        assert len(lease) == BLOCKS
        assert lease.await_layer(3, timeout_s=SOON_S)
        assert not lease.await_layer(4, timeout_s=0.5)
    assert not lease.await_layer(4, timeout_s=SOON_S)
    assert lease.check() <= 5
    lease.release()
    with client.acquire(blocks_of(client)) as again:
        assert len(again) == 5


def test_a_dead_daemon_tells_nothing(daemon: Daemon, client: Client, io: IoFaults) -> None:
    """After a kill during the load, await_layer ends with False, and the lease has ended."""
    with loaded_until(client, io, 2) as lease:
        daemon.kill()
        assert not lease.await_layer(7, timeout_s=SOON_S)
    with pytest.raises(StaleHandle):
        lease.check()
    lease.detach()


@pytest.mark.parametrize("point", [NOTE, "cache.acquire.before_promise"])
def test_a_death_on_the_way_loses_nothing(daemon: Daemon, point: str) -> None:
    """After a death at either fault point the next daemon serves every block, and nothing stays pinned."""
    with Client(daemon.target) as client, daemon.faults() as faults, contextlib.suppress(TierdError):
        faults.arm(point, "kill@2" if point == NOTE else "kill")
        by_layer(client).await_layer(timeout_s=SOON_S)
    assert daemon.await_end() == -9
    daemon.start()
    with Client(daemon.target) as client:
        with by_layer(client) as lease:
            assert lease.await_layer(timeout_s=SOON_S)
            assert all(np.array_equal(view, block) for view, block in zip(lease.views(), KEPT, strict=True))
        evict(daemon)
        assert client.lookup(blocks_of(client)).tier_tokens[0] == 0


def test_a_lease_that_ends_early_leaves_nothing(daemon: Daemon, client: Client) -> None:
    """A client that releases during the load leaves no pin, and the blocks can be evicted."""
    by_layer(client).release()
    with client.acquire(blocks_of(client)) as lease:
        assert len(lease) == BLOCKS
    evict(daemon)
    assert client.lookup(blocks_of(client)).tier_tokens[0] == 0


def flip(daemon: Daemon, block: np.ndarray, *, at: int) -> None:
    """Changes a byte of a block in the store's files."""
    begin = block[:4096].tobytes()
    for path in daemon.root.rglob("seg-*.slots"):
        data = path.read_bytes()
        found = data.find(begin)
        if found >= 0:
            with path.open("r+b") as file:
                file.seek(found + at)
                file.write(bytes([data[found + at] ^ 1]))
            return
    raise AssertionError("the block is in no file")
