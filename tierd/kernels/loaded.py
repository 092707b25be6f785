"""The kernels of cuda/ on a GPU: NVIDIA's driver loads and launches the fatbins.

`Loaded` is a Library. It does not own memory, streams or events. A launch allocates nothing, does
not wait, and goes to the current stream of its GPU. It works in any context of the thread and
restores it. Parameters are checked by size, shared memory by its limit.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierd.errors import InvalidArgument, Unsupported
from tierd.kernels.driver import bindings, call, fault

FATBINS = Path(__file__).parent / "fatbins"
"""The folder in a wheel; `tierd kernels build` writes here."""
FATBINS_FOLDER = "TIERD_FATBINS_FOLDER"
"""Environment: another folder."""


class Loaded:
    """The fatbins of a folder on one GPU. Threads may share it. stream: gives the current stream as
    an integer. By default torch's if torch is loaded, else the legacy default stream."""

    def __init__(self, folder: Path = FATBINS, *, ordinal: int = 0, stream: Callable[[], int] | None = None) -> None:
        """ordinal: of the GPU. Raises Unsupported without driver, bindings, GPU or fatbins."""
        files = sorted(folder.glob("*.fatbin"))
        self._cuda = cuda = bindings()
        if not files:
            raise Unsupported(
                f"kernels: no fatbins in {folder}: tierd was installed without them; "
                "`tierd kernels build` compiles them, which takes nvcc of CUDA 13 or newer and minutes"
            )
        self.device = f"cuda:{ordinal}"
        self._stream = stream or (lambda: current_stream(ordinal))
        self._gpu = call(cuda.cuDeviceGet, ordinal, what=self.device)
        self.block_shared_bytes = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._context = call(cuda.cuDevicePrimaryCtxRetain, self._gpu, what=self.device)
        self._number = int(self._context)
        self._libraries = [self._load(path) for path in files]
        self._kernels = dict(pair for library in self._libraries for pair in self._listed(library))
        self._functions: dict[str, _Function] = {}
        self._cell = _Cell()

    def launch(self, kernel: str, grid: Sequence[int], params: ctypes.Structure, *, shared_bytes: int = 0) -> None:
        """As in Library. The parameters are copied. Raises InvalidArgument, and TierFailed for an
        earlier error of the GPU."""
        function = self._functions.get(kernel) or self._found(kernel)
        if ctypes.sizeof(params) != function.param_bytes:
            raise InvalidArgument(
                f"{kernel}: takes {function.param_bytes} bytes of parameters, {type(params).__name__} has {ctypes.sizeof(params)}; rebuild"
            )
        if shared_bytes > function.shared_limit:
            self._allow(function, shared_bytes)
        if 0 in grid:
            return
        cell = self._cell
        cell.pointer[0] = ctypes.addressof(params)
        given = (*grid, function.threads, 1, 1, shared_bytes, self._stream(), cell.address, 0)
        # A kernel and stream 0 belong to the current context: a thread may have none, or another
        # GPU's.
        _, current = self._cuda.cuCtxGetCurrent()
        with nullcontext() if int(current) == self._number else self._entered():
            (result,) = self._cuda.cuLaunchKernel(function.handle, *given)
        if result:
            geometry = f"grid {given[:3]}, {function.threads} threads, {given[6]} bytes of shared memory"
            raise fault(result, f"{function.name}: a launch of {geometry}")

    def resident_blocks(self, kernel: str, *, shared_bytes: int = 0) -> int:
        """Blocks that the GPU runs at once: best for `PagedDecode`. Raises InvalidArgument."""
        cuda, function = self._cuda, self._functions.get(kernel) or self._found(kernel)
        if shared_bytes > function.shared_limit:
            self._allow(function, shared_bytes)
        asked = (function.handle, function.threads, shared_bytes)
        with self._entered():
            each = call(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor, *asked, what=kernel)
        return int(each) * self._attribute("MULTIPROCESSOR_COUNT")

    def close(self) -> None:
        """Releases the code and the context. No launch may follow."""
        cuda, self._functions, self._kernels = self._cuda, {}, {}
        while self._libraries:
            call(cuda.cuLibraryUnload, self._libraries.pop(), what=self.device)
        if self._context is not None:
            self._context = None
            call(cuda.cuDevicePrimaryCtxRelease, self._gpu, what=self.device)

    def _load(self, path: Path) -> Any:
        return call(self._cuda.cuLibraryLoadData, path.read_bytes(), [], [], 0, [], [], 0, what=f"fatbin {path}")

    def _listed(self, library: Any) -> list[tuple[str, Any]]:
        cuda = self._cuda
        count = call(cuda.cuLibraryGetKernelCount, library, what=self.device)
        kernels = call(cuda.cuLibraryEnumerateKernels, count, library, what=self.device)
        return [(call(cuda.cuKernelGetName, kernel, what=self.device).decode(), kernel) for kernel in kernels]

    def _found(self, kernel: str) -> _Function:
        """Looks a kernel up once; the driver brings its code to the GPU."""
        if kernel not in self._kernels:
            raise InvalidArgument(
                f"{kernel}: the fatbins have no such kernel; shapes and types that they have are in cuda/README.md"
            )
        cuda = self._cuda
        with self._entered():
            handle = call(cuda.cuKernelGetFunction, self._kernels[kernel], what=kernel)
            # The launch bound of its source.
            bound = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
            threads = call(cuda.cuFuncGetAttribute, bound, handle, what=kernel)
        _, param_bytes = call(cuda.cuKernelGetParamInfo, self._kernels[kernel], 0, what=kernel)
        shared_limit = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK")
        return self._functions.setdefault(kernel, _Function(kernel, handle, param_bytes, threads, shared_limit))

    def _allow(self, function: _Function, shared_bytes: int) -> None:
        """Allows a kernel all shared memory of a block: above 48 KiB this must be set before."""
        most = self.block_shared_bytes
        if shared_bytes > most:
            raise InvalidArgument(
                f"{function.name}: needs {shared_bytes} bytes of shared memory, a block of {self.device} has {most}; take a smaller head dim or group"
            )
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._entered():
            call(self._cuda.cuFuncSetAttribute, function.handle, attribute, most, what=function.name)
        function.shared_limit = most

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(self._cuda.cuDeviceGetAttribute, attribute, self._gpu, what=self.device))

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """With the GPU's context as this thread's, which may have none, or another GPU's."""
        call(self._cuda.cuCtxPushCurrent, self._context, what=self.device)
        try:
            yield
        finally:
            call(self._cuda.cuCtxPopCurrent, what=self.device)


def current_stream(ordinal: int) -> int:
    """A GPU's current stream as an integer: torch's if torch is loaded, else the legacy default."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return 0
    # As torch's compiled code does: a tenth of the time of torch.cuda.current_stream().cuda_stream.
    return int(torch._C._cuda_getCurrentRawStream(ordinal))


def fatbins_folder() -> Path:
    """The folder of the fatbins: from the environment, else the one in tierd."""
    return Path(os.environ.get(FATBINS_FOLDER) or FATBINS)


class _Cell(threading.local):
    """A thread's own pointer to the parameters: the bindings would make one per launch."""

    def __init__(self) -> None:
        self.pointer = (ctypes.c_void_p * 1)()
        self.address = ctypes.addressof(self.pointer)


@dataclass(slots=True)
class _Function:
    """A kernel in the context. threads: of a block; shared_limit: bytes allowed at launch."""

    name: str
    handle: Any
    param_bytes: int
    threads: int
    shared_limit: int
