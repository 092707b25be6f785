"""Old handles, numbers, tokens, namespaces and segments presented again, after a restart too."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest

from tests.depth import count, report
from tests.system.blocks import BlockClient, Memory, await_true, check_bytes
from tests.system.raw import RawClient, ask
from tests.system.sdk import await_nothing_held, held
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.client import Client, NamespaceSpec
from tierd.core.formats.layout import CATALOGUE_HEADER, HEADER_BYTES
from tierd.core.formats.model import COMMIT_BLOCK, StructArray
from tierd.testing import chain

REUSES = count(test=4_000, nightly=100_000, weekly=1_000_000)
"""Reused pages with a daemon. tests/property/test_stale_handles.py tests far more with the core alone."""
CONFIG = """\
[server]
session_share = 1.0

[[host]]
capacity = "4 MiB"
segment = "512 KiB"
"""
STORE = '\n[[nvme]]\ncapacity = "16 MiB"\nsegment = "2 MiB"\n'
COUNT = 128
HOST = pb.TIER_KIND_HOST
SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096)


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A host tier of 1,024 small pages."""
    with Daemon(CONFIG + getattr(request, "param", "")) as running:
        yield running


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """One daemon for all tests that need no restart and no counts."""
    with Daemon(CONFIG) as running:
        yield running


