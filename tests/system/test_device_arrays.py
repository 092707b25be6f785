"""Arrays on a GPU for pages in host memory: puts and gets in the caller's stream, a real daemon."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.system import small_cupy as cupy
from tests.system.blocks import await_true
from tests.system.device_driver import BLIND, fake_only, use_driver
from tests.system.device_worker import DEVICE, evict
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.sdk import HOST, await_nothing_held, churn, held
from tests.system.warm import Daemon
from tests.unit.kernels.fake_driver import counts, ok
from tierd.client import AsyncClient, Client, NamespaceSpec, PutGroup
from tierd.client.session import device, stream_copies
from tierd.client.session.gpu_arrays import _Tensor
from tierd.errors import TierdError, Unsupported
from tierd.kernels import params
from tierd.kernels.loaded import Loaded
from tierd.testing import chain, content_of, is_content
from tools.fake_cuda import build_fatbins

TOKENS, BLOCKS, BLOCK_BYTES = 16, 6, 256 << 10
SCATTERED = (3, 0, 1, 5, 4, 2)
"""Rows of the pool, of which two follow each other."""
SPEC = NamespaceSpec(model="arrays", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES)
CONFIG = "nvme = []\n" + HOST


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch)


@pytest.fixture
def daemon(driver: None) -> Iterator[Daemon]:
    with Daemon(CONFIG) as running:
        yield running


class Worker:
    """A client with a pool of pages on the GPU: one method for each request of a test."""

    def __init__(self, target: str) -> None:
        self.client = Client(target)
        self.namespace = self.client.open_namespace(SPEC)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pool = cupy.empty((BLOCKS, BLOCK_BYTES), cupy.uint8)
        self.rows = [self.pool[i] for i in SCATTERED]

    def fill(self, seed: int) -> None:
        """Computes KV: the stream writes it, and nobody waits for that."""
        for name, row in zip(chain(seed, BLOCKS), self.rows, strict=True):
            row.set(content_of(name, BLOCK_BYTES))

    def right(self, seed: int) -> int:
        """Rows with this chain's bytes, as the stream reads them."""
        with self.stream:
            return sum(is_content(row.get(), name) for name, row in zip(chain(seed, BLOCKS), self.rows, strict=True))

    def put(self, seed: int, **how: Any) -> str:
        """Computes and stores a chain; what became of the blocks."""
        with self.stream:
            self.fill(seed)
            done = self.client.put(self.namespace, chain(seed, BLOCKS), self.rows, **how)
        return repr(done)

    def put_over_the_end_of(self, pid: int, seed: int) -> str:
        """A put whose stream hangs until that process has ended. Before, the rows are kept."""
        with self.stream:
            self.kept, self.rows = self.rows, list(cupy.empty((BLOCKS, BLOCK_BYTES), cupy.uint8))

        def end() -> None:
            await_true(lambda: not psutil.pid_exists(pid), "the daemon's end")
            self.end_hang()

        threading.Thread(target=end).start()
        return self.put(seed, timeout_s=10)

    def got(self) -> int:
        """`right` of the rows that were kept, for chain 1."""
        self.rows = self.kept
        return self.right(1)

    def get(self, seed: int) -> int:
        """Gets a chain into the pool, over other bytes; the number of blocks."""
        with self.stream:
            self.fill(10**6)
            return self.client.get(self.namespace, chain(seed, BLOCKS), out=self.rows).blocks

    def hang(self) -> None:
        """A kernel in the stream does not end."""
        place = int(ok(cupy.driver().cuMemAlloc(4096)))
        self.kernels = Loaded(build_fatbins(), stream=lambda: self.stream.ptr)
        os.environ["TIERD_FAKE_CUDA_HANGS"] = "1"
        told = params.Merge(place, place + 1024, place + 2048, place + 3072, 1, 1, 8)
        self.kernels.launch("merge_f32", (1, 1, 1), told)

    def end_hang(self) -> None:
        """It ends."""
        del os.environ["TIERD_FAKE_CUDA_HANGS"]

    def pinned(self) -> int:
        """Pieces of host memory that are registered or pinned."""
        device.unmap_ended()
        return counts().get("pinned", 0)

    def leave(self) -> None:
        """Ends the client."""
        (self.address,) = (segment.address for segment in stream_copies._registered)
        self.client.close()
        gc.collect()

    def is_mapped(self) -> bool:
        """Whether the segment that was registered when the client ended is still mapped."""
        return any(line.startswith(f"{self.address:x}-") for line in Path("/proc/self/maps").read_text().splitlines())


