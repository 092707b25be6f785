"""An epoch bump under load: leases stay right, and earlier blocks always miss, after a restart too."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest

from tests.system.blocks import await_true
from tests.system.raw import RawClient, put_blocks
from tests.system.sdk import SMALL, await_nothing_held, churn, held, put, right
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.client import Client, OpenedNamespace, PutGroup
from tierd.core.formats.model import HANDLE
from tierd.errors import StaleHandle, TierdError
from tierd.testing import chain

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
NOWHERE = {"lookup": 0, "acquire": 0, "prefetch": 0, "exists": 0, "chunks": 0, "listed": 0}


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
    """A namespace with some chains, on NVMe too if durable."""
    namespace = client.open_namespace(SMALL)
    for seed in range(CHAINS):
        assert put(client, namespace, seed, COUNT)
        if durable:
            blocks = [np.asarray(view) for view in client.get(namespace, chain(seed, COUNT)).views]
            assert client.put(namespace, chain(seed, COUNT), blocks, durable=True)
    return namespace


def found_anywhere(daemon: Daemon, namespace: OpenedNamespace) -> dict[str, int]:
    """Hits on a namespace's chains, by verb."""
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
                found["prefetch"] += raw.call(
                    raw.cache.Prefetch, pb.PrefetchRequest(groups=[part], tier=pb.TIER_KIND_HOST)
                ).started
            found["exists"] += _existing(raw, part)
            with contextlib.suppress(grpc.RpcError):
                call = raw.cache.Get(pb.GetRequest(group=part), metadata=raw.metadata, timeout=10)
                found["chunks"] += sum(bool(chunk.data) for chunk in call)
    return found


def _existing(raw: RawClient, group: pb.Group) -> int:
    """Blocks that a reserve, durable or not, reports as existing or failed."""
    blocks = put_blocks(np.frombuffer(group.hashes, np.uint8).reshape(-1, 32)).tobytes()
    wanted, found = pb.PutGroup(namespace=group.namespace, blocks=blocks), 0
    for durability in (pb.DURABILITY_MEMORY, pb.DURABILITY_DURABLE):
        request = pb.ReserveRequest(groups=[wanted], tier=pb.TIER_KIND_HOST, durability=durability)
        with contextlib.suppress(grpc.RpcError):
            reply = raw.call(raw.cache.Reserve, request)
            statuses = np.frombuffer(reply.handles[0], dtype=HANDLE)["status"]
            found += int(np.isin(statuses, (pb.BLOCK_STATUS_EXISTS, pb.BLOCK_STATUS_FAILED)).sum())
            raw.call(raw.cache.Abort, pb.AbortRequest(reservation=reply.reservation))
    return found


EVERYWHERE = {
    "lookup": 16 * CHAINS * COUNT,
    "acquire": 16 * CHAINS * COUNT,
    "prefetch": 0,  # all blocks are in memory
    "exists": 2 * CHAINS * COUNT,
    "chunks": CHAINS * COUNT,
    "listed": CHAINS * COUNT,
}


# -- under load


@dataclass
class Load:
    """One client in a thread: puts and gets in the current epoch, and counts late hits on the old one."""

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
        """Runs until it is told to end."""
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
    """Under load no call after the bump's reply hits the old epoch, and no byte is ever wrong."""
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
    """Waits until each load has made this many more turns."""
    wanted = [load.turns + more for load in loads]
    await_true(
        lambda: all(load.turns >= turns or load.errors for load, turns in zip(loads, wanted, strict=True)), "the load"
    )


# -- leases and reservations in flight


def test_leases_finish(daemon: Daemon) -> None:
    """The old epoch's leases and views stay right through the bump and churn; their release frees
    the pages."""
    with Client(daemon.target) as client:
        namespace = fill(client)
        lease = client.acquire(namespace, chain(0, COUNT))
        kept = client.get(namespace, chain(1, COUNT)).views
        assert bump(daemon).blocks == CHAINS * COUNT
        assert churn(client, seed=5) > 0
        assert (right(lease.views(), 0), lease.check(), right(kept, 1)) == (COUNT, COUNT, COUNT)
        out = np.zeros((COUNT, SMALL.block_bytes), dtype=np.uint8)
        assert (lease.copy_into(out), right(list(out), 0)) == (COUNT, COUNT)
        await_true(lambda: held(daemon)[2] == 2 * COUNT, "only leases hold pages, and nobody copies from one to NVMe")
        lease.release()
        del kept
        await_nothing_held(daemon, "leases of the old epoch")
        assert found_anywhere(daemon, namespace) == NOWHERE


@pytest.mark.parametrize("has_names", [True, False], ids=["named", "private"])
def test_reservation_across_the_bump(daemon: Daemon, *, has_names: bool) -> None:
    """Pages reserved before the bump and committed after it are never hits, whatever the commit replies."""
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
    """A finished bump holds after kill -9 and a stop, in memory and on NVMe; later blocks stay."""
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
    """Bumps with restarts between them count on, and no earlier epoch returns."""
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


