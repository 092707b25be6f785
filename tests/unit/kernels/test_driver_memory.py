"""Device memory on the fake driver, by NVIDIA's own bindings: grants, refusals and leaks."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import signal
import threading

import numpy as np

from tests.unit.kernels.fake_driver import (
    SLAB,
    access,
    counts,
    entered,
    mapped,
    ok,
    on_fake_driver,
    peek,
    poke,
    refused,
    shareable,
    unmapped,
)

READ_ONLY = 8
"""CU_MEMHOSTREGISTER_READ_ONLY"""


@on_fake_driver(TIERD_FAKE_CUDA_BYTES=str(4 * SLAB))
def test_memory_comes_in_slabs_up_to_what_the_device_has() -> None:
    """Sizes off the granularity, or beyond the device's memory until some is freed, are refused."""
    cuda = entered()
    prop = shareable(cuda)
    minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert ok(cuda.cuMemGetAllocationGranularity(prop, minimum)) == SLAB
    assert refused(cuda.cuMemCreate(SLAB + 4096, prop, 0)) == "INVALID_VALUE"
    first, second = ok(cuda.cuMemCreate(3 * SLAB, prop, 0)), ok(cuda.cuMemCreate(SLAB, prop, 0))
    assert refused(cuda.cuMemCreate(SLAB, prop, 0)) == "OUT_OF_MEMORY"
    assert refused(cuda.cuMemAlloc(1)) == "OUT_OF_MEMORY"
    assert ok(cuda.cuMemGetInfo()) == (0, 4 * SLAB)
    address = mapped(cuda, second)
    ok(cuda.cuMemRelease(second))
    assert refused(cuda.cuMemAlloc(1)) == "OUT_OF_MEMORY", "a mapping keeps the memory of a handle that was released"
    unmapped(cuda, address)
    ok(cuda.cuMemFree(ok(cuda.cuMemAlloc(SLAB))))
    ok(cuda.cuMemRelease(first))
    assert counts() == {}


@on_fake_driver()
def test_mappings_are_whole_and_single() -> None:
    """Mappings outside reserved space, taken, partial, at an offset or unaligned are refused; so are
    partial unmaps and frees."""
    cuda = entered()
    handle = ok(cuda.cuMemCreate(2 * SLAB, shareable(cuda), 0))
    space = int(ok(cuda.cuMemAddressReserve(4 * SLAB, 0, 0, 0)))
    for address, length, offset in (
        (space + 3 * SLAB, 2 * SLAB, 0),
        (space, SLAB, 0),
        (space, 2 * SLAB, SLAB),
        (space + 4096, 2 * SLAB, 0),
        (SLAB, 2 * SLAB, 0),
    ):
        assert refused(cuda.cuMemMap(address, length, offset, handle, 0)) == "INVALID_VALUE"
    rights = [access(cuda, rights="READ")]
    assert refused(cuda.cuMemSetAccess(space, 2 * SLAB, rights, 1)) == "INVALID_VALUE", "nothing is mapped there"
    ok(cuda.cuMemMap(space, 2 * SLAB, 0, handle, 0))
    assert refused(cuda.cuMemMap(space + SLAB, 2 * SLAB, 0, handle, 0)) == "INVALID_VALUE"
    assert refused(cuda.cuMemUnmap(space, SLAB)) == "INVALID_VALUE"
    assert refused(cuda.cuMemSetAccess(space, SLAB, rights, 1)) == "INVALID_VALUE"
    assert refused(cuda.cuMemAddressFree(space, 4 * SLAB)) == "INVALID_VALUE", "something is mapped there"
    ok(cuda.cuMemMap(space + 2 * SLAB, 2 * SLAB, 0, handle, 0))
    ok(cuda.cuMemSetAccess(space, 4 * SLAB, rights, 1))
    ok(cuda.cuMemUnmap(space, 4 * SLAB))
    assert refused(cuda.cuMemAddressFree(space, 2 * SLAB)) == "INVALID_VALUE"
    ok(cuda.cuMemAddressFree(space, 4 * SLAB))
    ok(cuda.cuMemRelease(handle))
    assert refused(cuda.cuMemRelease(handle)) == "INVALID_VALUE"
    assert counts() == {}


@on_fake_driver(dies_of=signal.SIGSEGV)
def test_a_new_mapping_has_no_rights() -> None:
    """Memory that was mapped but not opened by cuMemSetAccess cannot be read."""
    cuda = entered()
    address = int(ok(cuda.cuMemAddressReserve(SLAB, 0, 0, 0)))
    ok(cuda.cuMemMap(address, SLAB, 0, ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0)), 0))
    print("now", flush=True)
    peek(address, 1)