def serve(talk: Talk, target: str) -> None:
    """Runs in the worker: answers requests until the test ends."""
    worker = Worker(target)
    while True:
        verb, *given = talk.hear()
        how = given.pop() if given and isinstance(given[-1], dict) else {}
        try:
            talk.say(getattr(worker, verb)(*given, **how))
        except TierdError as error:
            talk.say(f"{type(error).__name__}: {error}")


@pytest.fixture
def worker(daemon: Daemon) -> Iterator[Elsewhere]:
    with Elsewhere(serve, daemon.target) as one:
        yield one


def test_blocks_come_back_to_the_bit(daemon: Daemon, worker: Elsewhere) -> None:
    """Blocks that the stream still computes are stored whole, and come back whole. A client without a
    GPU reads the same bytes."""
    assert worker.ask(["put", 1]) == f"PutResult({BLOCKS} READY)"
    assert worker.ask(["put", 1]) == f"PutResult({BLOCKS} EXISTS)"
    with Client(daemon.target) as other:
        views = other.get(other.open_namespace(SPEC), chain(1, BLOCKS)).views
        assert [is_content(view, name) for view, name in zip(views, chain(1, BLOCKS), strict=True)] == [True] * BLOCKS
        del views
    for _ in range(2):
        assert [worker.ask(["get", 1]), worker.ask(["right", 1])] == [BLOCKS, BLOCKS]
    assert worker.ask(["get", 2]) == 0
    assert worker.ask(["put", 3, {"wait": False}]) == f"PutResult({BLOCKS} PENDING)"
    assert [worker.ask(["get", 3]), worker.ask(["right", 3])] == [BLOCKS, BLOCKS]
    await_nothing_held(daemon, "copies that are done")


@fake_only("it counts what is registered")
def test_a_segment_is_registered_once_and_forgotten_with_its_mapping(daemon: Daemon, worker: Elsewhere) -> None:
    """Puts and gets of one segment register it once. After the client's end the driver forgets it, and
    only then is it unmapped: its address must not belong to other memory before."""
    assert worker.ask(["put", 1]) == f"PutResult({BLOCKS} READY)"
    assert worker.ask(["pinned"]) == 1
    assert worker.ask(["get", 1]) == BLOCKS and worker.ask(["pinned"]) == 1
    await_nothing_held(daemon, "copies that are done")
    worker.ask(["leave"])
    assert worker.ask(["is_mapped"])
    await_true(lambda: worker.ask(["pinned"]) == 0, "the end of the registration")
    assert not worker.ask(["is_mapped"])