# -- during transfers and deaths


@pytest.fixture
def armed() -> Iterator[Daemon]:
    """The same daemon with fault points."""
    with Daemon(CONFIG, faults=True) as running:
        yield running


@pytest.mark.parametrize("point", ["nvme.slots.before_read", "mover.load.before_verify"])
def test_bump_with_transfers_in_flight(armed: Daemon, point: str) -> None:
    """A promotion that its epoch's end overtakes commits no block, though a waiting get may have
    its bytes. Watchers see the removal and no arrival."""
    with Client(armed.target) as client, armed.faults() as faults, RawClient(armed.target) as raw:
        old = fill(client, durable=True)
        raw.call(raw.admin.Evict, apb.EvictRequest(tier="host.0"))
        watch, told = _watching(armed, raw)
        faults.arm(point, "delay:1")
        got: list[int] = []
        waiting = threading.Thread(target=_get_right, args=(client, old, got))
        waiting.start()
        assert faults.await_hits(point)
        assert bump(armed).namespaces == 1
        assert found_anywhere(armed, old) == NOWHERE
        faults.disarm()
        waiting.join(20)
        fresh = client.open_namespace(SMALL)
        assert put(client, fresh, 99, 1)
        await_true(lambda: fresh.id in {event.namespace for event in told}, "news of the new epoch")
        watch.cancel()
        assert got in ([0], [COUNT])
        mine = [event for event in told if event.namespace == old.id]
        ended = [event.reason for event in mine].index("epoch_bumped")
        assert {event.kind for event in mine[ended:]} == {pb.Event.KIND_ENDED, pb.Event.KIND_REMOVED}
        gc.collect()
        await_nothing_held(armed, "a get of the old epoch")
        assert found_anywhere(armed, old) == NOWHERE


def _get_right(client: Client, namespace: OpenedNamespace, got: list[int]) -> None:
    """Gets the first chain; appends its number of blocks, or -1 for a wrong one."""
    found = client.get(namespace, chain(0, COUNT))
    got.append(found.blocks if right(found.views, 0) == found.blocks else -1)


def _watching(daemon: Daemon, raw: RawClient) -> tuple[Any, list[pb.Event]]:
    """A stream of events from now on, and the list that collects them."""
    watch, told = raw.cache.Watch(pb.WatchRequest(), metadata=raw.metadata, timeout=60), []

    def listen() -> None:
        with contextlib.suppress(grpc.RpcError):
            for batch in watch:
                told.extend(batch.events)

    threading.Thread(target=listen, daemon=True).start()
    with Client(daemon.target) as client:
        namespace = client.open_namespace(replace(SMALL, model="bell"))
        seeds = iter(range(1000))
        await_true(lambda: bool(put(client, namespace, next(seeds), 1) and told), "the first event")
    return watch, told


@pytest.mark.parametrize(
    "point", ["operator.epoch.before_forgetting", "instance.namespaces.before_replace", "background.before_freeing"]
)
def test_gets_without_a_call_when_the_epoch_has_ended(armed: Daemon, point: str) -> None:
    """A get or a lookup that begins after the epoch's end misses, even before the bump's reply."""
    out = np.zeros((COUNT, SMALL.block_bytes), np.uint8)
    with Client(armed.target) as client, armed.faults() as faults:
        old = fill(client)
        verbs = (lambda: client.get(old, chain(0, COUNT), out=out), lambda: client.lookup(old, chain(0, COUNT)))
        assert [verb().tokens for verb in verbs] == [16 * COUNT] * 2
        faults.arm(point, "delay:0.3x1")
        bumping = threading.Thread(target=bump, args=(armed,))
        bumping.start()
        assert faults.await_hits(point)
        for verb in verbs:
            with pytest.raises(StaleHandle):
                verb()
        bumping.join(30)
        assert found_anywhere(armed, old) == NOWHERE


@pytest.mark.parametrize(
    "point", ["operator.epoch.before_bump", "operator.epoch.before_forgetting", "background.before_freeing"]
)
def test_bump_that_the_daemon_does_not_survive(armed: Daemon, point: str) -> None:
    """After a death during a bump all blocks or none are left, all right, and the next bump is complete."""
    with Client(armed.target) as client, armed.faults() as faults:
        old = fill(client, durable=True)
        faults.arm(point, "kill")
        with pytest.raises(grpc.RpcError):
            bump(armed)
    armed.await_end()
    armed.start()
    with Client(armed.target) as client:
        assert found_anywhere(armed, old) in (NOWHERE, EVERYWHERE)
        namespace = client.open_namespace(SMALL)
        for seed in range(CHAINS):
            got = client.get(namespace, chain(seed, COUNT))
            assert right(got.views, seed) == got.blocks
            del got
        assert bump(armed).namespaces == 1
        assert found_anywhere(armed, old) == found_anywhere(armed, namespace) == NOWHERE
    armed.restart()
    assert found_anywhere(armed, old) == found_anywhere(armed, namespace) == NOWHERE
