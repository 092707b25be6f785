"""A killed GPU process that a driver call holds in the kernel: the owner gives it up. The memory of
its copies stays reserved until it is gone."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.still import stand_still
from tests.system.blocks import await_true
from tests.unit.gpu.processes import Owner, descriptors, pieces_of
from tierd.errors import TierFailed
from tierd.gpu import process
from tierd.gpu.process import GpuProcess

pytestmark = pytest.mark.usefixtures("driver")
PATIENCE_S, REAP_S = 0.5, 0.2
LIMIT_S = 15


@pytest.fixture
async def immortal(monkeypatch: pytest.MonkeyPatch) -> tuple[GpuProcess, Owner]:
    """A process that is stopped and that its owner cannot kill."""
    monkeypatch.setattr(process, "REAP_S", REAP_S)
    owner = Owner()
    gpu = owner.process(patience_s=PATIENCE_S)
    await gpu.start()
    monkeypatch.setattr(gpu._child, "kill", lambda: None)
    stand_still(gpu.pid)
    return gpu, owner


async def test_copies_wait_until_it_is_gone(immortal: tuple[GpuProcess, Owner]) -> None:
    """The owner and a caller of sums learn that it does not die; loads and stores end only with it."""
    gpu, owner = immortal
    copies = [asyncio.create_task(call(pieces_of())) for call in (gpu.load, gpu.store)]
    with pytest.raises(TierFailed, match="does not end"):
        await gpu.sums(pieces_of())
    await asyncio.to_thread(await_true, lambda: bool(owner.told), "word of it")
    assert not any(copy.done() for copy in copies)
    os.kill(gpu.pid, signal.SIGKILL)
    for copy in copies:
        with pytest.raises(TierFailed, match="does not end"):
            await copy
    await gpu.stop()
    assert len(owner.told) == 1


async def test_who_waits_for_a_turn_is_told(immortal: tuple[GpuProcess, Owner]) -> None:
    """Copies that wait for its end hold every turn; calls that were never sent fail without waiting."""
    gpu, _ = immortal
    copies = [asyncio.create_task(gpu.load(pieces_of())) for _ in range(process.CALLS_MAX)]
    await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        for call in [asyncio.create_task(gpu.drop(1)) for _ in range(2)]:
            with pytest.raises(TierFailed, match="does not end"):
                await call
    assert not any(copy.done() for copy in copies)
    os.kill(gpu.pid, signal.SIGKILL)
    await asyncio.gather(*copies, return_exceptions=True)
    await gpu.stop()


async def test_an_owner_that_ends_waits_no_longer(immortal: tuple[GpuProcess, Owner]) -> None:
    """After stop no call waits for the process; the owner's successor does."""
    gpu, _ = immortal
    copy = asyncio.create_task(gpu.load(pieces_of()))
    await asyncio.sleep(0)
    await gpu.stop()
    with pytest.raises(TierFailed, match="does not end"):
        await copy
    before = len(descriptors())
    os.kill(gpu.pid, signal.SIGKILL)
    while len(descriptors()) == before:  # noqa: ASYNC110  # its pidfd, which is let go when it has fired
        await asyncio.sleep(0.01)