@fake_only("its driver refuses on request")
def test_memory_that_is_not_registered_is_copied_in_parts(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the driver refuses to register pages, or those mapped read-only, blocks go and come to the
    bit. They take several parts of pinned memory, which is freed."""
    use_driver(monkeypatch, TIERD_FAKE_CUDA_STRIKE="cuMemHostRegister:0:e801")
    with Elsewhere(parted, daemon.target) as worker, Client(daemon.target) as other:
        assert worker.ask(["put", 1]) == f"PutResult({BLOCKS} READY)"
        assert other.get(other.open_namespace(SPEC), chain(1, BLOCKS)).blocks == BLOCKS
    use_driver(monkeypatch, TIERD_FAKE_CUDA_STRIKE="", TIERD_FAKE_CUDA_READ_ONLY_REGISTER="0")
    with Elsewhere(parted, daemon.target) as reader:
        assert [reader.ask(["get", 1]), reader.ask(["right", 1])] == [BLOCKS, BLOCKS]
        await_true(lambda: reader.ask(["pinned"]) == 0, "the pinned memory freed")
    await_nothing_held(daemon, "copies that are done")


def parted(talk: Talk, target: str) -> None:
    """As `serve`, with room for two and a half blocks in pinned memory."""
    stream_copies.PART_BYTES = 5 * BLOCK_BYTES // 2
    serve(talk, target)


@fake_only("its kernels hang on request")
def test_a_get_holds_its_pages_until_the_stream_has_passed_it(daemon: Daemon, worker: Elsewhere) -> None:
    """A get returns while its stream hangs. Its pages outlive eviction and other blocks until the stream
    has read them; then they are released without another call, and the bytes are right."""
    assert worker.ask(["put", 1]) == f"PutResult({BLOCKS} READY)"
    worker.ask(["hang"])
    assert worker.ask(["get", 1]) == BLOCKS
    assert held(daemon)[0] == 1
    evict(daemon.target, "host.0")
    with Client(daemon.target) as other:
        churn(other, seed=1, total=64 << 20)
    assert held(daemon)[0] == 1
    worker.ask(["end_hang"])
    await_nothing_held(daemon, "the get whose stream goes on")
    assert worker.ask(["right", 1]) == BLOCKS


@fake_only("its kernels hang on request")
def test_a_put_whose_stream_hangs_frees_its_pages_late(daemon: Daemon, worker: Elsewhere) -> None:
    """A put whose stream hangs fails by its deadline and stores nothing. Its pages stay reserved
    until the stream has written them, so no block of another client changes."""
    worker.ask(["hang"])
    assert "are not done in time, and their pages stay held" in worker.ask(["put", 1, {"timeout_s": 0.2}])
    assert held(daemon)[1] == 1
    with Client(daemon.target) as other:
        churn(other, seed=1, total=64 << 20, byte=0x5A)
        assert held(daemon)[1] == 1
        worker.ask(["end_hang"])
        await_true(lambda: not held(daemon)[1], "the pages of the put that failed")
        assert other.get(other.open_namespace(SPEC), chain(1, BLOCKS)).tokens == 0
    assert worker.ask(["put", 1]) == f"PutResult({BLOCKS} READY)"


@fake_only("its kernels hang on request")
def test_a_daemon_killed_in_mid_copy_changes_no_byte(daemon: Daemon, worker: Elsewhere) -> None:
    """If the daemon is killed while copies of a get are in flight, the bytes are right all the same. A
    put that it leaves in mid-copy names the daemon's end."""
    assert worker.ask(["put", 1]) == f"PutResult({BLOCKS} READY)"
    worker.ask(["hang"])
    assert worker.ask(["get", 1]) == BLOCKS
    worker.say(["put_over_the_end_of", daemon.pid, 2])
    await_true(lambda: held(daemon)[1] == 1, "the put's reservation")
    daemon.kill()
    assert worker.hear().startswith("Unavailable: no daemon at ")
    assert worker.ask(["got"]) == BLOCKS


def test_a_page_with_other_bytes_is_a_miss(daemon: Daemon, worker: Elsewhere) -> None:
    """A get of a block that its writer changed after the commit ends before that block."""
    with Client(daemon.target) as other:
        names = chain(4, BLOCKS)
        pages = other.reserve(PutGroup(other.open_namespace(SPEC), names))
        rows = [page[:] for page in pages.buffers() if page is not None]
        for name, row in zip(names, rows, strict=True):
            row[:] = content_of(name, BLOCK_BYTES)
        pages.commit()
        rows[2][-1] ^= 1
        assert worker.ask(["get", 4]) == 2
        rows.clear()


class Capsuled:
    """An array that DLPack alone exports, and that names no stream. Its memory lives with the capsule."""

    def __init__(self, array: Any, kind: int = 2) -> None:
        self._array, self._kind = array, kind
        self._shape = (ctypes.c_int64 * 1)(array.nbytes)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, 0

    def __dlpack__(self, *, stream: int) -> Any:
        event = ok(cupy.driver().cuEventCreate(2))
        ok(cupy.driver().cuEventRecord(event, cupy.current()))
        ok(cupy.driver().cuStreamWaitEvent(stream, event, 0))
        self.tensor = _Tensor(self._array.address - 64, self._kind, 0, 1, 1, 8, 1, self._shape, None, 64)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


async def in_a_loop(worker: Worker, target: str) -> list[int]:
    """Right rows after gets of AsyncClient, whose verbs run in other threads; one of a put by it."""
    right = list[int]()
    async with AsyncClient(target) as client:
        namespace = await client.open_namespace(SPEC)
        worker.fill(6)
        await client.get(namespace, chain(5, BLOCKS), out=worker.pool)
        right.append(worker.right(5))
        worker.fill(6)
        await client.put(namespace, chain(6, BLOCKS), worker.pool)
        worker.fill(5)
        await client.get(namespace, chain(6, BLOCKS), out=list(worker.pool))
        return [*right, worker.right(6)]


def in_other_ways(talk: Talk, target: str) -> None:
    """Runs in the worker: says how many rows were right after each way to give arrays."""
    worker = Worker(target)
    pool, client, names, right = worker.pool, worker.client, chain(5, BLOCKS), list[int]()
    worker.rows = list(pool)
    with worker.stream:
        worker.fill(5)
        capsules = [Capsuled(row) for row in pool]
        assert client.put(worker.namespace, names, capsules)
        worker.fill(6)
        capsules = [Capsuled(row) for row in pool]
        assert client.get(worker.namespace, names, out=capsules).blocks == BLOCKS
        right.append(worker.right(5))
        worker.fill(6)
        with client.acquire(worker.namespace, names) as lease:
            assert lease.copy_into(pool) == lease.copy_into(list(pool)) == BLOCKS
        right.append(worker.right(5))
        talk.say(right + asyncio.run(in_a_loop(worker, target)))


def test_arrays_come_in_other_ways(daemon: Daemon) -> None:
    """DLPack alone, one array for all blocks, `copy_into` and AsyncClient give the same bytes. They use
    the stream that is current where they are called."""
    with Elsewhere(in_other_ways, daemon.target) as worker:
        assert worker.hear() == [BLOCKS] * 4
    await_nothing_held(daemon, "copies of a worker that ended")


def beside_a_tier_on_the_gpu(talk: Talk, target: str) -> None:
    """Runs in the worker: says how many rows are right after copies from device pages, once stored again."""
    worker = Worker(target)
    worker.put(9)
    with worker.stream, worker.client.acquire(worker.namespace, chain(9, BLOCKS), tier="device") as lease:
        worker.fill(6)
        pages = lease.views()
        assert lease.copy_into(worker.rows) == BLOCKS
        assert worker.client.put(worker.namespace, chain(10, BLOCKS), pages)
        del pages
    talk.say(worker.right(9))
    worker.rows = [cupy.empty((BLOCK_BYTES,)) for _ in range(BLOCKS)]
    with worker.stream:
        assert worker.client.get(worker.namespace, chain(10, BLOCKS), out=worker.rows).blocks == BLOCKS
    talk.say(worker.right(9))


def test_pages_of_a_device_tier_go_to_arrays_and_back(driver: None) -> None:
    """`copy_into` brings leased pages of a device tier into arrays, and a put takes such pages too."""
    with Daemon("nvme = []\n" + DEVICE + HOST) as daemon, Elsewhere(beside_a_tier_on_the_gpu, daemon.target) as worker:
        assert [worker.hear(), worker.hear()] == [BLOCKS, BLOCKS]


class Odd:
    """An array whose interface differs in some fields."""

    def __init__(self, row: Any, **fields: Any) -> None:
        self.__cuda_array_interface__ = row.__cuda_array_interface__ | fields


def refused(talk: Talk, target: str) -> None:
    """Runs in the worker: says the error of each call, and what the calls hold."""
    worker = Worker(target)
    client, space, names, (row, *_) = worker.client, worker.namespace, chain(7, 1), worker.pool
    client.put(space, names, [content_of(names[0], BLOCK_BYTES)])
    said = list[str]()

    def check(call: Any, array: Any) -> None:
        try:
            call(array)
            said.append("")
        except TierdError as error:
            said.append(f"{type(error).__name__}: {error}")

    def put(array: Any) -> None:
        client.put(space, chain(8, 2), [array, row])

    def get(array: Any) -> None:
        client.get(space, names, out=[array])

    check(put, bytes(BLOCK_BYTES))
    check(put, Odd(row, shape=(BLOCK_BYTES - 1,)))
    check(get, Odd(row, shape=(BLOCK_BYTES // 2,)))
    check(get, Odd(row, strides=(2,)))
    check(get, Odd(row, data=(row.address, True)))
    check(put, Odd(row, mask=row))
    check(put, Odd(row, typestr="?9"))
    check(put, Odd(row, data=(names.ctypes.data, False)))
    check(put, Odd(row, stream=worker.stream.ptr))
    check(get, Odd(row, stream=2))
    check(get, Capsuled(row, kind=10))
    ok(cupy.driver().cuStreamBeginCapture(worker.stream.ptr, 2))
    check(get, Odd(row, stream=worker.stream.ptr))
    cupy.driver().cuStreamEndCapture(worker.stream.ptr)
    check(lambda array: Client("localhost:1").put(space, chain(8, 1), [array]), row)
    client.put(space, names, [row])
    talk.say(said)
    talk.hear()


def test_bad_arrays_are_refused_by_name(daemon: Daemon) -> None:
    """Each unfit array is refused with the fault and the remedy, and nothing stays held."""
    said = [
        "buffer 0: it is in host memory, others are on a GPU; pass all of one kind",
        f"buffer 0: {BLOCK_BYTES - 1} bytes for a block of {BLOCK_BYTES}",
        f"buffer 0: {BLOCK_BYTES // 2} bytes for a block of {BLOCK_BYTES}; pass a longer one",
        "strides (2,) is not contiguous; pass a contiguous array",
        "buffer: the array on a GPU is read-only; pass a writable one",
        "buffer: it has a mask; pass an array without one",
        "buffer: Odd does not export its memory on a GPU (data type '?9' not understood)",
        "is no GPU memory of this process; pass an array on a GPU that still lives",
        "pass arrays of one GPU and one stream",
        "stream 2 is another one in each thread",
        "buffer: Capsuled cannot be read through DLPack",
        "a graph is being captured; end the capture first",
    ]
    with Elsewhere(refused, daemon.target) as worker:
        *found, remote = worker.hear()
        assert held(daemon)[:2] == (0, 0)
    assert [
        text in error and error.startswith("InvalidArgument: ") for text, error in zip(said, found, strict=True)
    ] == [True] * len(said)
    assert remote == "Unsupported: arrays on a GPU: localhost:1 is remote; pass copies in host memory"


def blind(talk: Talk, target: str) -> None:
    """Runs without a driver."""
    client = Client(target)
    fake = Odd(
        SimpleNamespace(
            __cuda_array_interface__={"version": 3, "shape": (BLOCK_BYTES,), "typestr": "|u1", "data": (4096, False)}
        )
    )
    try:
        client.put(client.open_namespace(SPEC), chain(1, 1), [fake])
    except Unsupported as error:
        talk.say(str(error))


def test_without_a_driver_arrays_are_unsupported(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver an array on a GPU raises Unsupported, with the remedy."""
    for name, value in BLIND.items():
        monkeypatch.setenv(name, value)
    with Elsewhere(blind, daemon.target) as worker:
        assert "no NVIDIA driver" in (said := worker.hear()) and said.endswith("or pass copies in host memory")