@on_fake_driver(dies_of=signal.SIGSEGV)
def test_the_host_reaches_no_mapping() -> None:
    """The driver copies to and from slabs; a host access to their address ends the process."""
    cuda = entered()
    address, out = mapped(cuda, ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0))), ctypes.create_string_buffer(2)
    ok(cuda.cuMemcpyHtoD(address, b"in", 2))
    ok(cuda.cuMemcpyDtoH(ctypes.addressof(out), address, 2))
    assert out.raw == b"in"
    print("now", flush=True)
    ctypes.string_at(address, 1)


@on_fake_driver(dies_of=signal.SIGSEGV)
def test_the_host_reaches_no_allocation() -> None:
    """The same for memory of cuMemAlloc."""
    cuda = entered()
    plain = int(ok(cuda.cuMemAlloc(64)))
    ok(cuda.cuMemsetD8Async(plain, 1, 64, 0))
    ok(cuda.cuCtxSynchronize())
    print("now", flush=True)
    ctypes.memset(plain, 2, 1)


@on_fake_driver()
def test_the_rights_of_a_mapping_are_told() -> None:
    """A mapping has no rights, then those of cuMemSetAccess; space without memory is refused."""
    cuda = entered()
    space, here = int(ok(cuda.cuMemAddressReserve(SLAB, 0, 0, 0))), access(cuda, rights="NONE").location
    assert refused(cuda.cuMemGetAccess(here, space)) == "INVALID_VALUE"
    ok(cuda.cuMemMap(space, SLAB, 0, ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0)), 0))
    assert ok(cuda.cuMemGetAccess(here, space)) == 0
    for rights in ("READ", "READWRITE", "NONE"):
        given = access(cuda, rights=rights)
        ok(cuda.cuMemSetAccess(space, SLAB, [given], 1))
        assert ok(cuda.cuMemGetAccess(here, space + SLAB - 1)) == int(given.flags)


@on_fake_driver(dies_of=signal.SIGSEGV)
def test_a_read_only_mapping_is_read_only() -> None:
    """A write through one mapping is visible in another of the same memory, which itself is read-only."""
    cuda = entered()
    handle = ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0))
    writable, readable = mapped(cuda, handle), mapped(cuda, handle, rights="READ")
    poke(writable, b"\x07" * 64)
    assert peek(readable, 3) == b"\x07\x07\x07"
    print("now", flush=True)
    poke(readable, b"\x01")


@on_fake_driver()
def test_a_write_where_it_may_not_be_loses_the_context() -> None:
    """A copy to a read-only mapping fails when it runs and loses the context; memory can still be freed."""
    cuda = entered()
    handle = ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0))
    address, plain, stream = mapped(cuda, handle, rights="READ"), ok(cuda.cuMemAlloc(64)), ok(cuda.cuStreamCreate(1))
    ok(cuda.cuMemcpyDtoDAsync(address, plain, 64, stream))
    assert refused(cuda.cuStreamSynchronize(stream)) == "ILLEGAL_ADDRESS"
    assert refused(cuda.cuMemcpyDtoDAsync(plain, address, 64, stream)) == "ILLEGAL_ADDRESS"
    assert refused(cuda.cuMemAlloc(1)) == "ILLEGAL_ADDRESS"
    unmapped(cuda, address)
    ok(cuda.cuMemRelease(handle))


@on_fake_driver()
def test_work_on_memory_that_was_unmapped_loses_the_context() -> None:
    """Unmapping does not wait for work: the caller must wait first."""
    cuda = entered()
    handle = ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0))
    address, stream = mapped(cuda, handle), ok(cuda.cuStreamCreate(1))
    ok(cuda.cuMemsetD8Async(address, 1, 64, stream))
    unmapped(cuda, address)
    assert refused(cuda.cuStreamSynchronize(stream)) == "ILLEGAL_ADDRESS"
    assert refused(cuda.cuMemsetD8Async(address, 1, 64, stream)) == "ILLEGAL_ADDRESS"


