"""Launches on the fake driver, by NVIDIA's own bindings: what the driver itself refuses."""

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
    """What loading it answers."""
    answer: tuple[Any, ...] = cuda.cuLibraryLoadData(image, [], [], 0, [], [], 0)
    return answer


@on_fake_driver()
def test_launches_are_checked() -> None:
    """Refused: a grid without blocks, another number of threads, more shared memory than the kernel was allowed, parameters of a wrong size or given twice."""
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
    """What is no fatbin is no image; one that holds nothing for this device is said to; a kernel that it lacks is not found."""
    cuda = entered()
    assert refused(library(cuda, b"\x7fELF" + bytes(60))) == "INVALID_IMAGE"
    assert refused(library(cuda, struct.pack("<IHHQ", MAGIC, 1, 16, 8) + bytes(8))) == "NO_BINARY_FOR_GPU"
    merge = ok(library(cuda, (build_fatbins() / "merge.fatbin").read_bytes()))
    assert refused(cuda.cuLibraryGetKernel(merge, b"decode_plan")) == "NOT_FOUND"
    ok(cuda.cuLibraryUnload(merge))
    assert refused(cuda.cuLibraryGetKernel(merge, KERNEL)) == "INVALID_HANDLE"
    assert counts() == {}
