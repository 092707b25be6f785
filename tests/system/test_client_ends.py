"""The daemon frees a client's holds as soon as its process ends, and never before."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.system.blocks import BlockClient, Memory, await_true, connected
from tests.system.puppet import Puppet
from tests.system.raw import RawClient, ask
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.testing import chain

SMALL = """\
[[host]]
capacity = "2 MiB"
segment = "256 KiB"

[[nvme]]
capacity = "64 MiB"
segment = "4 MiB"
"""
TIER_BLOCKS = 512
"""Number of 4 KiB blocks in the host tier."""
SEEDS = itertools.count(1000)
HELD = 40
"""Blocks that the client under test leases, and as many that it reserves."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with a small host tier."""
    with Daemon(SMALL) as running:
        yield running


def _holding(daemon: Daemon) -> tuple[Puppet, set[Memory]]:
    """A client with leases and reservations, and the memory of their pages."""
    puppet = Puppet(daemon.target)
    assert puppet.put(1, HELD) == HELD
    pages = puppet.lease(1, HELD) + puppet.reserve(2, HELD)
    assert len(pages) == 2 * HELD
    return puppet, set(pages)


def _pages_given(client: BlockClient, *, rounds: int) -> set[Memory]:
    """Commits unwritten blocks until they have filled the host tier `rounds` times; their pages."""
    namespace, given = client.open_namespace(model="pressure"), set[Memory]()
    for _ in range(rounds * TIER_BLOCKS // 128):
        reservation, handles = client.reserve(namespace, chain(next(SEEDS), 128))
        mine = handles[handles["status"] == pb.BLOCK_STATUS_RESERVED]
        given |= {client.memory_of(handle, writable=True) for handle in mine}
        if reservation:
            client.call(client.cache.Commit, pb.CommitRequest(reservation=reservation))
    return given


def _quiet(client: BlockClient) -> bool:
    found = client.status()
    return (found.leases, found.reservations) == (0, 0)


def test_killed_client(daemon: Daemon) -> None:
    """The daemon frees a killed client's leases and reservations by itself and reuses their pages."""
    puppet, held = _holding(daemon)
    with puppet, connected(daemon) as client:
        assert (client.status().leases, client.status().reservations) == (1, 1)
        puppet.kill()
        took = await_true(lambda: _quiet(client), "holds of a killed client")
        print(f"everything came back {took * 1000:.1f} ms after SIGKILL")
        assert held & _pages_given(client, rounds=3)


@pytest.mark.parametrize("way", ["hang_up", "stop"])
def test_living_client(daemon: Daemon, way: str) -> None:
    """While its process lives, disconnected or stopped, no page of a client goes to another one."""
    puppet, held = _holding(daemon)
    with puppet, connected(daemon) as client:
        getattr(puppet, way)()
        assert not held & _pages_given(client, rounds=4)
        if way == "stop":
            puppet.go_on()
        assert puppet.wrong() == 0
        puppet.kill()
        await_true(lambda: _quiet(client), "holds of a killed client")


def test_child_with_the_socket(daemon: Daemon) -> None:
    """A child with a copy of the session's socket keeps no hold alive after its parent's death."""
    puppet, _ = _holding(daemon)
    with puppet, connected(daemon) as client:
        child = puppet.fork()
        try:
            puppet.kill()
            await_true(lambda: _quiet(client), "holds of a client whose child lives")
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("way", ["hang_up", "stop", None])
def test_client_across_a_crash(daemon: Daemon, way: str | None) -> None:
    """A client that survives a kill -9 of the daemon keeps its pages and bytes until its process ends."""
    puppet, held = _holding(daemon)
    with puppet:
        if way:
            getattr(puppet, way)()
        daemon.restart()
        with connected(daemon) as client:
            restored: Callable[[], bool] = lambda: _quiet(client)  # noqa: E731
            assert not restored(), "the new daemon does not know what the client holds"
            assert not held & _pages_given(client, rounds=4)
            if way == "stop":
                puppet.go_on()
            assert puppet.wrong() == 0
            puppet.kill()
            took = await_true(restored, "holds of a former daemon's client")
            print(f"everything came back {took * 1000:.1f} ms after SIGKILL")
            assert client.tiers()["host.0"].pages_reserved == 0
            await_true(lambda: client.tiers()["host.0"].pages_pinned == 0, "pins, once what was held is on NVMe too")


def test_client_across_many_crashes(daemon: Daemon) -> None:
    """One client's pages stay its own through many daemons."""
    puppet, held = _holding(daemon)
    with puppet:
        for _ in range(4):
            daemon.restart()
            with connected(daemon) as client:
                assert not held & _pages_given(client, rounds=1)
            assert puppet.wrong() == 0


@pytest.mark.parametrize("way", ["promoted", "forgotten", "smaller share"])
def test_reader_across_a_crash(daemon: Daemon, way: str) -> None:
    """A reader's leased pages survive a kill -9: promoted pages, a bumped epoch's, or beyond a
    smaller share."""
    with Puppet(daemon.target) as reader:
        with connected(daemon) as client:
            namespace = client.open_namespace()
            assert client.put(namespace, chain(1, HELD), durable=True) == HELD
            client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
            held = set(reader.lease(1, HELD))
            assert len(held) == HELD
            if way == "forgotten":
                client.call(client.admin.BumpEpoch, apb.BumpEpochRequest(namespace=namespace))
            others = client.open_namespace(model="others")
            seeds = [next(SEEDS) for _ in range(2 * TIER_BLOCKS // 64)]
            assert [client.put(others, chain(seed, 64), durable=True) for seed in seeds] == [64] * len(seeds)
        if way == "smaller share":
            daemon.configure(SMALL + "[server]\nsession_share = 0.02\n")
        daemon.restart()
        with connected(daemon) as client:
            others = client.open_namespace(model="others")
            for seed in seeds:
                client.read(others, chain(seed, 64))
            assert reader.wrong() == 0
            assert not held & _pages_given(client, rounds=2)
        assert reader.wrong() == 0


def _descriptors(daemon: Daemon) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd")}


@contextlib.contextmanager
def _one_descriptor_left(daemon: Daemon) -> Iterator[None]:
    taken, limits = _descriptors(daemon), resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    free = next(number for number in itertools.count() if number not in taken)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)


def test_a_segment_that_cannot_be_given_costs_no_descriptor(daemon: Daemon) -> None:
    """A map request with one free descriptor, for two files, is refused and leaks no descriptor."""
    with RawClient(daemon.target) as client:
        handle = client.reserve(client.open_namespace(), chain(1, 1))[1][0]
        request = {"op": "map", "tier": int(handle["tier"]), "segment": int(handle["segment"])}
        before = len(_descriptors(daemon))
        for _ in range(5):
            with _one_descriptor_left(daemon):
                assert ask(client.socket, request)[0]["error"] == "TierFailed"
        await_true(lambda: len(_descriptors(daemon)) == before, "the descriptors come back")
        answer, given = ask(client.socket, request)
        assert answer["ok"] and len(given) == 2
        for fd in given:
            os.close(fd)