class WordReader(BlockClient):
    """A raw session that also maps the generation words of each segment, as the SDK does."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.words: dict[tuple[int, int], np.ndarray] = {}
        self._requests = itertools.count()

    def are_good(self, handles: StructArray) -> np.ndarray:
        """For each handle: whether its generation word still matches, as a client checks after a copy."""
        out = np.zeros(len(handles), bool)
        for key in np.unique(handles[["tier", "segment"]]).tolist():
            rows = (handles["tier"] == key[0]) & (handles["segment"] == key[1])
            out[rows] = self.words[key][handles["slot"][rows]] == handles["generation"][rows]
        return out

    def named(self, method: Any, message: Any) -> tuple[Any, str]:
        """A call with a request id; the reply and the id."""
        request = f"{next(self._requests)}"
        return method(message, metadata=(*self.metadata, ("tierd-request", request)), timeout=15), request

    def _map(self, tier: int, segment: int, writable: bool) -> memoryview:
        reply, fds = ask(self.socket, {"op": "map", "tier": tier, "segment": segment})
        assert reply["ok"], reply
        table = mmap.mmap(fds[1], reply["catalogue_bytes"], prot=mmap.PROT_READ)
        pages = int(np.frombuffer(table, CATALOGUE_HEADER, count=1)["pages"][0])
        self.words[tier, segment] = np.frombuffer(table, "<u8", count=pages, offset=HEADER_BYTES)
        self._files[tier, segment] = os.fstat(fds[0]).st_ino
        memory = memoryview(mmap.mmap(fds[0], reply["bytes"], prot=mmap.PROT_READ | writable * mmap.PROT_WRITE))
        for fd in fds:
            os.close(fd)
        return memory


class Presented:
    """Old handles and numbers, and their fate when they are presented again."""

    def __init__(self, client: WordReader) -> None:
        self._client = client
        self.tried: Counter[str] = Counter()
        self.reuses = 0
        self._now: dict[Memory, int] = {}
        self._over: list[tuple[Memory, np.void]] = []
        self._reservations: list[int] = []
        self._leases: list[int] = []
        self._requests: list[str] = []

    def turn(self, namespace: int, seed: int) -> None:
        """Stores, leases and releases a chain, which evicts other blocks."""
        client, names = self._client, chain(seed, COUNT)
        reservation, handles = client.reserve(namespace, names)
        self._given(handles[handles["status"] == pb.BLOCK_STATUS_RESERVED])
        if reservation:
            reply, request = client.named(client.cache.Commit, pb.CommitRequest(reservation=reservation, lease=True))
            client.call(client.cache.Release, pb.ReleaseRequest(leases=[reply.lease]))
            self._reservations.append(reservation)
            self._leases.append(reply.lease)
            self._requests.append(request)

    def _given(self, handles: StructArray) -> None:
        for handle in handles:
            place = self._client.memory_of(handle, writable=True)
            self.reuses += place in self._now
            self._now[place] = int(handle["generation"])
            self._over.append((place, handle))

    def accepted(self) -> list[str]:
        """Each old thing that the daemon or a generation word accepted."""
        client, before = self._client, _counts(self._client)
        over = [handle for place, handle in self._over if self._now[place] != int(handle["generation"])]
        handles = np.array(over, self._over[0][1].dtype)
        self.tried["words"] += len(handles)
        wrong = [f"{int(client.are_good(handles).sum())} words"] if client.are_good(handles).any() else []
        for number in self._reservations[-8:]:
            self.tried["commit"] += 1
            if client.error_of(client.cache.Commit, pb.CommitRequest(reservation=number)) != "NotFound":
                wrong.append(f"commit of {number}")
            client.abort(number)
        client.call(client.cache.Release, pb.ReleaseRequest(leases=self._leases[-64:]))
        for request in self._requests[-8:]:
            client.socket.send(msgpack.packb({"op": "revoke", "request": request}))
        gone = {"op": "release", "leases": self._leases[-64:], "reservations": self._reservations[-64:], "reply": True}
        assert ask(client.socket, gone)[0]["ok"]
        self.tried.update(abort=8, release=len(self._leases[-64:]), revoke=len(self._requests[-8:]))
        self._over = [pair for pair in self._over if self._now[pair[0]] == int(pair[1]["generation"])]
        return wrong + ([f"{before} became {_counts(client)}"] if _counts(client) != before else [])


def _counts(client: RawClient) -> tuple[int, int]:
    status = client.call(client.admin.Status, apb.StatusRequest())
    return int(status.leases), int(status.reservations)


@pytest.mark.timeout(1200)
def test_nothing_old_is_accepted(shared_daemon: Daemon) -> None:
    """A daemon accepts no old handle, lease, reservation, commit or call, and live ones stay."""
    begun = time.monotonic()
    with WordReader(shared_daemon.target) as client, Client(shared_daemon.target) as sdk:
        namespace = client.open_namespace()
        old, kept = Presented(client), client.open_namespace(model="kept")
        client.put(kept, chain(-1, 8))
        live = client.acquire(kept, chain(-1, 8))
        opened = sdk.open_namespace(SPEC)
        for seed in itertools.count():
            old.turn(namespace, seed)
            if seed % 8 == 7:
                assert old.accepted() == []
                copies, misses = _copies_of_what_was_taken(sdk, opened, client, namespace, seed)
                old.tried["copies"] += copies
                old.tried["misses"] += misses
            if old.reuses >= REUSES:
                break
        check_bytes(live, chain(-1, 8))
        assert client.are_good(live.handles).all()
        assert all(old.tried.values()), old.tried
        report(
            "stale handles, daemon",
            reuses=old.reuses,
            accepted=0,
            **old.tried,
            seconds=round(time.monotonic() - begun, 1),
        )


def _copies_of_what_was_taken(
    sdk: Client, opened: object, client: WordReader, namespace: int, seed: int
) -> tuple[int, int]:
    """If the daemon ends a lease without the SDK, copies are right until pages are reused, then misses.

    Returns the numbers of blocks copied and of blocks missed.
    """
    hashes = chain(seed, COUNT)
    lease = sdk.acquire(opened, hashes)  # type: ignore[arg-type]
    assert len(lease) == COUNT, "what was stored last is there"
    assert lease.hold is not None and lease.hold.link.session is not None
    before, out = np.zeros((2, COUNT, 4096), np.uint8)
    assert lease.copy_into(before) == COUNT
    lease.hold.link.session.release([lease.id], timeout_s=10)
    for other in range(12):
        client.put(namespace, chain(10_000_000 + seed * 100 + other, COUNT))
    good = lease.copy_into(out)
    assert np.array_equal(out[:good], before[:good])
    assert lease.check() <= good
    lease.detach()
    return COUNT, COUNT - good


# -- another life


def _errors_of_old_numbers(client: RawClient, *, lease: int, reservation: int) -> list[str]:
    """A session's errors for another session's numbers."""
    block = np.zeros(1, COMMIT_BLOCK)
    block["hash"], block["tokens"], block["length"] = chain(5, 1), 16, 4096
    attention = pb.ReportAttentionRequest(lease=lease, mass=np.ones(1, "<f4").tobytes())
    return [
        client.error_of(client.cache.Commit, pb.CommitRequest(reservation=reservation)),
        client.error_of(
            client.cache.Commit,
            pb.CommitRequest(reservation=reservation, blocks=pb.CommitGroup(blocks=block.tobytes())),
        ),
        client.error_of(client.cache.ReportAttention, attention),
        client.error_of(client.cache.Release, pb.ReleaseRequest(leases=[lease])),
        client.error_of(client.cache.Abort, pb.AbortRequest(reservation=reservation)),
    ]


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_numbers_of_another_life_after_a_restart(daemon: Daemon, way: str) -> None:
    """After a restart old tokens and numbers do nothing, and old processes keep their pages."""
    with BlockClient(daemon.target) as old, BlockClient(daemon.target) as writer:
        namespace = writer.open_namespace()
        assert writer.put(namespace, chain(1, 8)) == 8
        leased = old.acquire(namespace, chain(1, 8))
        reservation, handles = old.reserve(namespace, chain(2, 4))
        old.write(handles, chain(2, 4))
        getattr(daemon, way)()
        daemon.start()
        assert _errors_of_old_numbers(old, lease=leased.lease, reservation=reservation) == ["SessionLost"] * 5
        with BlockClient(daemon.target) as fresh:
            found = _errors_of_old_numbers(fresh, lease=leased.lease, reservation=reservation)
            assert found == ["NotFound", "NotFound", "NotFound", "", ""]
            for seed in range(20):
                fresh.put(fresh.open_namespace(), chain(100 + seed, COUNT))
            check_bytes(leased, chain(1, 8))
            await_true(lambda: held(daemon)[2:] == (12, 0), "no transfer under way, and what its process holds")
            for session in (old.hello["session"], writer.hello["session"]):
                ask(fresh.socket, {"op": "forget", "session": session})
            assert not ask(fresh.socket, {"op": "forget", "session": old.hello["session"]})[0]["ok"]
        await_nothing_held(daemon, "its process let go")


def test_watch_goes_on_in_another_life(daemon: Daemon) -> None:
    """A watcher that resumes with a former life's number first gets KIND_LOST."""
    with BlockClient(daemon.target) as client:
        watch = client.cache.Watch(pb.WatchRequest(after=1), metadata=client.metadata, timeout=30)
        assert client.put(client.open_namespace(), chain(1, 2)) == 2
        last = next(watch).events[-1].sequence
        watch.cancel()
    daemon.restart()
    for after in (last, 1, (1 << 64) - 1):
        with BlockClient(daemon.target) as client:
            watch = client.cache.Watch(pb.WatchRequest(after=after), metadata=client.metadata, timeout=30)
            assert client.put(client.open_namespace(), chain(after % 1000, 2)) == 2
            assert next(watch).events[0].kind == pb.Event.KIND_LOST
            watch.cancel()


