"""The direct way from a store to a GPU's slabs: real files and GPU process, fake driver and cuFile."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.unit.gpu.processes import descriptors
from tests.unit.kernels.fake_driver import fake_environment
from tests.unit.tiers.device.test_cuda import DEVICE, PATIENCE_S, mapped, pages, pid_of, segment, until
from tests.unit.tiers.store_world import LENGTH as BLOCK
from tests.unit.tiers.store_world import World, content, metas_of
from tierd.core.plan import Plan
from tierd.errors import TierFailed
from tierd.gpu.process import GpuProcess
from tierd.tiers.device import cuda, direct
from tierd.tiers.device.cuda import CudaTier, GpuOptions
from tierd.tiers.store.slots import SlotFile

STORE = 2


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU processes started here load the fakes."""
    for name, value in (fake_environment() | {"TIERD_FAKE_CUFILE": "p2p"}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World.at(tmp_path / "store", direct="on")
    await made.open()
    for place in range(4):
        await made.begin(place + 1, place=place)
    yield made
    await made.store.close(release=False)


@pytest.fixture
async def device(directory: Path, world: World) -> AsyncIterator[CudaTier]:
    made = CudaTier(DEVICE, position=0, instance="t", arena_dir=str(directory), options=GpuOptions(0, PATIENCE_S))
    await made.open()
    await made.find_direct([world.store])
    given = [segment(1, tier=0)]
    made.apply(Plan(segments=given))
    await made.prepare(given)
    yield made
    await made.close(release=True)


async def come(device: CudaTier, world: World, keys: list[int]) -> list[bytes]:
    """Reads blocks to slots 0, 1, ... of the device and returns the bytes there."""
    extents = np.concatenate([world.held[key][0] for key in keys])
    there = pages(0, 1, *range(len(keys)))
    came = await device.read(there, metas_of(keys), source=world.store, sources=extents)
    assert came.faults == {} and all(len(table) for table in came.slices)
    with mapped(device, 1) as memory:
        return [memory[at : at + BLOCK] for at in there["offset"].tolist()]


def files_of(device: CudaTier) -> list[str]:
    """Descriptor numbers of the store's files that the GPU process has open."""
    return [number for number, name in descriptors(pid_of(device)).items() if ".slots" in name]


def flags_of(pid: int, number: str) -> int:
    """The open flags of a process's descriptor."""
    told = Path(f"/proc/{pid}/fdinfo/{number}").read_text()
    return int(told.split("flags:")[1].split()[0], 8)


async def test_blocks_come_from_several_files(device: CudaTier, world: World) -> None:
    """Blocks of any slots and files reach their pages. The GPU process opens each file once, read-only."""
    for place in range(4):
        await world.write([place, place + 10], segment=place + 1, slots=[place, 7])
    keys = [13, 0, 2, 10, 1, 3, 12, 11]
    for _ in range(2):
        assert await come(device, world, keys) == [content(key) for key in keys]
    assert device.direct_from == {STORE} and "nvme.0 read directly by PCI P2PDMA" in device.place
    files = files_of(device)
    flags = [flags_of(pid_of(device), number) for number in files]
    assert len(files) == 4 and {flag & os.O_ACCMODE for flag in flags} == {os.O_RDONLY}


async def test_slots_that_are_not_there_have_no_sums(device: CudaTier, world: World) -> None:
    """A row of an ended segment is named as a fault, and the other rows arrive."""
    await world.write([1, 2, 3], segment=1, slots=[0, 1, 2])
    extents = np.concatenate([world.held[key][0] for key in (1, 2, 3)])
    extents["segment"][1] = 77
    came = await device.read(pages(0, 1, 0, 1, 2), metas_of([1, 2, 3]), source=world.store, sources=extents)
    assert came.faults == {1: "its slot is missing"}
    assert [len(table) > 0 for table in came.slices] == [True, False, True]


async def test_few_files_stay_open(device: CudaTier, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the bound the GPU process closes the least recently used files, except a current read's."""
    monkeypatch.setattr(direct, "FILES_MAX", 2)
    for place in range(4):
        await world.write([place], segment=place + 1, slots=[0])
    for key in (0, 1, 2, 3, 1, 0):
        assert await come(device, world, [key]) == [content(key)]
        assert len(files_of(device)) <= 2
    assert await come(device, world, [3, 2, 1, 0]) == [content(key) for key in (3, 2, 1, 0)]
    assert len(files_of(device)) <= 2


async def test_a_file_that_gave_way_is_let_go(device: CudaTier, world: World) -> None:
    """Reads use a slot file's replacement, even under the same descriptor number; the old one is closed."""
    await world.write([1], segment=1, slots=[0])
    assert await come(device, world, [1]) == [content(1)]
    old = world.store._opened.files[0]
    data = bytearray(old.path.read_bytes())
    data[4096 : 4096 + BLOCK] = content(2)
    new = old.path.with_suffix(".tmp")
    new.write_bytes(data)
    fd = os.open(new, os.O_RDWR | os.O_DIRECT)
    os.dup2(fd, old.fd)
    os.close(fd)
    new.rename(old.path)
    world.store._opened.files[0] = SlotFile(old.path, old.fd)
    assert await come(device, world, [1]) == [content(2)]
    assert len(files_of(device)) == 1


async def test_a_way_goes_with_its_process_and_comes_with_the_next(device: CudaTier, world: World) -> None:
    """Without a GPU process direct reads fail; the next process is probed and opens the files anew."""
    await world.write([1], segment=1, slots=[0])
    assert await come(device, world, [1]) == [content(1)]
    os.kill(pid_of(device), signal.SIGKILL)
    await until(lambda: bool(device.health().fault))
    assert device.direct_from == frozenset()
    with pytest.raises(TierFailed, match="direct reads from nvme.0 have ended"):
        await come(device, world, [1])
    await device.probe()
    assert device.direct_from == {STORE} and not any("GPUDirect" in each for each in device.notices)
    assert await come(device, world, [1]) == [content(1)]


async def test_what_is_distrusted_is_left_until_the_next_process(device: CudaTier, world: World) -> None:
    """After a distrust no read is direct, and a notice gives the reason, until the next GPU process."""
    await world.write([1], segment=1, slots=[0])
    for _ in range(2):
        device.distrust(STORE, "for a reason")
    assert device.direct_from == frozenset()
    (notice,) = [each for each in device.notices if "GPUDirect Storage is not used (for a reason)" in each]
    with pytest.raises(TierFailed, match="direct reads from"):
        await come(device, world, [1])
    os.kill(pid_of(device), signal.SIGKILL)
    await until(lambda: bool(device.health().fault))
    await device.probe()
    assert device.direct_from == {STORE} and notice not in device.notices


async def test_a_refusal_ends_the_way(device: CudaTier, world: World) -> None:
    """A file that the GPU process cannot open ends the direct way, so no later block retries it."""
    await world.write([1], segment=1, slots=[0])
    file = world.store._opened.files[0]
    buffered = os.open(file.path.parent, os.O_RDONLY)
    world.store._opened.files[0] = SlotFile(file.path, buffered)  # a folder: no file to read
    with pytest.raises(TierFailed):
        await come(device, world, [1])
    world.store._opened.files[0] = file
    os.close(buffered)
    assert device.direct_from == frozenset() and any("GPUDirect Storage is not used" in each for each in device.notices)


async def test_the_setting_off_asks_nobody(directory: Path, world: World) -> None:
    """With direct_reads off there is no direct way, and a notice says so."""
    options = GpuOptions(0, PATIENCE_S, direct_reads="off")
    device = CudaTier(DEVICE, position=0, instance="t", arena_dir=str(directory), options=options)
    await device.open()
    await device.find_direct([world.store])
    assert device.direct_from == frozenset() and any('(direct_reads = "off")' in each for each in device.notices)
    await device.close(release=True)


async def test_a_question_that_hangs_is_asked_once(
    directory: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs in the probe is killed; the next one is not probed, and a notice says why."""
    orders = tmp_path / "orders"
    orders.write_text("hang")
    monkeypatch.setenv("TIERD_FAKE_CUFILE_ORDERS", str(orders))
    monkeypatch.setattr(cuda, "GpuProcess", partial(GpuProcess, start_patience_s=4.0))
    device = CudaTier(DEVICE, position=0, instance="t", arena_dir=str(directory), options=GpuOptions(0, PATIENCE_S))
    await device.open()
    await device.find_direct([world.store])
    await until(lambda: bool(device.health().fault))
    assert "probe was not answered within 4 s" in device.health().fault
    await device.probe()
    assert device.health().fault == "" and device.direct_from == frozenset()
    assert any("a GPU process hung during a direct read" in each for each in device.notices)
    await device.close(release=True)
