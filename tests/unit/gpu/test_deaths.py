"""The GPU process dies or hangs at each step: callers get errors, slabs keep bytes, nothing leaks.

TIERD_FAKE_CUDA_STRIKE ends it within a chosen call of the driver, so the tests reach every step.
`Life.live` lists the steps of an owner.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess

import pytest

from tests.depth import count, report
from tests.still import stand_still
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
from tests.unit.kernels.fake_driver import command
from tierd.errors import TierFailed
from tierd.gpu.process import GpuProcess

pytestmark = pytest.mark.usefixtures("driver")
LIMIT_S = 100
PATIENCE_S = 0.5
"""Patience in tests in which the process hangs."""
CALLS = 50
"""Least number of driver calls in one life."""
STEPS = {
    "begin": ("cuInit:1", "cuStreamCreate:3", "cuMemGetInfo:1"),
    "make": ("cuMemCreate:1", "cuMemSetAccess:1", "cuEventSynchronize:1", "cuMemExportToShareableHandle:1"),
    "attach": ("cuMemHostRegister:1",),
    "load": ("cuMemcpyBatchAsync:1", "cuEventSynchronize:2"),
    "store": ("cuMemcpyBatchAsync:3", "cuEventSynchronize:4"),
    "sums": ("cuEventSynchronize:5",),
    "drop": ("cuMemUnmap:1",),
    "detach": ("cuMemHostUnregister:1",),
}
"""For each step, the driver calls within which the process dies."""


class Life:
    """An owner's requests to a GPU process so far. host, slab: descriptors of host memory and of slab 1."""

    def __init__(self, host: int) -> None:
        self.host, self.slab = host, -1
        self.done: list[str] = []
        self.pieces = pieces_of()
        self.back = pieces_of()
        self.back["host_offset"] += LENGTH

    async def live(self, gpu: GpuProcess) -> None:
        """Runs each step once; `done` names the steps that succeeded."""
        await self.step("begin", gpu.start())
        self.slab = await self.step("make", gpu.make(1, 2 * SLAB))
        await self.step("attach", gpu.attach(HOST, self.host, 2 * LENGTH))
        await self.step("load", gpu.load(self.pieces))
        await self.step("store", gpu.store(self.back))
        await self.step("sums", gpu.sums(self.pieces))
        await self.step("drop", gpu.drop(1))
        await self.step("detach", gpu.detach(HOST))

    async def step(self, name: str, call: object) -> object:
        answer = await call
        self.done.append(name)
        return answer

    async def successor(self) -> None:
        """Another process adopts the slab: it holds the loaded bytes, or the owner can load them again."""
        async with running(slabs={1: (self.slab, 2 * SLAB)}) as (gpu, _):
            if "load" in self.done:
                assert lists(await gpu.sums(self.pieces)) == sums_of(self.host, self.pieces, "host")
            await gpu.attach(HOST, self.host, 2 * LENGTH)
            assert lists(await gpu.load(self.pieces)) == sums_of(self.host, self.pieces, "host")
            await gpu.store(self.back)
        stored = bytes_at(self.host, self.back, "host")
        assert stored == bytes_at(self.slab, self.pieces, "slab") == bytes_at(self.host, self.pieces, "host")


async def struck(strike: str, monkeypatch: pytest.MonkeyPatch) -> list[str] | None:
    """Dies within this driver call. Checks the promises of a death and returns the steps that
    succeeded, or None if the process made no such call."""
    before, owner, life = descriptors(), Owner(), Life(memory(2 * LENGTH, seed=4))
    monkeypatch.setenv("TIERD_FAKE_CUDA_STRIKE", strike)
    gpu, is_dead = owner.process(), False
    try:
        await life.live(gpu)
    except TierFailed:
        is_dead = True
        with pytest.raises(TierFailed, match="status -9"):
            await gpu.make(2, SLAB)
    await gpu.stop()
    monkeypatch.delenv("TIERD_FAKE_CUDA_STRIKE")
    assert len(owner.told) == (is_dead and "begin" in life.done), strike
    if "store" in life.done:
        assert bytes_at(life.host, life.back, "host") == bytes_at(life.host, life.pieces, "host")
    if life.slab >= 0:
        await life.successor()
        os.close(life.slab)
    os.close(life.host)
    assert descriptors() == before, strike
    return life.done if is_dead else None


