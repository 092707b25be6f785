"""The device tier over a real GPU process on the fake driver: slab contents, reuse and lifetimes."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import structlog

from tests.still import stand_still
from tests.unit.kernels.fake_driver import SLAB, fake_environment
from tierd.checksum import slice_sums
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import EXTENT, SegmentAssignment, StructArray, TierKind, TierSpec
from tierd.core.plan import Plan
from tierd.errors import ConfigError, TierFailed, Unsupported
from tierd.gpu.process import GpuProcess
from tierd.tiers.arena.arena import Arena
from tierd.tiers.device.cuda import CudaTier, GpuOptions
from tierd.tiers.device.slabs import Slabs

CLASS_BYTES = 256 << 10
LENGTH = 200_000
DEVICE = TierSpec(TierKind.DEVICE, 0, 3 * SLAB, SLAB, writer_owned=True)
HOST = TierSpec(TierKind.HOST, 0, 2 * SLAB, SLAB, writer_owned=True)
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU processes started here load the fake driver."""
    for name, value in fake_environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def tiers(directory: Path) -> AsyncIterator[tuple[CudaTier, Arena]]:
    """A device tier with segment 1 begun, and a host tier with segment 2."""
    device = CudaTier(DEVICE, position=0, instance="t", arena_dir=str(directory), options=GpuOptions(0, PATIENCE_S))
    host = Arena(HOST, position=1, instance="t", arena_dir=str(directory))
    await device.open()
    await host.open()
    plan = Plan(segments=[segment(1, tier=0), segment(2, tier=1)])
    for tier in (device, host):
        tier.apply(plan)
        await tier.prepare(plan.segments)
    yield device, host
    await device.close(release=True)
    await host.close(release=True)


