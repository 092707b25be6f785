"""Slabs pass with their bytes from a dead GPU process to the next, even if another one dies
meanwhile. A slab discarded meanwhile does not pass."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from tests.unit.gpu.processes import PATIENCE_S, Owner, descriptors
from tests.unit.kernels.fake_driver import SLAB, fake_environment
from tierd.checksum import slice_sums
from tierd.errors import InvalidArgument, TierFailed
from tierd.gpu.process import GpuProcess
from tierd.gpu.protocol import PIECE
from tierd.tiers.device.slabs import Slab, Slabs

LENGTH, PLACES = 4096, 3
STEPS = (
    "cuInit",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
)
"""Driver calls that a process makes before it has adopted the slabs lent to it."""


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """GPU processes started here load the fake driver."""
    for name, value in fake_environment().items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
async def slabs() -> AsyncIterator[Slabs]:
    """All slabs, each with its own bytes, the first used by segment 7; their process has died."""
    before = descriptors()
    made = Slabs(name="device.0", segment_bytes=SLAB, places=PLACES)
    first = new_process()
    await made.hand_over(first)
    await made.fill()
    assert made.find_ready(7)
    for slab in all_of(made):
        os.pwrite(slab.fd, content(slab), 0)
    made.gpu = None
    await first.stop()
    yield made
    await made.close()
    assert descriptors().keys() == before.keys()


def new_process() -> GpuProcess:
    """A process that has not started."""
    return Owner().process(patience_s=PATIENCE_S)


def all_of(slabs: Slabs) -> list[Slab]:
    return [*slabs._used.values(), *slabs._spares]


def content(slab: Slab) -> bytes:
    return np.random.default_rng(slab.number).bytes(LENGTH)


async def sums_on(gpu: GpuProcess, slab: int) -> list[int]:
    """Sums of the first bytes of a slab. Raises InvalidArgument if the process does not know it."""
    piece = np.zeros(1, PIECE)
    piece["slab"], piece["length"], piece["layers"] = slab, LENGTH, 1
    return (await gpu.sums(piece))[0].tolist()


async def check_taken_over(slabs: Slabs) -> None:
    """A live process adopts each slab with its bytes."""
    gpu = new_process()
    await slabs.hand_over(gpu)
    assert len(all_of(slabs)) == PLACES
    for slab in all_of(slabs):
        assert await sums_on(gpu, slab.number) == slice_sums(memoryview(content(slab)), [LENGTH]).tolist()
    slabs.gpu = None
    await gpu.stop()


async def test_spare_slabs_are_taken_over_too(slabs: Slabs) -> None:
    """The next process adopts spare slabs as well as used ones."""
    await check_taken_over(slabs)


@pytest.mark.parametrize("call", STEPS)
async def test_a_process_that_dies_as_it_takes_over_costs_nothing(
    slabs: Slabs, driver: pytest.MonkeyPatch, call: str
) -> None:
    """SIGKILL in a driver call for the first or last slab fails the start; the next one adopts every slab."""
    for turn in (1,) if call == "cuInit" else (1, PLACES):
        driver.setenv("TIERD_FAKE_CUDA_STRIKE", f"{call}:{turn}:9")
        with pytest.raises(TierFailed, match="status -9"):
            await slabs.hand_over(new_process())
        assert slabs.gpu is None
    driver.delenv("TIERD_FAKE_CUDA_STRIKE")
    await check_taken_over(slabs)


async def test_what_is_given_up_meanwhile_is_forgotten(slabs: Slabs) -> None:
    """A slab discarded while the next process starts is dropped by that process, which makes another."""
    gone, gpu = slabs._used[7].number, new_process()
    starting = asyncio.create_task(slabs.hand_over(gpu))
    await until(lambda: gpu._reason == "")
    slabs.discard(7)
    await starting
    await slabs.fill()
    with pytest.raises(InvalidArgument, match=f"slab {gone}: not there"):
        await sums_on(gpu, gone)
    assert len(all_of(slabs)) == PLACES
    slabs.gpu = None
    await gpu.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)
