"""Launches on the fake driver, by NVIDIA's own bindings: the driver's own refusals."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from tests.unit.kernels.fake_driver import counts, entered, ok, on_fake_driver, refused
from tierd.kernels import params
from tools.fake_cuda import MAGIC, build_fatbins

KERNEL = b"merge_f32"
THREADS = 128


def library(cuda: Any, image: bytes) -> tuple[Any, ...]:
    """The answer of loading it."""
    answer: tuple[Any, ...] = cuda.cuLibraryLoadData(image, [], [], 0, [], [], 0)
    return answer


@on_fake_driver()
def test_launches_are_checked() -> None:
    """The driver refuses a launch with wrong blocks, threads, shared memory or parameters."""
    cuda = entered()
    merge = ok(library(cuda, (build_fatbins() / "merge.fatbin").read_bytes()))
    function = ok(cuda.cuKernelGetFunction(ok(cuda.cuLibraryGetKernel(merge, KERNEL))))
    told = params.Merge(0, 0, 0, 0, 1, 0, 0)

    def launched(*, blocks: int = 1, threads: int = THREADS, shared_bytes: int = 0, extra: int = 0) -> str:
        given = 0 if extra else ((told,), (None,))
        return refused(cuda.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, 0, given, extra))

    assert launched(blocks=0) == launched(threads=2 * THREADS) == launched(shared_bytes=49_153) == "INVALID_VALUE"
    for length, answer in ((ctypes.sizeof(told) - 8, "INVALID_VALUE"), (ctypes.sizeof(told), "CUDA_SUCCESS")):
        size = ctypes.c_size_t(length)
        packed = (ctypes.c_void_p * 5)(1, ctypes.addressof(told), 2, ctypes.addressof(size), 0)
        assert launched(extra=ctypes.addressof(packed)) == answer
    limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert refused(cuda.cuFuncSetAttribute(function, limit, 232_449)) == "INVALID_VALUE"
    ok(cuda.cuFuncSetAttribute(function, limit, 50_000))
    assert launched(shared_bytes=50_001) == "INVALID_VALUE"
    assert launched(shared_bytes=50_000) == "CUDA_SUCCESS"
    assert counts()["pending"] == 2


@on_fake_driver()
def test_images_are_checked() -> None:
    """A file that is not a fatbin, a fatbin without this device, and a missing kernel each have an error."""
    cuda = entered()
    assert refused(library(cuda, b"\x7fELF" + bytes(60))) == "INVALID_IMAGE"
    assert refused(library(cuda, struct.pack("<IHHQ", MAGIC, 1, 16, 8) + bytes(8))) == "NO_BINARY_FOR_GPU"
    merge = ok(library(cuda, (build_fatbins() / "merge.fatbin").read_bytes()))
    assert refused(cuda.cuLibraryGetKernel(merge, b"decode_plan")) == "NOT_FOUND"
    ok(cuda.cuLibraryUnload(merge))
    assert refused(cuda.cuLibraryGetKernel(merge, KERNEL)) == "INVALID_HANDLE"
    assert counts() == {}


@on_fake_driver(TIERD_FAKE_CUDA_DEVICES="2")
def test_what_is_of_another_context_is_refused() -> None:
    """A function, a stream or an event is refused while another context than its own is current."""
    cuda = entered()
    second = ok(cuda.cuDevicePrimaryCtxRetain(1))
    kernel = ok(cuda.cuLibraryGetKernel(ok(library(cuda, (build_fatbins() / "merge.fatbin").read_bytes())), KERNEL))
    function, stream, event = (
        ok(cuda.cuKernelGetFunction(kernel)),
        ok(cuda.cuStreamCreate(1)),
        ok(cuda.cuEventCreate(0)),
    )
    told = params.Merge(0, 0, 0, 0, 1, 0, 0)

    def launched(of: Any, into: Any) -> str:
        return refused(cuda.cuLaunchKernel(of, 1, 1, 1, THREADS, 1, 1, 0, into, ((told,), (None,)), 0))

    ok(cuda.cuCtxPushCurrent(second))
    own = ok(cuda.cuKernelGetFunction(kernel))
    assert int(own) != int(function)
    assert launched(function, 0) == launched(function, stream) == launched(own, stream) == "INVALID_HANDLE"
    assert refused(cuda.cuEventRecord(event, 0)) == refused(cuda.cuCtxRecordEvent(second, event)) == "INVALID_HANDLE"
    assert launched(own, 0) == "CUDA_SUCCESS"
    ok(cuda.cuCtxPopCurrent())
    assert launched(own, 0) == "INVALID_HANDLE"
    assert launched(function, stream) == launched(function, 0) == "CUDA_SUCCESS"


@on_fake_driver(TIERD_FAKE_CUDA_DEVICES="2")
def test_devices_are_apart() -> None:
    """A fault on a device ends only its own context. Stream 0 is the current device's. A wait for one
    device does not wait for another."""
    cuda = entered()
    second = ok(cuda.cuDevicePrimaryCtxRetain(1))
    here = int(ok(cuda.cuMemAlloc(4096)))
    ok(cuda.cuMemsetD8Async(here, 0, 4096, 0))
    ok(cuda.cuCtxPushCurrent(second))
    ok(cuda.cuCtxSynchronize())
    assert counts()["pending"] == 1, "work of another device was waited for"
    kernel = ok(cuda.cuLibraryGetKernel(ok(library(cuda, (build_fatbins() / "merge.fatbin").read_bytes())), KERNEL))
    told = params.Merge(here, here + 1024, here + 2048, here + 3072, 1, 1, 8)
    ok(cuda.cuLaunchKernel(ok(cuda.cuKernelGetFunction(kernel)), 1, 1, 1, THREADS, 1, 1, 0, 0, ((told,), (None,)), 0))
    assert refused(cuda.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"
    ok(cuda.cuCtxPopCurrent())
    ok(cuda.cuCtxSynchronize())


@on_fake_driver()
def test_an_event_behind_all_of_a_context() -> None:
    """A context's event completes when all earlier work of its streams has, or at once without work."""
    cuda = entered()
    context, event = ok(cuda.cuCtxGetCurrent()), ok(cuda.cuEventCreate(2))
    ok(cuda.cuCtxRecordEvent(context, event))
    ok(cuda.cuEventQuery(event))
    memory, streams = int(ok(cuda.cuMemAlloc(4096))), [ok(cuda.cuStreamCreate(1)) for _ in range(2)]
    ok(cuda.cuMemsetD8Async(memory, 1, 4096, streams[0]))
    ok(cuda.cuCtxRecordEvent(context, event))
    ok(cuda.cuMemsetD8Async(memory, 2, 4096, streams[1]))
    assert refused(cuda.cuEventQuery(event)) == "NOT_READY"
    ok(cuda.cuEventSynchronize(event))
    assert counts()["pending"] == 1
    ok(cuda.cuStreamBeginCapture(streams[1], cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    assert refused(cuda.cuCtxRecordEvent(context, event)) == "STREAM_CAPTURE_UNSUPPORTED"
