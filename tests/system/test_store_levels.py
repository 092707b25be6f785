"""Levels of stores: memory, disk, a colder disk, each with a codec of its own."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from tests.system.blocks import SOON_S
from tests.system.raw import RawClient
from tests.system.test_encoded_stores import ANY, SPEC, blocks, evict, got, off, stored
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import BlockStatus, Client
from tierd.testing import chain

CONFIG = """\
[[host]]
capacity = "8 MiB"
segment = "1 MiB"
high_watermark = 0.3
low_watermark = 0.1

[[nvme]]
level = 0
capacity = "{memory}"
segment = "1 MiB"
codec = "{first}"
high_watermark = 0.5
low_watermark = 0.2

[[nvme]]
capacity = "32 MiB"
segment = "1 MiB"
codec = "{second}"
admission = "all"
"""
PAIRS = [chain(seed, 2) for seed in range(60)]
"""Sequences of two blocks: levels lose tails first, and a block is found only behind its prefix."""


def config(first: str, second: str, memory: str = "3 MiB") -> str:
    return CONFIG.format(first=first, second=second, memory=memory)


def used(daemon: Daemon) -> list[int]:
    """Bytes in use of each tier."""
    with RawClient(daemon.target) as client:
        return [tier.used_bytes for tier in client.call(client.admin.Tiers, apb.TiersRequest()).tiers]


def fill(daemon: Daemon, client: Client, limit: float) -> list[list[np.ndarray]]:
    """Puts more blocks than host memory and the first level hold, and waits until all are where they
    go. Returns them."""
    kept = [blocks(seed, 2) for seed in range(len(PAIRS))]
    space = client.open_namespace(SPEC, error_limit=limit)
    for names, pair in zip(PAIRS, kept, strict=True):
        assert (client.put(space, names, pair).statuses == BlockStatus.READY).all()
    with RawClient(daemon.target) as raw:
        raw.call(raw.admin.Quiesce, apb.QuiesceRequest(deadline_s=SOON_S))
    assert used(daemon)[2] > 0
    return kept


def errors_of(client: Client, kept: list[list[np.ndarray]], limit: float) -> list[list[float]]:
    """The errors of the blocks that are found, per sequence."""
    space = client.open_namespace(SPEC, error_limit=limit)
    found = [got(client, space, names) for names in PAIRS]
    return [off(views, pair[: len(views)]) for views, pair in zip(found, kept, strict=True)]


@pytest.mark.parametrize(("first", "second"), [("lossless", "lossless"), ("", "lossless"), ("lossless", ""), ("", "")])
def test_blocks_go_from_level_to_level_unchanged(first: str, second: str) -> None:
    """Exact blocks that a store in memory evicts are on the disk, byte by byte."""
    with Daemon(config(first, second)) as daemon, Client(daemon.target) as client:
        kept = fill(daemon, client, 0.0)
        evict(daemon)
        evict(daemon, "nvme.0")
        errors = errors_of(client, kept, 0.0)
        assert sum(map(len, errors)) > 0
        assert all(error == 0.0 for pair in errors for error in pair)


def test_blocks_encoded_by_two_levels_are_near_the_originals() -> None:
    """A block that two lossy levels encoded in turn is near the original; first blocks are exact."""
    with Daemon(config("rot-8-8", "rot-4-4")) as daemon, Client(daemon.target) as client:
        kept = fill(daemon, client, ANY)
        evict(daemon)
        evict(daemon, "nvme.0")
        errors = errors_of(client, kept, ANY)
        assert all(pair[0] == 0.0 for pair in errors if pair)
        seconds = [pair[1] for pair in errors if len(pair) > 1]
        assert seconds and all(0.01 < error < 1.0 for error in seconds)


def test_memory_alone_makes_nothing_durable() -> None:
    """Without a disk, a durable put fails and flush is refused, but the blocks are there."""
    first, _, _ = config("lossless", "").rpartition("\n[[nvme]]")
    kept = blocks(1, 2)
    with Daemon(first) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        assert (client.put(space, PAIRS[0], kept, durable=True).statuses == BlockStatus.FAILED).all()
        with RawClient(daemon.target) as raw, pytest.raises(grpc.RpcError, match="no nvme tier"):
            raw.call(raw.admin.Flush, apb.FlushRequest())
        assert off(got(client, space, PAIRS[0]), kept) == [0.0, 0.0]


def test_a_durable_put_goes_to_the_disk() -> None:
    """With a store in memory and a disk, the bytes of a durable put are on the disk when it returns."""
    with Daemon(config("", "")) as daemon, Client(daemon.target) as client:
        stored(client, client.open_namespace(SPEC), blocks(1, 2), PAIRS[0])
        host, memory, disk = used(daemon)
        assert disk >= 2 * SPEC.block_bytes and memory == 0 and host > 0


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_levels_survive_a_restart(ends: str) -> None:
    """After a stop or a kill the blocks of both levels are served, within the bounds that they had."""
    with Daemon(config("rot-8-8", "rot-4-4")) as daemon:
        with Client(daemon.target) as client:
            kept = fill(daemon, client, ANY)
            with RawClient(daemon.target) as raw:
                raw.call(raw.admin.Flush, apb.FlushRequest())
            evict(daemon)
        daemon.kill() if ends == "kill" else daemon.stop()
        daemon.start()
        with Client(daemon.target) as client:
            errors = errors_of(client, kept, ANY)
            assert all(error < 1.0 for pair in errors for error in pair)
            assert sum(map(len, errors)) > 20
            assert used(daemon)[1] > 0


def test_a_lookup_tells_the_pace_of_stores() -> None:
    """A lookup of far blocks has a pace for each store, and none for memory that clients map."""
    with Daemon(config("", "")) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        stored(client, space, blocks(1, 2), PAIRS[0])
        evict(daemon)
        host, *stores = client.lookup(space, PAIRS[0]).paces
        assert host is None and len(stores) == 2
        assert all(pace is not None and pace.bytes_per_s > 0 and pace.wait_s >= 0 for pace in stores)
