"""The daemon's end of a GPU process: real processes, on the fake driver."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.still import stand_still
from tests.system.blocks import await_true
from tests.unit.gpu.processes import (
    HOST,
    LENGTH,
    SLAB,
    Owner,
    bytes_at,
    descriptors,
    lists,
    memory,
    pieces_of,
    running,
    sums_of,
)
from tests.unit.kernels.fake_driver import command, entered, fake_environment, mapped, ok
from tierd.errors import InvalidArgument, Overloaded, TierFailed, Unsupported
from tierd.gpu.process import CALLS_MAX, WAITING_MAX
from tierd.gpu.protocol import MESSAGE_BYTES, PIECE, PIECES_MAX, Inbox, frame

pytestmark = pytest.mark.usefixtures("driver")
LIMIT_S = 100
FEW = 4
"""Descriptors of a GPU process without slabs: those of every program, and its socket. On the fake
driver a slab adds one, host memory none."""


def imported(fd: str) -> object:
    """The bindings, and the handle of a slab that a worker received."""
    cuda = entered()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return cuda, ok(cuda.cuMemImportFromShareableHandle(int(fd), kind))


def write_through(fd: str, rights: str) -> None:
    """A worker: maps a slab with these rights, reads it, writes to it on the GPU, prints the answer."""
    cuda, handle = imported(fd)
    address = mapped(cuda, handle, rights=rights)
    host, stream = int(ok(cuda.cuMemHostAlloc(64, 0))), ok(cuda.cuStreamCreate(1))
    ok(cuda.cuMemcpyAsync(host, address, 64, stream))
    ok(cuda.cuStreamSynchronize(stream))
    ok(cuda.cuMemsetD8Async(address, 9, 64, stream))
    print(cuda.cuStreamSynchronize(stream)[0].name, flush=True)


def worker(fd: int, rights: str) -> str:
    done = subprocess.run(
        command(write_through, fd, rights), pass_fds=[fd], env=fake_environment(), capture_output=True, text=True,
        timeout=LIMIT_S, check=True,
    )  # fmt: skip
    return done.stdout.strip()


async def test_it_says_what_it_found() -> None:
    """The facts give name, memory, granularity, export kind, way of sums, and notices of a shortfall."""
    async with running() as (gpu, _):
        facts = gpu.facts
    assert (facts.name, facts.total_bytes, facts.granularity, facts.exports) == ("Fake GPU", 8 << 30, SLAB, "vmm")
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert facts.hashes == "kernel" or any("sum" in notice for notice in facts.notices)


async def test_a_worker_maps_what_the_process_made() -> None:
    """A worker reads loaded bytes read-only and cannot write; the process sees a permitted writer's bytes."""
    host = memory(seed=1)
    async with running() as (gpu, owner):
        slab = await gpu.make(1, SLAB)
        await gpu.attach(HOST, host, LENGTH)
        pieces = pieces_of()
        assert lists(await gpu.load(pieces)) == sums_of(host, pieces, "host")
        assert worker(slab, "READ") == "CUDA_ERROR_ILLEGAL_ADDRESS"
        assert bytes_at(slab, pieces, "slab") == bytes_at(host, pieces, "host")
        assert worker(slab, "READWRITE") == "CUDA_SUCCESS"
        assert os.pread(slab, 64, 0) == b"\x09" * 64
        assert lists(await gpu.sums(pieces)) == sums_of(slab, pieces, "slab") != sums_of(host, pieces, "host")
        assert owner.told == []
    os.close(slab)
    os.close(host)


async def test_stored_means_that_the_last_byte_is_there() -> None:
    """When a store returns, host memory holds the slab's bytes, and no byte beside the pages has changed."""
    host = memory(2 * LENGTH)
    async with running() as (gpu, _):
        slab = await gpu.make(1, SLAB)
        os.pwrite(slab, np.random.default_rng(2).bytes(SLAB), 0)
        await gpu.attach(HOST, host, 2 * LENGTH)
        pieces = pieces_of()
        await gpu.store(pieces)
        assert bytes_at(host, pieces, "host") == bytes_at(slab, pieces, "slab")
        rest = bytearray(os.pread(host, 2 * LENGTH, 0))
        for piece in pieces:
            rest[int(piece["host_offset"]) : int(piece["host_offset"]) + int(piece["length"])] = bytes(piece["length"])
        assert not any(rest)
    os.close(slab)
    os.close(host)