@on_fake_driver()
def test_leaks_are_counted() -> None:
    """Resources that are not freed are counted by kind and as descriptors; after all frees nothing is."""
    cuda = entered()
    before, descriptors = counts(), len(os.listdir("/proc/self/fd"))
    handle = ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0))
    address, plain = mapped(cuda, handle), ok(cuda.cuMemAlloc(4096))
    stream, event = ok(cuda.cuStreamCreate(0)), ok(cuda.cuEventCreate(0))
    pinned = ok(cuda.cuMemHostAlloc(4096, 0))
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    exported = ok(cuda.cuMemExportToShareableHandle(handle, kind, 0))
    assert counts() == dict.fromkeys(
        ("handles", "mappings", "reservations", "allocations", "pinned", "streams", "events"), 1
    ) | {"charged_bytes": SLAB + 4096}
    assert len(os.listdir("/proc/self/fd")) == descriptors + 2
    ok(cuda.cuMemRelease(handle))
    assert len(os.listdir("/proc/self/fd")) == descriptors + 2, "the mapping holds it"
    unmapped(cuda, address)
    os.close(exported)
    ok(cuda.cuMemFree(plain))
    ok(cuda.cuStreamDestroy(stream))
    ok(cuda.cuEventDestroy(event))
    ok(cuda.cuMemFreeHost(pinned))
    assert (counts(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)


@on_fake_driver()
def test_host_memory_is_registered_once_and_with_its_rights() -> None:
    """Double registration, unregistering unknown memory, and read-only pages without the flag are refused."""
    cuda = entered()
    room = mmap.mmap(-1, 2 * SLAB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    assert refused(cuda.cuMemHostUnregister(address)) == "HOST_MEMORY_NOT_REGISTERED"
    ok(cuda.cuMemHostRegister(address, SLAB, 0))
    assert refused(cuda.cuMemHostRegister(address + 4096, SLAB, 0)) == "HOST_MEMORY_ALREADY_REGISTERED"
    assert int(ok(cuda.cuMemHostGetDevicePointer(address, 0))) == address
    ok(cuda.cuMemHostUnregister(address))
    with open("/proc/self/exe", "rb") as file:
        read_only = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
    place = np.frombuffer(read_only, np.uint8).ctypes.data
    assert refused(cuda.cuMemHostRegister(place, 4096, 0)) == "INVALID_VALUE"
    supported = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    assert ok(cuda.cuDeviceGetAttribute(supported, 0)) == 1
    ok(cuda.cuMemHostRegister(place, 4096, READ_ONLY))
    ok(cuda.cuMemHostRegister(address, SLAB, READ_ONLY))
    plain, stream = ok(cuda.cuMemAlloc(64)), ok(cuda.cuStreamCreate(1))
    for source in (place, address):
        ok(cuda.cuMemcpyAsync(plain, source, 64, stream))
        ok(cuda.cuStreamSynchronize(stream))
    ok(cuda.cuMemcpyAsync(address, plain, 64, stream))
    assert refused(cuda.cuStreamSynchronize(stream)) == "ILLEGAL_ADDRESS"


@on_fake_driver(TIERD_FAKE_CUDA_READ_ONLY_REGISTER="0")
def test_a_device_may_refuse_read_only_registration() -> None:
    """On a device without the attribute, read-only registration is not supported."""
    cuda = entered()
    supported = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    assert ok(cuda.cuDeviceGetAttribute(supported, 0)) == 0
    room = ctypes.create_string_buffer(4096)
    assert refused(cuda.cuMemHostRegister(ctypes.addressof(room), 4096, READ_ONLY)) == "NOT_SUPPORTED"


@on_fake_driver()
def test_calls_need_the_driver_begun_and_a_context() -> None:
    """Calls before cuInit, without a context, with a destroyed one, or in a forked child are refused."""
    cuda = importlib.import_module("cuda.bindings.driver")
    assert refused(cuda.cuDeviceGetCount()) == "NOT_INITIALIZED"
    ok(cuda.cuInit(0))
    assert refused(cuda.cuMemAlloc(1)) == "INVALID_CONTEXT"
    ok(cuda.cuMemRelease(ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0))))
    ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(0))))
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(refused(cuda.cuMemAlloc(1))))
    thread.start()
    thread.join(10)
    assert found == ["INVALID_CONTEXT"]
    pid = os.fork()
    if pid == 0:
        os._exit(refused(cuda.cuDeviceGetCount()) != "NOT_INITIALIZED")
    assert os.waitpid(pid, 0)[1] == 0
    ok(cuda.cuDevicePrimaryCtxRelease(0))
    assert refused(cuda.cuMemAlloc(1)) == "CONTEXT_IS_DESTROYED"


@on_fake_driver(TIERD_FAKE_CUDA_DEVICES="0")
def test_there_may_be_no_device() -> None:
    """On a machine without a GPU cuInit gives NO_DEVICE."""
    assert refused(importlib.import_module("cuda.bindings.driver").cuInit(0)) == "NO_DEVICE"