# -- namespaces


def _verbs(client: BlockClient, namespace: int) -> dict[str, str]:
    """Every verb that takes a namespace id, and its error."""
    hashes, cache = chain(1, 4), client.cache
    group = pb.Group(namespace=namespace, hashes=hashes.tobytes())
    put = np.zeros(4, np.dtype([("hash", "u1", (32,)), ("tokens", "<u4"), ("length", "<u4")]))
    put["hash"], put["tokens"], put["length"] = hashes, 16, 4096
    blocks = pb.PutGroup(namespace=namespace, blocks=put.tobytes())
    durable = pb.DURABILITY_DURABLE
    return {
        "lookup": client.error_of(cache.Lookup, pb.LookupRequest(groups=[group])),
        "acquire": client.error_of(cache.Acquire, pb.AcquireRequest(groups=[group], tier=HOST)),
        "prefetch": client.error_of(cache.Prefetch, pb.PrefetchRequest(groups=[group], tier=HOST)),
        "reserve": client.error_of(cache.Reserve, pb.ReserveRequest(groups=[blocks], tier=HOST)),
        "durable": client.error_of(cache.Reserve, pb.ReserveRequest(groups=[blocks], tier=HOST, durability=durable)),
        "put": client.error_of(cache.Put, iter([pb.PutChunk(group=blocks)])),
        "get": _get_error(client, group),
    }


def _get_error(client: RawClient, group: pb.Group) -> str:
    try:
        list(client.cache.Get(pb.GetRequest(group=group), metadata=client.metadata, timeout=15))
    except grpc.RpcError as error:
        return dict(error.trailing_metadata() or ()).get("tierd-error", "")
    return ""


