"""GPU pages in one address range: contents, write protection and cleanup.

The fake driver keeps CUDA's rules. It maps handles whole, in multiples of the granularity, and
refuses writes to memory mapped for reading.
"""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import numpy as np
import pytest

from tests.unit.gpu.processes import SLAB
from tests.unit.kernels.fake_driver import counts, entered, on_fake_driver, peek, poke
from tierd.client.session import device
from tierd.client.session.device import DevicePage, Gpu, GpuPlace
from tierd.client.session.ranges import contiguous
from tierd.errors import DeadlineExceeded, InvalidArgument, Overloaded, TierFailed
from tierd.gpu.child import Engine
from tierd.kernels import params
from tierd.kernels.loaded import Loaded
from tools.fake_cuda import build_fatbins


class Pin:
    """An object that keeps pages pinned."""


class Slabs:
    """Slabs with random bytes, made as a daemon makes them and mapped here as a worker maps them."""

    def __init__(self, lengths: list[int], *, is_writable: bool = False) -> None:
        self.engine, self.gpu = Engine(0), Gpu(GpuPlace("", 0))
        rng = np.random.default_rng(len(lengths))
        self.bytes, self.memories = [rng.bytes(length) for length in lengths], list[Any]()
        for i, data in enumerate(self.bytes):
            fd = self.engine.slabs.make(i, len(data))
            os.pwrite(fd, data, 0)
            self.memories.append(self.gpu.map(fd, len(data), is_writable=is_writable))
            os.close(fd)

    def page(self, slab: int, *, start: int = 0, length: int | None = None, pin: object = None) -> DevicePage:
        """A page of a slab, by default all of it."""
        memory = self.memories[slab]
        nbytes = memory.length_bytes - start if length is None else length
        return DevicePage(memory, memory.address + start, nbytes, pin=pin, writable=False)

    def close(self) -> None:
        """Closes all, and checks that no resource is held here or in the daemon."""
        self.memories.clear()
        gc.collect()
        self.gpu.unmap_ended()
        self.engine.close()
        entered().cuDevicePrimaryCtxRelease(0)
        assert counts() == {}


def seen(page: DevicePage) -> bytes:
    """The bytes that a kernel reads there."""
    return peek(page.address, page.nbytes)


@on_fake_driver()
def test_pages_follow_each_other() -> None:
    """Slabs of any length, order and repetition, with a short last one, appear in sequence and unchanged."""
    slabs = Slabs([SLAB, 2 * SLAB, SLAB, SLAB])
    for order in ((0,), (1, 0), (3, 1, 0, 1, 2)):
        row = contiguous([*(slabs.page(i) for i in order), slabs.page(2, length=5000)])
        assert seen(row) == b"".join(slabs.bytes[i] for i in order) + slabs.bytes[2][:5000]
        assert row.shape == (len(seen(row)),) and seen(row[SLAB - 8 : SLAB + 8]) == seen(row)[SLAB - 8 : SLAB + 8]
        assert row.__cuda_array_interface__["data"] == (row.address, True)
    assert [seen(slabs.page(i)) for i in range(4)] == slabs.bytes
    out = np.empty(row.nbytes, np.uint8)
    row.copy_to(out)
    assert out.tobytes() == seen(row)
    del row
    slabs.close()


@on_fake_driver()
def test_what_is_written_to_a_page_is_seen_in_the_row() -> None:
    """The range is the same memory as the pages, not a copy."""
    slabs = Slabs([SLAB, SLAB], is_writable=True)
    row = contiguous([slabs.page(1), slabs.page(0)])
    poke(slabs.memories[0].address + 77, b"\x5a" * 3)
    assert seen(row)[SLAB + 77 : SLAB + 80] == b"\x5a" * 3
    del row
    slabs.close()


@on_fake_driver(dies_of=signal.SIGSEGV)
def test_nobody_writes_by_a_row() -> None:
    """A write through a range fails, even if this process may write to the pages themselves."""
    slabs = Slabs([SLAB, SLAB], is_writable=True)
    row = contiguous([slabs.page(0), slabs.page(1)])
    poke(slabs.memories[1].address, b"\x01")
    print("now", flush=True)
    poke(row.address + SLAB, b"\x01")


@on_fake_driver()
def test_a_row_keeps_its_pages_pinned_and_mapped() -> None:
    """A range or a part of it keeps pages pinned; its addresses are unmapped when the next range is made."""
    slabs = Slabs([SLAB, SLAB])
    before, pins = counts(), [Pin(), Pin()]
    watched = [weakref.ref(pin) for pin in pins]
    row = contiguous([slabs.page(i, pin=pin) for i, pin in enumerate(pins)])
    pins.clear()
    part = row[SLAB + 5 : SLAB + 10]
    del row
    gc.collect()
    assert [ref() is not None for ref in watched] == [True, True]
    assert seen(part) == slabs.bytes[1][5:10]
    del part
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert counts()["mappings"] == before["mappings"] + 2
    row = contiguous([slabs.page(0)])
    assert counts()["mappings"] == before["mappings"] + 1 and counts()["reservations"] == before["reservations"] + 1
    assert counts().get("handles", 0) == before.get("handles", 0)
    del row
    slabs.close()