async def test_pieces_outside_are_refused_before_a_byte_moves() -> None:
    """A batch with one wrong offset or number, or with too many pieces, moves no byte."""
    host = memory(seed=1)
    async with running() as (gpu, _):
        slab = await gpu.make(1, SLAB)
        await gpu.attach(HOST, host, LENGTH)
        for field, value in (
            ("slab_offset", SLAB - 1), ("slab_offset", 2**64 - 1), ("host_offset", LENGTH - 1), ("host_offset", 2**64 - 1), ("slab", 2), ("host", 8),
        ):  # fmt: skip
            pieces = pieces_of([4096, 2])
            pieces[field][1] = value
            for call in (gpu.load, gpu.store):
                with pytest.raises(InvalidArgument, match="slab|host"):
                    await call(pieces)
        with pytest.raises(InvalidArgument, match="at most 4096"):
            await gpu.load(np.zeros(PIECES_MAX + 1, PIECE))
        assert os.pread(slab, SLAB, 0) == bytes(SLAB)
        assert os.pread(host, LENGTH, 0) == np.random.default_rng(1).bytes(LENGTH)
        assert await gpu.load(pieces_of([])) == []
        for gone in (gpu.drop(2), gpu.detach(8)):
            with pytest.raises(InvalidArgument, match="not there"):
                await gone
    os.close(slab)
    os.close(host)


async def test_a_gpu_that_is_full_refuses(driver: pytest.MonkeyPatch) -> None:
    """The process answers Overloaded, neither side leaks, other slabs stay, and a drop makes room."""
    driver.setenv("TIERD_FAKE_CUDA_BYTES", str(2 * SLAB))
    async with running() as (gpu, _):
        first = await gpu.make(1, SLAB)
        before = len(descriptors())
        for _ in range(10):
            with pytest.raises(Overloaded, match="OUT_OF_MEMORY"):
                await gpu.make(2, 2 * SLAB)
        assert len(descriptors()) == before
        # The process's thread closes its own copy of a sent slab descriptor a moment later.
        await asyncio.to_thread(await_true, lambda: len(descriptors(gpu.pid)) == FEW + 1, "no more than the first slab")
        await gpu.drop(1)
        os.close(first)
        os.close(await gpu.make(2, 2 * SLAB))


async def test_nothing_leaks() -> None:
    """Rounds of all requests leak no descriptor in either process, and a stop closes all of ours."""
    outside = descriptors()
    host = memory(seed=1)
    async with running() as (gpu, _):
        before = len(descriptors())
        for round_ in range(5):
            slab = await gpu.make(round_, SLAB)
            await gpu.attach(HOST, host, LENGTH)
            pieces = pieces_of(slab=round_)
            await gpu.load(pieces)
            await gpu.store(pieces)
            with pytest.raises(InvalidArgument):
                await gpu.make(round_, SLAB)
            await gpu.drop(round_)
            await gpu.detach(HOST)
            os.close(slab)
            assert len(descriptors()) == before
            await asyncio.to_thread(await_true, lambda: len(descriptors(gpu.pid)) == FEW, "as few as at first")
    os.close(host)
    assert descriptors() == outside


async def test_other_processes_get_no_descriptor() -> None:
    """The daemon's descriptors are close-on-exec; the process inherits its socket, no forgotten one."""
    before = set(descriptors())
    forgotten = os.memfd_create("forgotten", 0)
    async with running() as (gpu, _):
        slab = await gpu.make(1, SLAB)
        inherited = {fd for fd in set(descriptors()) - before - {str(forgotten)} if os.get_inheritable(int(fd))}
        assert inherited == set()
        theirs = descriptors(gpu.pid)
        assert not any("forgotten" in name for name in theirs.values())
        assert len([name for name in theirs.values() if name.startswith("socket:")]) == 1
    os.close(slab)
    os.close(forgotten)


