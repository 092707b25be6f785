"""An epoch bump under load: what is leased stays right, and what was stored before is never found again, after a restart neither."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest

from tests.system.blocks import await_true
from tests.system.raw import RawClient
from tests.system.sdk import SMALL, await_nothing_held, churn, held, put, right
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.client import Client, OpenedNamespace, PutGroup
from tierd.errors import StaleHandle, TierdError
from tierd.testing import Daemon, chain

CONFIG = """\
[[host]]
capacity = "32 MiB"
segment = "4 MiB"

[[nvme]]
capacity = "64 MiB"
segment = "4 MiB"
"""
COUNT = 8
CHAINS = 6
NOWHERE = {"lookup": 0, "acquire": 0, "chunks": 0, "listed": 0}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Host memory above a store."""
    with Daemon(CONFIG) as running:
        yield running


def bump(daemon: Daemon, model: str = SMALL.model) -> apb.BumpEpochReply:
    """Begins a new epoch."""
    with RawClient(daemon.target) as raw:
        return raw.call(raw.admin.BumpEpoch, apb.BumpEpochRequest(model=model))


def fill(client: Client, *, durable: bool = False) -> OpenedNamespace:
    """A namespace with some chains in it, on NVMe too where durable."""
    namespace = client.open_namespace(SMALL)
    for seed in range(CHAINS):
        assert put(client, namespace, seed, COUNT)
        if durable:
            blocks = [np.asarray(view) for view in client.get(namespace, chain(seed, COUNT)).views]
            assert client.put(namespace, chain(seed, COUNT), blocks, durable=True)
    return namespace


def found_anywhere(daemon: Daemon, namespace: OpenedNamespace) -> dict[str, int]:
    """Blocks of a namespace's chains that any way of asking still finds, by the way."""
    found = dict(NOWHERE)
    group = [pb.Group(namespace=namespace.id, hashes=chain(seed, COUNT).tobytes()) for seed in range(CHAINS)]
    with RawClient(daemon.target) as raw:
        listed = apb.BlocksRequest(namespace=namespace.id, has_namespace=True)
        found["listed"] = raw.call(raw.admin.Blocks, listed).total
        for part in group:
            with contextlib.suppress(grpc.RpcError):
                found["lookup"] += raw.call(raw.cache.Lookup, pb.LookupRequest(groups=[part])).tokens
            with contextlib.suppress(grpc.RpcError):
                reply = raw.call(raw.cache.Acquire, pb.AcquireRequest(groups=[part], tier=pb.TIER_KIND_HOST))
                found["acquire"] += reply.tokens
            with contextlib.suppress(grpc.RpcError):
                call = raw.cache.Get(pb.GetRequest(group=part), metadata=raw.metadata, timeout=10)
                found["chunks"] += sum(bool(chunk.data) for chunk in call)
    return found


EVERYWHERE = {
    "lookup": 16 * CHAINS * COUNT,
    "acquire": 16 * CHAINS * COUNT,
    "chunks": CHAINS * COUNT,
    "listed": CHAINS * COUNT,
}


# -- under load


@dataclass
class Load:
    """One client in a thread: puts and gets in whichever epoch is current, and what it saw of an old one after the bump's reply."""

    daemon: Daemon
    number: int
    is_bumped: threading.Event
    ending: threading.Event
    turns: int = 0
    late_hits: int = 0
    wrong: int = 0
    epochs: set[int] = field(default_factory=set)
    errors: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        """Until it is told to end."""
        try:
            with Client(self.daemon.target) as client:
                namespace = client.open_namespace(SMALL)
                while not self.ending.is_set():
                    namespace = self._turn(client, namespace)
                    self.turns += 1
        except BaseException as error:
            self.errors.append(error)

    def _turn(self, client: Client, namespace: OpenedNamespace) -> OpenedNamespace:
        seed, was_bumped = self.turns % CHAINS, self.is_bumped.is_set()
        try:
            if self.number % 2:
                put(client, namespace, seed, COUNT)
            got = client.get(namespace, chain(seed, COUNT))
        except StaleHandle:
            return client.open_namespace(SMALL)
        self.epochs.add(namespace.epoch)
        self.wrong += got.blocks - right(got.views, seed)
        self.late_hits += was_bumped and namespace.epoch == 1 and got.blocks > 0
        return namespace


