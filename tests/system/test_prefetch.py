"""Prefetches of clients over a daemon's socket: intent, time to live, and cancelling."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.system.blocks import BlockClient, await_true
from tests.system.test_encoded_stores import evict
from tests.system.warm import Daemon
from tierd._proto import cache_pb2 as pb
from tierd.advisor.pace import Pace
from tierd.cache.prefetches import TTL_S
from tierd.cli.hits import prefetched_of
from tierd.client import BlockStatus, Client, Found, Group, NamespaceSpec, OpenedNamespace, Target
from tierd.client.advice import Blocks
from tierd.client.match import Match
from tierd.client.transport import requests
from tierd.core.formats.model import TTL_LIMIT_S
from tierd.errors import InvalidArgument
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.store import EngineStore
from tierd.server.grpc import messages
from tierd.testing import chain

BLOCK_BYTES = 64 << 10
CONFIG = """\
[[host]]
capacity = "16 MiB"
segment = "4 MiB"

[[nvme]]
capacity = "16 MiB"
segment = "4 MiB"
admission = "all"

[mover]
batch_blocks = 1
transfer_limit = 1
"""
SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=BLOCK_BYTES)
NAMES = chain(1, 8)
READ = "mover.load.before_verify"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon whose store alone has the blocks; it reads them one after another."""
    with Daemon(CONFIG, faults=True) as daemon:
        with Client(daemon.target) as client:
            blocks = [np.full(BLOCK_BYTES, number, np.uint8) for number in range(len(NAMES))]
            statuses = client.put(client.open_namespace(SPEC), NAMES, blocks, durable=True).statuses
            assert (statuses == BlockStatus.READY).all()
        evict(daemon)
        yield daemon


def prefetched(daemon: Daemon) -> dict[str, int]:
    """Blocks by what became of them."""
    with BlockClient(daemon.target) as raw:
        found = prefetched_of(raw.status().counters)
    return {outcome: count // BLOCK_BYTES for outcome, count in found.items() if count}


def near(client: Client, space: OpenedNamespace) -> int:
    """Blocks in host memory."""
    return int((client.lookup(space, NAMES, intent="none").tier_of[0] == 0).sum())


@pytest.mark.parametrize("begin", ["lookup", "prefetch"])
def test_a_client_cancels_what_it_began(daemon: Daemon, begin: str) -> None:
    """Blocks that have not begun to load stay on NVMe; a later get is served whole."""
    with Client(daemon.target) as client, daemon.faults() as faults:
        space = client.open_namespace(SPEC)
        faults.arm(READ, "delay:0.5x1")
        if begin == "lookup":
            handle = client.lookup(space, NAMES, intent="load").prefetch
        else:
            handle = client.prefetch(space, NAMES, tier=Target(ttl_s=30.0))
        assert handle.numbers
        assert faults.await_hits(READ)
        client.cancel(handle)
        client.cancel(handle)  # again: nothing happens
        left = client.get(space, NAMES)
        assert left.tokens == 16 * len(NAMES)
        assert all((view == number).all() for number, view in enumerate(left.views))
    assert prefetched(daemon)["dropped"] > 0


def test_a_time_to_live_ends_a_prefetch(daemon: Daemon) -> None:
    """Blocks that no get uses in time count as wasted; a get that comes later does not change that."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        assert client.prefetch(space, NAMES[:3], tier=Target(ttl_s=0.001)) == 3
        await_true(lambda: near(client, space) == 3, "the blocks to come near")
        client.get(space, NAMES[:3])
        assert prefetched(daemon) == {"wasted": 3}


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), TTL_LIMIT_S + 1.0])
def test_a_time_to_live_out_of_bounds_is_refused(ttl_s: float) -> None:
    """The SDK accepts a time to live above 0 and up to a day."""
    with pytest.raises(InvalidArgument, match="ttl_s"):
        requests.target(Target(ttl_s=ttl_s))
    assert requests.target(Target(ttl_s=TTL_LIMIT_S))["ttl_ms"] == 1000 * TTL_LIMIT_S


def test_the_daemon_checks_a_time_to_live() -> None:
    """The daemon refuses more than a day; a message without a time gets the usual one."""
    day_ms = 1000 * TTL_LIMIT_S
    with pytest.raises(InvalidArgument, match="ttl_ms"):
        messages.order(pb.PrefetchRequest(ttl_ms=day_ms + 1))
    times = [messages.order(pb.PrefetchRequest(ttl_ms=ms)).ttl_s for ms in (0, 250, day_ms)]
    assert times == [TTL_S, 0.25, TTL_LIMIT_S]


def test_a_lookup_tells_what_it_is_for(daemon: Daemon) -> None:
    """One that will load nothing begins no prefetch; one that will load brings the blocks, once used."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        assert client.lookup(space, NAMES, intent="none").prefetch.numbers == ()
        assert near(client, space) == 0
        assert client.lookup(space, NAMES, intent="load").prefetch.numbers
        await_true(lambda: near(client, space) == len(NAMES), "the blocks to come near")
        client.get(space, NAMES)
        await_true(lambda: prefetched(daemon) == {"used": len(NAMES)}, "the use to be counted")
        with pytest.raises(InvalidArgument, match="intent"):
            client.lookup(space, NAMES, intent="perhaps")


def test_a_handle_of_a_former_daemon_cancels_nothing(daemon: Daemon) -> None:
    """Numbers of prefetches are not used again after a restart, so an old handle hits no new one."""
    with Client(daemon.target) as client:
        old = client.prefetch(client.open_namespace(SPEC), NAMES)
    daemon.restart()
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        new = client.prefetch(space, NAMES)
        assert not set(old.numbers) & set(new.numbers)


def test_an_engine_that_computes_faster_reads_nothing_ahead(daemon: Daemon) -> None:
    """Once the advisor says that computing is faster than the store, lookups begin no prefetch."""
    with EngineStore(Options(target=daemon.target), EngineFacts("test", "1", "store")) as store:
        groups = [Group(store.open(SPEC), NAMES)]
        assert store.lookup(groups).prefetch.numbers, "nothing is known yet"
        store.client.cancel(store.lookup(groups).prefetch)
        evict(daemon)
        tokens, pace = 16 * len(NAMES), Pace(1e3, 1.0, 0.0)
        for step in range(20):
            store.advice.computed([(0, 100 + step)], 1e-6 * (100 + step))
        slow = Found(tokens, (np.ones((1, len(NAMES)), np.int8),), (0, tokens), (None, pace))
        claimed = store.advice.claim(Match(tokens, 0, tokens + 1), slow, Blocks(16, BLOCK_BYTES / 16))
        assert claimed.tokens == 0 and store.advice.is_doubtful
        found = store.lookup(groups)
        assert found.tokens == tokens and found.prefetch.numbers == ()