@pytest.mark.parametrize("step", STEPS)
async def test_a_kill_at_each_step_is_survived(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending requests raise TierFailed, earlier results hold, and the next process reads the slab."""
    for call in STEPS[step]:
        done = await struck(f"{call}:9", monkeypatch)
        assert done == list(STEPS)[: list(STEPS).index(step)], call


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_kill_in_each_call_of_the_driver_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for every driver call, from the first of a life to the last."""
    call, deaths, step = 1, 0, max(1, CALLS // count(test=10, nightly=CALLS, weekly=CALLS))
    while (await struck(f"*:{call}:9", monkeypatch)) is not None:
        call, deaths = call + step, deaths + 1
    report("GPU process killed in a call of the driver", deaths=deaths, of_calls=call - 1)
    assert deaths * step >= CALLS


async def test_all_that_wait_are_told_and_the_owner_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill fails every pending call with TierFailed, none of them before the process is gone."""
    owner, host = Owner(), memory(seed=1)
    gpu = owner.process()
    await gpu.start()
    slab = await gpu.make(1, SLAB)
    await gpu.attach(HOST, host, LENGTH)
    stand_still(gpu.pid)
    pieces = pieces_of()
    asked = [call(pieces) for _ in range(30) for call in (gpu.load, gpu.store, gpu.sums)]
    calls = [
        asyncio.create_task(each) for each in (*asked, gpu.make(2, SLAB), gpu.drop(1), gpu.attach(8, host, LENGTH))
    ]
    pidfd = os.pidfd_open(gpu.pid)
    await asyncio.sleep(0)
    os.kill(gpu.pid, signal.SIGKILL)
    for call in asyncio.as_completed(calls):
        with pytest.raises(TierFailed, match="status -9"):
            await call
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, 0)
    await gpu.stop()
    assert len(owner.told) == 1
    for fd in (slab, host, pidfd):
        os.close(fd)


async def test_a_process_that_hangs_is_killed_when_patience_ends() -> None:
    """A stopped process: its call fails when patience ends, it is gone, and other processes work on."""
    async with running(patience_s=PATIENCE_S) as (hung, owner), running() as (gpu, _):
        slab = await gpu.make(1, SLAB)
        stand_still(hung.pid)
        begun = asyncio.get_running_loop().time()
        calls = [asyncio.create_task(hung.make(1, SLAB)), asyncio.create_task(hung.drop(5))]
        for call in calls:
            with pytest.raises(TierFailed, match="was not answered within 0.5 s, it is killed"):
                await call
        took = asyncio.get_running_loop().time() - begun
        assert took >= 0.9 * PATIENCE_S
        report("GPU process that hangs, noticed", patience_s=PATIENCE_S, took_s=round(took, 3))
        assert len(owner.told) == 1
        with pytest.raises(ProcessLookupError):
            os.kill(hung.pid, 0)
        assert await gpu.sums(pieces_of([])) == []
    os.close(slab)


async def test_a_start_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang in the first driver call: start fails after its own patience, and no death is reported."""
    before, owner = descriptors(), Owner()
    monkeypatch.setenv("TIERD_FAKE_CUDA_STRIKE", f"cuInit:1:{int(signal.SIGSTOP)}")
    gpu = GpuProcess(0, patience_s=100, on_death=owner.told.append, start_patience_s=3)
    with pytest.raises(TierFailed, match="begin was not answered within 3 s"):
        await gpu.start()
    assert owner.told == []
    assert descriptors() == before


@pytest.mark.parametrize("call", ["cuEventSynchronize:1", "cuEventSynchronize:2", "cuMemHostRegister:1"])
async def test_a_lost_context_ends_the_process(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fatal GPU error the process exits by itself; then call and owner get the driver's error."""
    monkeypatch.setenv("TIERD_FAKE_CUDA_STRIKE", f"{call}:e700")
    owner, life = Owner(), Life(memory(2 * LENGTH, seed=4))
    gpu = owner.process()
    with pytest.raises(TierFailed, match="it lost the GPU .*ILLEGAL_ADDRESS.*status 3"):
        await life.live(gpu)
    with pytest.raises(ProcessLookupError):
        os.kill(gpu.pid, 0)
    await gpu.stop()
    (reason,) = owner.told
    assert "ILLEGAL_ADDRESS" in reason
    assert "status 3" in reason
    for fd in {life.slab, life.host} - {-1}:
        os.close(fd)


async def test_slabs_that_cannot_be_taken_over_end_the_start() -> None:
    """A descriptor of no slab raises TierFailed that names the slab, and the start closes its descriptors."""
    before = descriptors()
    other = memory()
    owner = Owner()
    with pytest.raises(TierFailed, match="slab 3: cannot be taken over"):
        await owner.process().start(slabs={3: (other, SLAB)})
    os.close(other)
    assert owner.told == []
    assert descriptors() == before


def parent(is_stopped: str) -> None:
    """A daemon that owns a GPU process and never ends by itself. is_stopped: the process is stopped."""

    async def live() -> None:
        gpu = Owner().process()
        await gpu.start()
        if is_stopped == "True":
            stand_still(gpu.pid)
        print(gpu.pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(live())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_it_does_not_outlive_its_daemon(is_stopped: bool) -> None:
    """SIGKILL of the daemon ends it: by its closed socket, or by the kernel if the process is stopped."""
    with subprocess.Popen(command(parent, is_stopped), stdout=subprocess.PIPE, text=True) as daemon:
        pid = int(daemon.stdout.readline())
        pidfd = os.pidfd_open(pid)
        daemon.kill()
        daemon.wait(LIMIT_S)
    try:
        assert select.select([pidfd], [], [], LIMIT_S)[0], "it lives on"
    finally:
        os.close(pidfd)