async def test_many_calls_are_in_flight_and_none_is_lost() -> None:
    """While the process is stopped, callers send more calls than it takes at once, most longer than
    a socket's buffer. Each gets its own answer, and calls beyond the limit are refused."""
    async with running() as (gpu, _):
        slab = await gpu.make(1, SLAB)
        os.pwrite(slab, np.random.default_rng(2).bytes(SLAB), 0)
        stand_still(gpu.pid)
        asked = [pieces_of([number, *[0] * (PIECES_MAX - 1)], gap=0) for number in range(CALLS_MAX + 4)]
        calls = [asyncio.create_task(gpu.sums(pieces)) for pieces in asked[:9]]
        hosts = [memory(seed=number) for number in range(3)]
        attaching = [asyncio.create_task(gpu.attach(number, host, LENGTH)) for number, host in enumerate(hosts)]
        calls += [asyncio.create_task(gpu.sums(pieces)) for pieces in asked[9:]]
        rest = [asyncio.create_task(gpu.sums(pieces_of([1]))) for _ in range(WAITING_MAX - 7)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1024 calls are queued"):
            await gpu.sums(pieces_of([1]))
        os.kill(gpu.pid, signal.SIGCONT)
        for pieces, tables in zip(asked, await asyncio.gather(*calls), strict=True):
            assert lists(tables[:1]) == sums_of(slab, pieces[:1], "slab")
            assert not any(len(table) for table in tables[1:])
        assert len({tuple(map(tuple, lists(tables))) for tables in await asyncio.gather(*rest)}) == 1
        await asyncio.gather(*attaching)
        for number, host in enumerate(hosts):
            pieces = pieces_of([LENGTH])
            pieces["host"] = number
            assert lists(await gpu.load(pieces)) == sums_of(host, pieces, "host")
            os.close(host)
    os.close(slab)


@pytest.mark.parametrize("slab", [bytes(MESSAGE_BYTES), object()], ids=["too long", "no message"])
async def test_what_cannot_be_sent_takes_nobodys_turn(slab: Any) -> None:
    """A call that does not fit a message fails in its caller, however often, and takes no turn."""
    async with running(patience_s=5.0) as (gpu, owner), asyncio.timeout(LIMIT_S):
        for _ in range(CALLS_MAX + 1):
            with pytest.raises((InvalidArgument, TypeError)):
                await gpu.drop(slab)
        os.close(await gpu.make(1, SLAB))
        assert gpu._pending == {}
        assert owner.told == []


async def test_a_cancelled_call_ends_with_what_it_began() -> None:
    """A cancelled call ends only when the process has answered, and its new slab is given back and closed."""
    before = descriptors()
    async with running() as (gpu, _):
        stand_still(gpu.pid)
        making = asyncio.create_task(gpu.make(1, SLAB))
        waiting = [asyncio.create_task(gpu.sums(pieces_of([1], slab=2))) for _ in range(CALLS_MAX)]
        await asyncio.sleep(0)
        making.cancel()
        waiting[-1].cancel()  # it has no turn yet: nothing was begun
        done, _ = await asyncio.wait([making, waiting[-1]], return_when=asyncio.FIRST_COMPLETED)
        assert done == {waiting[-1]}
        os.kill(gpu.pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await making
        assert making.cancelled()
        for call in waiting[:-1]:
            with pytest.raises(InvalidArgument, match="slab 2: not there"):
                await call
        os.close(await gpu.make(1, SLAB))
    assert descriptors() == before


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TIERD_FAKE_CUDA_DEVICES", "0", "CUDA_ERROR_NO_DEVICE"),
        ("TIERD_FAKE_CUDA_WITHOUT", "descriptors", "cannot share memory by descriptors"),
        ("TIERD_FAKE_CUDA_WITHOUT", "vmm", "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0"),
    ],
)
async def test_a_machine_that_cannot_is_refused(
    driver: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    """Start raises Unsupported with the reason, reports no death, and closes all that it opened."""
    before = descriptors()
    driver.setenv(variable, value)
    owner = Owner()
    gpu = owner.process()
    with pytest.raises(Unsupported, match=said):
        await gpu.start()
    with pytest.raises(TierFailed, match="stopped"):
        await gpu.make(1, SLAB)
    assert owner.told == []
    assert descriptors() == before


async def test_a_refusal_to_register_is_among_the_notices(driver: pytest.MonkeyPatch) -> None:
    """One notice appears, for any number of host memories."""
    driver.setenv("TIERD_FAKE_CUDA_STRIKE", "cuMemHostRegister:0:e801")
    host = memory()
    async with running() as (gpu, _):
        before = gpu.facts.notices
        for number in range(3):
            await gpu.attach(number, host, LENGTH)
        (new,) = gpu.facts.notices[len(before) :]
        assert "not registered for DMA" in new
    os.close(host)


def test_the_daemon_itself_has_no_driver() -> None:
    """Importing the daemon's end loads neither NVIDIA's bindings nor the rest of the GPU process."""
    program = "import sys, tierd.gpu.process; print(*[n for n in sys.modules if n.startswith(('cuda', 'tierd.gpu', 'tierd.kernels', 'tierd.tiers'))])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"tierd.gpu", "tierd.gpu.process", "tierd.gpu.protocol"}


def test_it_ends_with_its_socket() -> None:
    """The process exits by itself with status 0, but ignores the signals that stop a daemon."""
    ours, theirs = socket.socketpair()
    given = [sys.executable, "-m", "tierd.gpu", str(theirs.fileno()), "0"]
    with theirs, subprocess.Popen(given, pass_fds=[theirs.fileno()], env=fake_environment()) as child:
        theirs.close()
        ours.sendall(frame({"id": 1, "verb": "begin"}))
        answered = Inbox()
        while not answered.receive(ours):  # all of it: unread answers would change the end
            pass
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            child.send_signal(number)
        ours.close()
        assert child.wait(LIMIT_S) == 0