def test_bump_under_load(daemon: Daemon) -> None:
    """While four clients put and get, no call that begins after the bump's reply serves the old epoch, and no byte is ever wrong."""
    is_bumped, ending = threading.Event(), threading.Event()
    with Client(daemon.target) as client:
        old = fill(client)
        loads = [Load(daemon, number, is_bumped, ending) for number in range(4)]
        threads = [threading.Thread(target=load.run) for load in loads]
        for thread in threads:
            thread.start()
        _await_turns(loads, 20)
        assert bump(daemon).namespaces == 1
        is_bumped.set()
        assert found_anywhere(daemon, old) == NOWHERE
        _await_turns(loads, 20)
        ending.set()
        for thread in threads:
            thread.join(30)
    assert [(load.errors, load.late_hits, load.wrong, load.epochs) for load in loads] == [([], 0, 0, {1, 2})] * 4
    print(f"{sum(load.turns for load in loads)} turns around the bump")
    await_nothing_held(daemon, "the load")


def _await_turns(loads: list[Load], more: int) -> None:
    """Until each has made so many more turns."""
    wanted = [load.turns + more for load in loads]
    await_true(
        lambda: all(load.turns >= turns or load.errors for load, turns in zip(loads, wanted, strict=True)), "the load"
    )


# -- what is in flight


def test_leases_finish(daemon: Daemon) -> None:
    """Leases and views of the old epoch stay right through the bump and ten times the host tier going through it, then their pages are free."""
    with Client(daemon.target) as client:
        namespace = fill(client)
        lease = client.acquire(namespace, chain(0, COUNT))
        kept = client.get(namespace, chain(1, COUNT)).views
        assert bump(daemon).blocks == CHAINS * COUNT
        assert churn(client, seed=5) > 0
        assert (right(lease.views(), 0), lease.check(), right(kept, 1)) == (COUNT, COUNT, COUNT)
        out = np.zeros((COUNT, SMALL.block_bytes), dtype=np.uint8)
        assert (lease.copy_into(out), right(list(out), 0)) == (COUNT, COUNT)
        assert held(daemon)[2] == 2 * COUNT
        lease.release()
        del kept
        await_nothing_held(daemon, "leases of the old epoch")
        assert found_anywhere(daemon, namespace) == NOWHERE


@pytest.mark.parametrize("has_names", [True, False], ids=["named", "private"])
def test_reservation_across_the_bump(daemon: Daemon, *, has_names: bool) -> None:
    """Pages that were reserved before the bump and committed after it are found by nobody, whatever the commit said."""
    with Client(daemon.target) as client:
        namespace = client.open_namespace(SMALL)
        wanted = PutGroup(namespace, chain(0, 2)) if has_names else PutGroup.private(namespace, 2)
        with client.reserve(wanted) as pages:
            for page in pages.buffers():
                page[:] = 1
            bump(daemon)
            with contextlib.suppress(TierdError):
                pages.commit(None if has_names else namespace.naming(chain(0, 2), index=[0, 1]), durable=True)
        assert found_anywhere(daemon, namespace) == NOWHERE
        fresh = client.open_namespace(SMALL)
        assert (fresh.epoch, client.lookup(fresh, chain(0, 2)).tokens) == (2, 0)
        del page
        gc.collect()
        await_nothing_held(daemon, "a reservation of the old epoch")
        daemon.restart()
        assert found_anywhere(daemon, namespace) == found_anywhere(daemon, fresh) == NOWHERE


# -- after a restart


@pytest.mark.parametrize("way", ["kill", "stop"])
@pytest.mark.parametrize("durable", [False, True], ids=["memory", "durable"])
def test_bump_survives_a_restart(daemon: Daemon, way: str, *, durable: bool) -> None:
    """A bump that has returned holds after kill -9 and after a stop, for blocks in memory and on NVMe, and what came after it is there."""
    with Client(daemon.target) as client:
        old = fill(client, durable=durable)
        assert found_anywhere(daemon, old) == EVERYWHERE
        bump(daemon)
        fresh = client.open_namespace(SMALL)
        assert put(client, fresh, 0, COUNT)
        getattr(daemon, way)()
        daemon.start()
        assert found_anywhere(daemon, old) == NOWHERE
        with pytest.raises(StaleHandle):
            client.get(old, chain(1, COUNT))
        assert client.open_namespace(SMALL).epoch == 2
        assert right(client.get(fresh, chain(0, COUNT)).views, 0) == COUNT
        assert client.get(fresh, chain(1, COUNT)).tokens == 0


def test_two_epochs_and_back(daemon: Daemon) -> None:
    """Bump after bump with a restart between them counts on, and no earlier epoch comes back."""
    seen = []
    with Client(daemon.target) as client:
        for turn in range(3):
            namespace = fill(client)
            seen.append(namespace)
            assert bump(daemon).blocks == CHAINS * COUNT
            if turn != 1:
                daemon.restart()
        assert [namespace.epoch for namespace in seen] == [1, 2, 3]
        assert len({namespace.digest for namespace in seen}) == 3
        assert all(found_anywhere(daemon, namespace) == NOWHERE for namespace in seen)
