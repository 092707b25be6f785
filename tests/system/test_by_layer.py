"""Leases on pages that the daemon still fills from its stores, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.system.blocks import SOON_S
from tests.system.test_encoded_stores import evict
from tests.system.warm import Daemon
from tierd.client import BlockStatus, Client, Group, KVGeometry, NamespaceSpec
from tierd.errors import StaleHandle, TierdError
from tierd.testing import chain

LAYERS = 8
LAYER_BYTES = 256 << 10
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
"""
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


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon whose store alone has the blocks."""
    with Daemon(CONFIG.format(verify="first_hit"), faults=True) as daemon:
        with Client(daemon.target) as client:
            put(client)
        evict(daemon)
        yield daemon


def put(client: Client) -> None:
    space = client.open_namespace(SPEC)
    assert (client.put(space, NAMES, KEPT, durable=True).statuses == BlockStatus.READY).all()


def layer_of(block: np.ndarray, layer: int) -> np.ndarray:
    return block[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]


def test_each_layer_is_right_when_it_is_there(daemon: Daemon) -> None:
    """After await_layer(n) returns True, layer n of every block has the bytes that were put."""
    with Client(daemon.target) as client:
        lease = client.acquire_by_layer(Group(client.open_namespace(SPEC), NAMES))
        assert len(lease) == BLOCKS
        views = lease.views()
        for layer in range(LAYERS):
            assert lease.await_layer(layer, timeout_s=SOON_S)
            for view, block in zip(views, KEPT, strict=True):
                assert np.array_equal(layer_of(view, layer), layer_of(block, layer))
        assert lease.check() == BLOCKS
        del view, views
        lease.release()


def test_a_layer_is_told_before_later_ones_are_read(daemon: Daemon) -> None:
    """While the daemon is stuck before the third of four parts, half of the layers are there, the next not."""
    with Client(daemon.target) as client, daemon.faults() as faults:
        space = client.open_namespace(SPEC)
        faults.arm(NOTE, "delay:3@3x1")
        lease = client.acquire_by_layer(Group(space, NAMES))
        assert lease.await_layer(3, timeout_s=SOON_S)
        assert lease.check() == 0, "no block is whole yet"
        assert not lease.await_layer(4, timeout_s=0.0)
        assert lease.await_layer(None, timeout_s=SOON_S)
        assert lease.check() == BLOCKS
        lease.release()


def test_later_clients_find_the_blocks_near(daemon: Daemon) -> None:
    """Blocks that were loaded by layer are ordinary host blocks afterwards."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        with client.acquire_by_layer(Group(space, NAMES)) as lease:
            assert lease.await_layer(timeout_s=SOON_S)
        found = client.lookup(space, NAMES)
        assert found.tokens == 16 * BLOCKS and found.tier_tokens[0] == 16 * BLOCKS
        with client.acquire_by_layer(Group(space, NAMES)) as lease:
            assert lease.await_layer(timeout_s=0.0), "nothing to wait for"
            assert [bool(np.array_equal(view, block)) for view, block in zip(lease.views(), KEPT, strict=True)]


def test_a_damaged_layer_is_never_there(daemon: Daemon) -> None:
    """If a byte of the store has changed, await_layer ends with False at its layer, and not before it."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        flip(daemon, KEPT[5], at=6 * LAYER_BYTES + 77)
        lease = client.acquire_by_layer(Group(space, NAMES))
        assert len(lease) == BLOCKS
        assert lease.await_layer(5, timeout_s=SOON_S)
        assert not lease.await_layer(6, timeout_s=SOON_S)
        assert lease.check() <= 5
        lease.release()
        with client.acquire(Group(space, NAMES)) as again:
            assert len(again) == 5


def test_a_dead_daemon_tells_nothing(daemon: Daemon) -> None:
    """After a kill during the load, await_layer ends with False, and the lease has ended."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        with daemon.faults() as faults:
            faults.arm(NOTE, "kill@3")
            lease = client.acquire_by_layer(Group(space, NAMES))
        assert not lease.await_layer(7, timeout_s=SOON_S)
        with pytest.raises(StaleHandle):
            lease.check()
        lease.detach()


@pytest.mark.parametrize("point", [NOTE, "cache.acquire.before_promise"])
def test_a_death_on_the_way_loses_nothing(daemon: Daemon, point: str) -> None:
    """After a death at either fault point the next daemon serves every block, and nothing stays pinned."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        with daemon.faults() as faults, contextlib.suppress(TierdError):
            faults.arm(point, "kill@2" if point == NOTE else "kill")
            client.acquire_by_layer(Group(space, NAMES)).await_layer(timeout_s=SOON_S)
    assert daemon.await_end() == -9
    daemon.start()
    with Client(daemon.target) as client:
        with client.acquire_by_layer(Group(client.open_namespace(SPEC), NAMES)) as lease:
            assert lease.await_layer(timeout_s=SOON_S)
            assert all(np.array_equal(view, block) for view, block in zip(lease.views(), KEPT, strict=True))
        evict(daemon)
        assert client.lookup(client.open_namespace(SPEC), NAMES).tier_tokens[0] == 0


def test_a_lease_that_ends_early_leaves_nothing(daemon: Daemon) -> None:
    """A client that releases during the load leaves no pin, and the blocks can be evicted."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        client.acquire_by_layer(Group(space, NAMES)).release()
        with client.acquire(Group(space, NAMES)) as lease:
            assert len(lease) == BLOCKS
    evict(daemon)
    with Client(daemon.target) as client:
        assert client.lookup(client.open_namespace(SPEC), NAMES).tier_tokens[0] == 0


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