@on_fake_driver()
def test_what_ends_while_the_gpu_is_asked_is_unmapped_by_the_next() -> None:
    """A mapping dropped after the event was recorded stays until the next event, as a launch may use it."""
    slabs = Slabs([SLAB, SLAB])
    before = counts()["mappings"]
    ask = slabs.gpu.ask

    def asked(name: str, *given: Any) -> Any:
        answer = ask(name, *given)
        if name == "cuCtxRecordEvent":
            slabs.memories.clear()  # the other thread, as soon as the event is recorded
        return answer

    slabs.gpu.ask = asked
    slabs.memories.pop()
    slabs.gpu.unmap_ended()
    assert counts()["mappings"] == before - 1
    slabs.gpu.unmap_ended()
    assert counts()["mappings"] == before - 2
    slabs.close()


@on_fake_driver()
def test_a_kernel_that_hangs_costs_no_call_more_than_its_bound() -> None:
    """While a kernel hangs, segments map at once, ended ones stay mapped and copies time out by name."""
    slabs = Slabs([SLAB, SLAB])
    cuda, kernels = slabs.gpu.cuda, Loaded(build_fatbins())
    fd = slabs.engine.slabs.make(9, SLAB)
    before = counts()["mappings"]
    place = int(slabs.gpu.ask("cuMemAlloc", 4096))
    stream = slabs.gpu.ask("cuStreamCreate", 1)
    own = Loaded(build_fatbins(), stream=lambda: int(stream))
    told = params.Merge(place, place + 1024, place + 2048, place + 3072, 1, 1, 8)
    os.environ["TIERD_FAKE_CUDA_HANGS"] = "1"
    own.launch("merge_f32", (1, 1, 1), told)
    slabs.memories.pop()
    for _ in range(3):
        slabs.memories.append(slabs.gpu.map(fd, SLAB, is_writable=True))
    os.close(fd)
    assert counts()["mappings"] == before + 3
    page = slabs.page(2)
    page.copy_to(np.empty(SLAB, np.uint8))  # its stream does not hang
    kernels.launch("merge_f32", (1, 1, 1), told)
    device.COPY_TIMEOUT_S = 0.1
    page.is_writable = True
    for copy in (page.copy_to, page.copy_from):
        with pytest.raises(
            DeadlineExceeded, match=r"cuda:0: work .* is not done after 0\.1 s; end the kernel that hangs"
        ):
            copy(np.empty(SLAB, np.uint8))
    del os.environ["TIERD_FAKE_CUDA_HANGS"], page, copy
    while counts()["mappings"] > before + 2:
        slabs.gpu.unmap_ended()
    assert not cuda.cuMemFree(place)[0] and not cuda.cuStreamDestroy(stream)[0]
    kernels.close(), own.close()
    slabs.close()


@on_fake_driver()
def test_pages_that_cannot_follow_each_other_are_refused() -> None:
    """Unfit pages are refused with their bytes, the granularity and the remedy, and nothing stays mapped."""
    slabs = Slabs([2 * SLAB, SLAB, SLAB])
    before, whole = counts(), slabs.page(1)
    half = f"{SLAB} bytes at {{}} of a slab of {2 * SLAB}; .* granularity is {SLAB}: set the device tier's segment to {SLAB} bytes"
    for pages, said in (
        ([slabs.page(0, start=SLAB), whole], r"pages\[0\]: " + half.format(SLAB)),
        (
            [whole, slabs.page(0, start=4096, length=100)],
            r"pages\[1\]: 100 bytes at 4096 .*: omit it, and read it in place",
        ),
        ([slabs.page(0, length=SLAB), whole], r"pages\[0\]: " + half.format(0)),
        ([whole, slabs.page(2, length=SLAB - 4096), whole], r"pages\[1\]: .* choose tokens_per_block so that"),
        ([slabs.page(1, start=4096, length=100)], r"pages\[0\]: 100 bytes at 4096 .* choose tokens_per_block"),
        ([], "there are none"),
        ([whole, np.zeros(SLAB, np.uint8)], r'pages\[1\]: ndarray is not on a GPU; acquire pages with tier="device"'),
    ):
        with pytest.raises(InvalidArgument, match=said):
            contiguous(pages)
    row = contiguous([whole, slabs.page(2)])
    with pytest.raises(InvalidArgument, match="cuMemMap"):
        contiguous([row, whole])
    del row
    slabs.gpu.unmap_ended()
    assert counts() == before
    del pages, whole
    slabs.close()


@on_fake_driver()
def test_a_driver_that_refuses_leaves_nothing() -> None:
    """If any call fails, first or later, the driver's error is raised and addresses and handles are freed."""
    slabs = Slabs([SLAB, SLAB, SLAB])
    pages = [slabs.page(i) for i in range(3)]
    before = counts()
    struck = 0
    for call in ("cuMemAddressReserve", "cuMemRetainAllocationHandle", "cuMemMap", "cuMemSetAccess"):
        for error, kind in (("e2", Overloaded), ("e999", TierFailed)):
            os.environ["TIERD_FAKE_CUDA_STRIKE"] = f"{call}:0:{error}"
            with pytest.raises(kind, match=call):
                contiguous(pages)
            assert counts() == before, call
            struck += 1
    for call in ("cuMemRetainAllocationHandle", "cuMemMap"):
        struck += 3  # the driver counts all calls that it struck: the first and the second succeed
        os.environ["TIERD_FAKE_CUDA_STRIKE"] = f"{call}:{struck}:e2"
        with pytest.raises(Overloaded, match=call):
            contiguous(pages)
        assert counts() == before, call
    del os.environ["TIERD_FAKE_CUDA_STRIKE"]
    row = contiguous(pages)
    assert seen(row) == b"".join(slabs.bytes)
    del row, pages
    slabs.close()