@pytest.mark.parametrize("daemon", [STORE], indirect=True, ids=["store"])
def test_old_namespace_ids(daemon: Daemon) -> None:
    """Every verb refuses an ended or unknown namespace id, before and after a restart."""
    with BlockClient(daemon.target) as client:
        namespace = client.open_namespace()
        assert client.put(namespace, chain(1, 4), durable=True) == 4
        reservation, _ = client.reserve(namespace, chain(2, 2))
        client.call(client.admin.BumpEpoch, apb.BumpEpochRequest(namespace=namespace))
        assert set(_verbs(client, namespace).values()) == {"StaleHandle"}
        reply = client.call(client.cache.Commit, pb.CommitRequest(reservation=reservation))
        assert reply.handles[:2] == b"\x07\x00", "FAILED"
        fresh = client.open_namespace()
        assert (fresh != namespace, client.lookup(fresh, chain(1, 4))) == (True, 0)
    for way in ("kill", "stop"):
        getattr(daemon, way)()
        daemon.start()
        with BlockClient(daemon.target) as client:
            assert set(_verbs(client, namespace).values()) == {"StaleHandle"}
            assert set(_verbs(client, 60_000).values()) == {"NotFound"}
            listed = apb.BlocksRequest(namespace=namespace, has_namespace=True)
            assert client.call(client.admin.Blocks, listed).total == 0
            assert client.open_namespace() == fresh


# -- segments


def test_old_segments(shared_daemon: Daemon) -> None:
    """An ended segment is never mapped again, and its generation words match no handle."""
    with WordReader(shared_daemon.target) as client:
        namespace = client.open_namespace(block_bytes=1 << 16)
        reservation, handles = client.reserve(namespace, chain(1, 4))
        for handle in handles:
            client.page(handle, writable=True)
        client.abort(reservation)
        client.reserve(namespace, chain(2, 16), length=1 << 16)
        assert not client.are_good(handles).any()
        for segment in {int(handles["segment"][0]), 0, -1, 1 << 32, (1 << 63) - 1}:
            reply, fds = ask(client.socket, {"op": "map", "tier": 0, "segment": segment})
            assert (reply["ok"], reply["error"], fds) == (False, "NotFound", [])
        for tier in (-1, 1, 1 << 40):
            assert ask(client.socket, {"op": "map", "tier": tier, "segment": 1})[0]["error"] == "NotFound"


def test_a_segment_has_one_writer() -> None:
    """Only the session that reserved in a segment gets a descriptor that can be mapped writable."""
    with Daemon() as daemon, BlockClient(daemon.target) as writer, BlockClient(daemon.target) as reader:
        namespace = writer.open_namespace()
        _, handles = writer.reserve(namespace, chain(332, 2))
        place = {"op": "map", "tier": int(handles["tier"][0]), "segment": int(handles["segment"][0])}
        for client, is_writer in ((writer, True), (reader, False)):
            reply, fds = ask(client.socket, place)
            assert reply["writable"] == is_writer
            for fd, is_writable in zip(fds, (is_writer, False), strict=True):
                if not is_writable:
                    with pytest.raises(PermissionError):
                        mmap.mmap(fd, 4096, prot=mmap.PROT_WRITE)
                os.close(fd)


def test_sessions_know_their_own_numbers_only(daemon: Daemon) -> None:
    """A session can neither use nor end another session's lease or reservation by its number."""
    with BlockClient(daemon.target) as one, BlockClient(daemon.target) as other:
        namespace = one.open_namespace()
        assert one.put(namespace, chain(1, 2)) == 2
        lease, (reservation, _) = one.acquire(namespace, chain(1, 2)).lease, one.reserve(namespace, chain(2, 2))
        found = _errors_of_old_numbers(other, lease=lease, reservation=reservation)
        assert found == ["NotFound", "NotFound", "NotFound", "", ""]
        gone = {"op": "release", "leases": [lease], "reservations": [reservation], "reply": True}
        assert ask(other.socket, gone)[0]["ok"]
        assert held(daemon) == (1, 1, 2, 2)
        assert _errors_of_old_numbers(one, lease=lease, reservation=reservation)[-2:] == ["", ""]
        await_true(lambda: held(daemon) == (0, 0, 0, 0), "its own session ends them")
