"""Slabs pass from a GPU process that has died to the next one: all of them, with what they hold, whoever dies on the way; and none that was given up meanwhile."""

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
"""Calls of the driver that a process makes before it has taken over what it is lent."""


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """GPU processes that are started here find the fake driver."""
    for name, value in fake_environment().items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
async def slabs() -> AsyncIterator[Slabs]:
    """All that there may be, each with bytes of its own, of which segment 7 has the first; their process has died."""
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
    """Not yet started."""
    return Owner().process(patience_s=PATIENCE_S)


def all_of(slabs: Slabs) -> list[Slab]:
    return [*slabs._used.values(), *slabs._spares]


def content(slab: Slab) -> bytes:
    return np.random.default_rng(slab.number).bytes(LENGTH)


async def sums_on(gpu: GpuProcess, slab: int) -> list[int]:
    """Of the first bytes of a slab. Raises InvalidArgument if the process does not know it."""
    piece = np.zeros(1, PIECE)
    piece["slab"], piece["length"], piece["layers"] = slab, LENGTH, 1
    return (await gpu.sums(piece))[0].tolist()


async def check_taken_over(slabs: Slabs) -> None:
    """By a process that lives: each slab is known to it, with its bytes."""
    gpu = new_process()
    await slabs.hand_over(gpu)
    assert len(all_of(slabs)) == PLACES
    for slab in all_of(slabs):
        assert await sums_on(gpu, slab.number) == slice_sums(memoryview(content(slab)), [LENGTH]).tolist()
    slabs.gpu = None
    await gpu.stop()


async def test_spare_slabs_are_taken_over_too(slabs: Slabs) -> None:
    """What no segment has yet is known to the next process as what has been written."""
    await check_taken_over(slabs)


@pytest.mark.parametrize("call", STEPS)
async def test_a_process_that_dies_as_it_takes_over_costs_nothing(
    slabs: Slabs, driver: pytest.MonkeyPatch, call: str
) -> None:
    """SIGKILL within a call of the driver, in the first slab or the last: its start fails, and the one after that has every slab."""
    for turn in (1,) if call == "cuInit" else (1, PLACES):
        driver.setenv("TIERD_FAKE_CUDA_STRIKE", f"{call}:{turn}:9")
        with pytest.raises(TierFailed, match="status -9"):
            await slabs.hand_over(new_process())
        assert slabs.gpu is None
    driver.delenv("TIERD_FAKE_CUDA_STRIKE")
    await check_taken_over(slabs)


async def test_what_is_given_up_meanwhile_is_forgotten(slabs: Slabs) -> None:
    """A segment's slab that goes while the next process is being started: that one lets go of the memory it was lent, and makes another."""
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