def segment(number: int, *, tier: int, place: int = 0, **changes: object) -> SegmentAssignment:
    given = SegmentAssignment(tier, place, number, 1, CLASS_BYTES, SLAB // CLASS_BYTES, 7, None, False)
    return replace(given, **changes)  # type: ignore[arg-type]


def pages(tier: int, number: int, *slots: int, generation: int = 1) -> StructArray:
    rows = np.zeros(len(slots), dtype=EXTENT)
    rows["tier"], rows["segment"], rows["slot"], rows["length"] = tier, number, slots, LENGTH
    rows["offset"] = np.array(slots, dtype=np.uint64) * CLASS_BYTES
    rows["generation"] = np.arange(len(slots)) + generation
    return rows


def metas_of(rows: StructArray) -> StructArray:
    metas = new_meta(len(rows))
    metas["stored_length"] = metas["logical_length"] = rows["length"]
    metas["layers"] = 2
    return metas


def mapped(device: CudaTier, number: int) -> mmap.mmap:
    """A segment's device memory, which on the fake driver any process can map as a file."""
    fd, length = device.descriptor(number, writable=True)
    try:
        return mmap.mmap(fd, length)
    finally:
        os.close(fd)


def contents(count: int) -> list[bytes]:
    return [np.random.default_rng(i).bytes(LENGTH) for i in range(count)]


def expected(blocks: list[bytes]) -> list[list[int]]:
    return [slice_sums(memoryview(b), [LENGTH // 2, LENGTH // 2]).tolist() for b in blocks]


def pid_of(device: CudaTier) -> int:
    assert device._gpu is not None
    return device._gpu.pid


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_bytes_go_to_the_device_and_back(tiers: tuple[CudaTier, Arena]) -> None:
    """Loaded bytes and sums equal the host's, and bytes stored to other pages are the same to the bit."""
    device, host = tiers
    here, there, back = pages(1, 2, 0, 1, 2), pages(0, 1, 5, 0, 3), pages(1, 2, 4, 5, 6)
    blocks = contents(3)
    for row, block in zip(here, blocks, strict=True):
        host.view(row)[:LENGTH] = block
    metas = metas_of(there)
    loaded = await device.load(there, metas, source=host, sources=here)
    assert [table.tolist() for table in loaded] == expected(blocks)
    with mapped(device, 1) as memory:
        assert [memory[o : o + LENGTH] for o in there["offset"].tolist()] == blocks
    await device.store(there, metas, target=host, targets=back)
    assert [bytes(host.view(row)[:LENGTH]) for row in back] == blocks
    assert [table.tolist() for table in await device.sums(there, metas)] == expected(blocks)


async def test_sums_are_of_what_lies_there_now(tiers: tuple[CudaTier, Arena]) -> None:
    """A client's byte in a page changes the sum of its slice and of no other."""
    device, _ = tiers
    there = pages(0, 1, 0, 1)
    before = [table.tolist() for table in await device.sums(there, metas_of(there))]
    with mapped(device, 1) as memory:
        memory[CLASS_BYTES + 3] = 1
    after = [table.tolist() for table in await device.sums(there, metas_of(there))]
    assert after[0] == before[0] and after[1][1] == before[1][1] and after[1][0] != before[1][0]


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_fresh_segment_has_a_slab_of_zeros(tiers: tuple[CudaTier, Arena], fresh: bool) -> None:
    """A fresh segment is zero, and the old mapping cannot reach it; otherwise the slab is reused."""
    device, _ = tiers
    with mapped(device, 1) as old:
        old[:5] = b"theirs"[:5]
        successor = segment(9, tier=0, domain=2, replaces=1, fresh=fresh)
        device.apply(Plan(segments=[successor]))
        await device.prepare([successor])
        with mapped(device, 9) as new:
            assert (not any(new[:])) if fresh else new[:5] == b"their"
            old[10:12] = b"xx"
            assert (new[10:12] == b"xx") is not fresh
    with pytest.raises(KeyError):
        device.descriptor(1, writable=False)


async def test_blocks_outlive_the_gpu_process(tiers: tuple[CudaTier, Arena]) -> None:
    """After SIGKILL of the GPU process calls fail, descriptors work, and the next one has the bytes."""
    device, host = tiers
    there, here = pages(0, 1, 0), pages(1, 2, 0)
    host.view(here[0])[:LENGTH] = contents(1)[0]
    await device.load(there, metas_of(there), source=host, sources=here)
    first = pid_of(device)
    os.kill(first, signal.SIGKILL)
    await until(lambda: bool(device.health().fault))
    assert "status -9" in device.health().fault
    with pytest.raises(TierFailed, match="status -9"):
        await device.sums(there, metas_of(there))
    with mapped(device, 1) as memory:
        assert memory[:LENGTH] == contents(1)[0]
    await device.probe()
    assert device.health().fault == "" and pid_of(device) != first
    assert [table.tolist() for table in await device.sums(there, metas_of(there))] == expected(contents(1))
    back = pages(1, 2, 7)
    await device.store(there, metas_of(there), target=host, targets=back)
    assert bytes(host.view(back[0])[:LENGTH]) == contents(1)[0], "host memory is attached to the new process too"


async def test_whoever_watches_hears_of_a_death(tiers: tuple[CudaTier, Arena]) -> None:
    """An idle GPU process that dies is reported at once, as a fault."""
    device, stirred = tiers[0], asyncio.Event()
    device.heed(stirred.set)
    os.kill(pid_of(device), signal.SIGKILL)
    await until(stirred.is_set)
    assert "status -9" in device.health().fault


async def test_a_process_without_descriptors_loses_none_to_a_probe(tiers: tuple[CudaTier, Arena]) -> None:
    """With room for one descriptor, every start of a GPU process raises TierFailed and leaks none.
    With more room the tier recovers."""
    device, _ = tiers
    os.kill(pid_of(device), signal.SIGKILL)
    await until(lambda: bool(device.health().fault))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken, some = [], os.dup(0)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(some))
        os.close(taken.pop())
        for _ in range(2):
            with pytest.raises(TierFailed, match="Too many open files"):
                await device.probe()
        os.close(os.dup(some))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in (some, *taken):
            os.close(fd)
    await device.probe()
    assert device.health().fault == ""


async def test_a_host_segment_may_end_with_the_gpu_process(tiers: tuple[CudaTier, Arena]) -> None:
    """A plan may end a host segment as the owner learns of the death: no detach remains, and no error."""
    device, host = tiers
    there, here = pages(0, 1, 0), pages(1, 2, 0)
    await device.load(there, metas_of(there), source=host, sources=here)
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    gpu = device._gpu
    assert gpu is not None
    device.apply(Plan(segments=[segment(5, tier=1, replaces=2, fresh=True)]))
    device._died(gpu, "killed")
    await gpu.stop()
    await asyncio.sleep(0)
    gc.collect()
    assert wrong == []


async def test_ended_host_segments_are_detached(tiers: tuple[CudaTier, Arena]) -> None:
    """The GPU process unmaps a host segment that has ended."""
    device, host = tiers
    there, here = pages(0, 1, 0), pages(1, 2, 0)
    await device.load(there, metas_of(there), source=host, sources=here)
    child = psutil.Process(pid_of(device))
    assert any(m.path.endswith("/2.data") for m in child.memory_maps())
    plan = Plan(segments=[segment(5, tier=1, replaces=2, fresh=True)])
    for tier in (device, host):
        tier.apply(plan)
    await until(lambda: not any(".data" in m.path for m in child.memory_maps()))


async def test_a_plan_may_take_every_slab_and_none_is_left_open(directory: Path) -> None:
    """Each place has a slab; after the end no descriptor leaks, and the GPU process is gone."""
    before = psutil.Process().num_fds()
    device = CudaTier(DEVICE, position=0, instance="t", arena_dir=str(directory), options=GpuOptions(0, PATIENCE_S))
    await device.open()
    given = [segment(n + 1, tier=0, place=n) for n in range(3)]
    device.apply(Plan(segments=given))
    await device.prepare(given)
    for fresh in range(4):
        given = [
            segment(n + 11 + 3 * fresh, tier=0, place=n, replaces=a.segment, fresh=True) for n, a in enumerate(given)
        ]
        device.apply(Plan(segments=given))
        await device.prepare(given)
    pid = pid_of(device)
    await device.close(release=False)
    assert psutil.Process().num_fds() == before and not psutil.pid_exists(pid)


async def test_a_restart_drops_what_was_in_device_memory(directory: Path) -> None:
    """A restart has no device blocks and logs that once. It reuses no number, and knows the namespaces."""
    device = CudaTier(DEVICE, position=0, instance="t", arena_dir=str(directory), options=GpuOptions(0, PATIENCE_S))
    await device.open()
    device.apply(Plan(segments=[segment(4, tier=0)], reserved=pages(0, 4, 0, generation=33)))
    await device.keep_namespace(b"name")
    await device.close(release=False)
    again = CudaTier(DEVICE, position=0, instance="t", arena_dir=str(directory), options=GpuOptions(0, PATIENCE_S))
    with structlog.testing.capture_logs() as lines:
        found = await again.open()
    assert found.segments == [] and not len(found.extents)
    assert (found.next_segment, found.next_generation, found.namespaces) == (5, 34, [b"name"])
    said = [line for line in lines if line["event"] == "device memory does not outlive the daemon"]
    assert [line["segments_dropped"] for line in said] == [1]
    assert not await asyncio.to_thread(lambda: list(again.tables.glob("*.cat")))
    await again.close(release=True)
    assert not await asyncio.to_thread(lambda: [path for path in directory.rglob("*") if path.is_file()])


async def test_a_full_gpu_is_said_and_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for three of four slabs, the notice counts the missing one and a take is refused. A
    discarded slab is replaced at once."""
    monkeypatch.setenv("TIERD_FAKE_CUDA_BYTES", str(3 * SLAB))
    slabs = Slabs(name="device.0", segment_bytes=SLAB, places=4)
    gpu = GpuProcess(0, patience_s=PATIENCE_S, on_death=lambda _: None)
    await slabs.hand_over(gpu)
    await slabs.fill()
    assert slabs.shortage.startswith(f"1 of its slabs of {SLAB} bytes have no room")
    assert all(slabs.find_ready(number) for number in (1, 2, 3)) and slabs.find_ready(4) is None
    with pytest.raises(TierFailed, match="no room on the GPU"):
        await asyncio.to_thread(slabs.take, 4)
    slabs.discard(2)
    assert (await asyncio.to_thread(slabs.take, 4)).number > 4
    await slabs.close()
    await gpu.stop()


async def test_who_waits_for_a_slab_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no slab comes, a take times out before the patience with the GPU process ends. A retry
    gets the slab made meanwhile."""
    slabs = Slabs(name="device.0", segment_bytes=SLAB, places=2)
    gpu = GpuProcess(0, patience_s=10 * PATIENCE_S, on_death=lambda _: None)
    await slabs.hand_over(gpu)
    stand_still(gpu.pid)
    with monkeypatch.context() as patch:
        patch.setattr("tierd.tiers.device.slabs.TAKE_S", 0.2)
        taking = asyncio.create_task(asyncio.to_thread(slabs.take, 4))
        done, _ = await asyncio.wait([taking], timeout=PATIENCE_S)
    os.kill(gpu.pid, signal.SIGCONT)
    assert done
    with pytest.raises(TierFailed, match=r"device\.0: the GPU made no slab within 0\.2 s"):
        await taking
    numbers = {(await asyncio.to_thread(slabs.take, segment)).number for segment in (4, 5, 4)}
    assert len(numbers) == 2
    with pytest.raises(TierFailed, match="every slab is in use"):
        await asyncio.to_thread(slabs.take, 6)
    await slabs.close()
    await gpu.stop()


async def test_a_tier_above_the_gpus_memory_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that can never fit is refused without a wait."""
    monkeypatch.setenv("TIERD_FAKE_CUDA_BYTES", str(2 * SLAB))
    with pytest.raises(ConfigError, match="above the"):
        await CudaTier(DEVICE, position=0, instance="t", arena_dir=str(directory)).open()


@pytest.mark.parametrize(
    ("ordinal", "spec", "error", "words"),
    [
        (7, DEVICE, Unsupported, "no GPU of this number"),
        (0, replace(DEVICE, segment_bytes=1 << 20), ConfigError, "granularity"),
    ],
)
async def test_what_cannot_be_is_refused_at_start(
    directory: Path, ordinal: int, spec: TierSpec, error: type[Exception], words: str
) -> None:
    """A missing GPU or an impossible segment size is refused with the remedy, and no process stays."""
    device = CudaTier(spec, position=0, instance="t", arena_dir=str(directory), options=GpuOptions(ordinal, PATIENCE_S))
    before = set(psutil.Process().children())
    with pytest.raises(error, match=words):
        await device.open()
    assert set(psutil.Process().children()) <= before
