"""A small fake daemon for tests of the SDK: real sockets and mapped files, no tiers, faults on demand."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from tierd._proto import cache_pb2 as pb
from tierd._proto import cache_pb2_grpc
from tierd.checksum import slice_sums
from tierd.client import Client, NamespaceSpec
from tierd.core.formats.block import namespace_digest, slice_lengths
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import COMMIT_BLOCK, HANDLE, PUT_BLOCK, BlockStatus, SegmentAssignment
from tierd.errors import ERROR_KEY, GRPC_STATUS, RETRY_KEY, NotFound, TierdError
from tierd.server.session.identity import IdentityRules, identify
from tierd.server.session.session_socket import SessionSocket
from tierd.server.session.sessions import MappedFiles, SessionCalls, Sessions
from tierd.tiers.arena.catalogue import Catalogue, CatalogueHead

PAGES = 64
CLASS_BYTES = 8192
SPEC = NamespaceSpec(model="fake", tokens_per_block=16, block_bytes=CLASS_BYTES)
BEARER = "a-secret-of-some-length"
TOKENS = list(range(40))  # two full blocks and a short one


class Memory:
    """One segment of 64 pages, which outlives each FakeDaemon."""

    def __init__(self, root: Path) -> None:
        self.data = root / "1.data"
        self.data.write_bytes(bytes(PAGES * CLASS_BYTES))
        assignment = SegmentAssignment(0, 0, 1, 1, CLASS_BYTES, PAGES, 0, None, fresh=False)
        head = CatalogueHead(bytes(16), PAGES * CLASS_BYTES, assignment)
        self.catalogue = Catalogue.create(root / "1.cat", head=head)
        self.catalogue.allocate(root / "1.cat")
        self.catalogue_path = root / "1.cat"
        self.slots: dict[bytes, tuple[int, int, int, int]] = {}  # hash -> slot, length, tokens, generation
        self.used = 0

    def publish(self, name: bytes, slot: int, length: int, tokens: int, generation: int) -> None:
        """Publishes the block's entry, with the sums of its page's bytes."""
        self.slots[name] = (slot, length, tokens, generation)
        page = np.fromfile(self.data, np.uint8, count=length, offset=slot * CLASS_BYTES)
        meta = new_meta(1)
        meta["hash"], meta["namespace"], meta["tokens"] = np.frombuffer(name, np.uint8), 7, tokens
        meta["stored_length"], meta["generation"] = length, generation
        sums = slice_sums(page, slice_lengths(length, 0))
        self.catalogue.publish(np.array([slot], np.uint32), metas=meta, slices=[sums])


class FakeDaemon(cache_pb2_grpc.CacheServicer):
    """Sockets in `directory`, served by a separate thread. calls: number of calls of each method.

    faults: method -> error to raise; before: method -> function to run first.
    """

    def __init__(self, directory: Path, memory: Memory) -> None:
        self.directory, self.memory = directory, memory
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, TierdError] = {}
        self.before: dict[str, Callable[[], Any]] = {}
        self.leases: set[int] = set()
        self.reservations: dict[int, list[tuple[bytes, int, int, int, int]]] = {}
        self.epoch = 1
        self.port = 0
        self._number = 100
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(20)

    @property
    def target(self) -> str:
        return str(self.directory)

    def stop(self) -> None:
        """Ends it as a kill does: sockets closed, calls cut."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(20)

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a client's message makes the condition true."""
        with self._changed:
            assert self._changed.wait_for(condition, 5)

    def retract(self, slot: int) -> None:
        """Retracts a page."""
        self.memory.catalogue.retract(np.array([slot], dtype=np.uint32))

    # -- life

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._ending = asyncio.Event()
        calls = SessionCalls(
            lambda session: None,
            lambda i: self._note("stop"),
            lambda i: self._note("end"),
            self._map,
            self._released,
            self._aborted,
        )
        self.sessions = Sessions(calls, session_limit=8)
        listener = SessionSocket(
            self.directory / "session.sock",
            sessions=self.sessions,
            identify=lambda peer, c: identify(peer, credential=c, rules=IdentityRules(), domain_of=lambda _: 1),
            greeting={"daemon": "fake", "instance": "00", "tiers": [{"name": "host.0", "kind": 1}]},
        )
        listener.open()
        server = grpc.aio.server()
        cache_pb2_grpc.add_CacheServicer_to_server(self, server)
        server.add_insecure_port(f"unix:{self.directory}/tierd.sock")
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._started.set()
        await self._ending.wait()
        listener.close()
        self.sessions.close()
        await server.stop(0)
        (self.directory / "tierd.sock").unlink(missing_ok=True)

    def _note(self, name: str) -> None:
        with self._changed:
            self.calls[name] += 1
            self._changed.notify_all()

    def _map(self, session: Any, tier: int, segment: int) -> MappedFiles:
        if (tier, segment) != (0, 1):
            raise NotFound(f"segment {segment}")
        data = open(self.memory.data, "r+b")  # noqa: SIM115
        catalogue = open(self.memory.catalogue_path, "rb")  # noqa: SIM115
        self._note("map")
        size = self.memory.catalogue_path.stat().st_size
        return MappedFiles(_detached(data), PAGES * CLASS_BYTES, True, _detached(catalogue), size)

    def _released(self, session: int, leases: Any) -> None:
        self.leases -= set(leases)
        self._note("released")

    def _aborted(self, session: int, reservation: int) -> None:
        self.reservations.pop(reservation, None)
        self._note("aborted")

    async def _enter(self, method: str, context: Any) -> None:
        self._note(method)
        metadata = dict(context.invocation_metadata())
        if method in self.before:
            await asyncio.to_thread(self.before[method])
        try:
            if method in self.faults:
                raise self.faults[method]
            if metadata.get("authorization") != f"Bearer {BEARER}":
                self.sessions.authenticate(metadata.get("tierd-session", ""))
        except TierdError as error:
            status = getattr(grpc.StatusCode, GRPC_STATUS[type(error)])
            hint = getattr(error, "retry_after_s", 0.0)
            hints = ((RETRY_KEY, str(round(hint * 1000))),) if hint else ()
            await context.abort(status, str(error), trailing_metadata=((ERROR_KEY, type(error).__name__), *hints))

    # -- verbs

    async def OpenNamespace(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("OpenNamespace", context)
        digest = namespace_digest(SPEC, tenant="fake", epoch=self.epoch)
        return pb.OpenNamespaceReply(namespace=7, digest=digest, epoch=self.epoch)

    async def Lookup(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("Lookup", context)
        held = self._held(request.groups[0])
        blocks = len(request.groups[0].hashes) // 32
        tiers = bytes([0] * len(held) + [255] * (blocks - len(held)))
        return pb.LookupReply(tokens=sum(h["tokens"] for h in held), tier_of=[tiers], tier_tokens=[0])

    async def Acquire(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("Acquire", context)
        held = self._held(request.groups[0])
        if not len(held):
            return pb.AcquireReply(whole=True)
        self._number += 1
        self.leases.add(self._number)
        group = pb.GroupHandles(first=0, count=len(held), handles=held.tobytes())
        return pb.AcquireReply(
            lease=self._number,
            tokens=int(held["tokens"].sum()),
            groups=[group],
            tier_tokens=[int(held["tokens"].sum())],
            whole=True,
        )

    async def Reserve(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("Reserve", context)
        blocks = np.frombuffer(request.groups[0].blocks, dtype=PUT_BLOCK)
        handles = np.zeros(len(blocks), dtype=HANDLE)
        rows = []
        for i, block in enumerate(blocks):
            name = block["hash"].tobytes()
            if name in self.memory.slots:
                handles[i]["status"] = BlockStatus.EXISTS
                continue
            slot, self.memory.used = self.memory.used, self.memory.used + 1
            if slot >= PAGES:
                handles[i]["status"] = BlockStatus.NO_ROOM
                continue
            self._number += 1
            self.memory.catalogue.stamp(np.array([slot], dtype=np.uint32), np.array([self._number], dtype=np.uint64))
            handles[i] = (
                BlockStatus.RESERVED,
                0,
                1,
                slot,
                block["length"],
                slot * CLASS_BYTES,
                self._number,
                block["tokens"],
                1,
            )
            rows.append((name, slot, int(block["length"]), int(block["tokens"]), self._number))
        self._number += 1
        if rows:
            self.reservations[self._number] = rows
        return pb.ReserveReply(reservation=self._number if rows else 0, handles=[handles.tobytes()])

    async def Commit(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("Commit", context)
        rows = self.reservations[request.reservation]
        if not request.keep_open:
            del self.reservations[request.reservation]
        if request.HasField("blocks"):
            named = np.frombuffer(request.blocks.blocks, dtype=COMMIT_BLOCK)
            rows = [(b["hash"].tobytes(), *rows[b["index"]][1:]) for b in named]
        handles = np.zeros(len(rows), dtype=HANDLE)
        for i, (name, slot, length, tokens, generation) in enumerate(rows):
            self.memory.publish(name, slot, length, tokens, generation)
            handles[i] = (BlockStatus.READY, 0, 1, slot, length, slot * CLASS_BYTES, generation, tokens, 1)
        self._number += 1
        if request.lease:
            self.leases.add(self._number)
        return pb.CommitReply(handles=handles.tobytes(), lease=self._number if request.lease else 0)

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("Abort", context)
        self.reservations.pop(request.reservation, None)
        return pb.AbortReply()

    async def Put(self, chunks: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("Put", context)
        sizes: Counter[int] = Counter()
        async for chunk in chunks:
            assert xxhash.xxh3_64_intdigest(chunk.data) == chunk.checksum
            if chunk.HasField("group"):
                blocks = np.frombuffer(chunk.group.blocks, dtype=PUT_BLOCK)
            sizes[chunk.index] += len(chunk.data)
        whole = [BlockStatus.READY if sizes[i] == b["length"] else BlockStatus.FAILED for i, b in enumerate(blocks)]
        return pb.PutReply(statuses=np.array(whole, dtype="<u2").tobytes())

    async def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("Get", context)
        count = len(request.group.hashes) // 32
        try:
            yield pb.GetChunk(tokens=16 * count)
            for i in range(count):
                for offset in (0, CLASS_BYTES // 2):
                    data = bytes([(i + 1) % 256]) * (CLASS_BYTES // 2)
                    checksum = xxhash.xxh3_64_intdigest(data) ^ (i == 3)
                    yield pb.GetChunk(
                        index=i, offset=offset, data=data, length=CLASS_BYTES, checksum=checksum, status=1
                    )
            self._note("Get whole")
        finally:
            self._note("Get ended")

    async def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("Watch", context)
        event = pb.Event(sequence=request.after + 1, kind=0, tier=0, namespace=7, hashes=bytes(64), reason="")
        yield pb.Events(events=[event])
        await asyncio.Event().wait()

    def _held(self, group: Any) -> np.ndarray:
        names = [group.hashes[i : i + 32] for i in range(0, len(group.hashes), 32)]
        rows = []
        for name in names:
            if name not in self.memory.slots:
                break
            slot, length, tokens, generation = self.memory.slots[name]
            rows.append((BlockStatus.READY, 0, 1, slot, length, slot * CLASS_BYTES, generation, tokens, 1))
        return np.array(rows, dtype=HANDLE)


def _detached(file: Any) -> int:
    import os

    with file:
        return os.dup(file.fileno())


class Place:
    """A directory whose daemon a test stops and starts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory = Memory(root)
        self.daemon = FakeDaemon(root, self.memory)

    def restart(self) -> FakeDaemon:
        self.daemon.stop()
        self.daemon = FakeDaemon(self.root, self.memory)
        return self.daemon


@pytest.fixture
def place():
    root = Path(tempfile.mkdtemp(prefix="tierd-"))
    place = Place(root)
    yield place
    place.daemon.stop()
    shutil.rmtree(root)


@pytest.fixture
def daemon(place):
    return place.daemon


@pytest.fixture
def client(daemon):
    with Client(daemon.target, name="test", timeout_s=10) as client:
        yield client


@pytest.fixture
def silent_target():
    """A daemon that accepts connections and never answers."""
    root = Path(tempfile.mkdtemp(prefix="tierd-"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(root / "session.sock"))
        listener.listen(16)
        yield str(root)
    shutil.rmtree(root)


@pytest.fixture
def blocks():
    return [np.random.default_rng(i).integers(0, 256, CLASS_BYTES, dtype=np.uint8) for i in range(2)] + [
        b"tail" * (CLASS_BYTES // 8)
    ]


@pytest.fixture
def ns(client):
    return client.open_namespace(SPEC)


@pytest.fixture
def stored(client, ns, blocks):
    assert client.put(ns, TOKENS, blocks).stored == 3
    return ns
