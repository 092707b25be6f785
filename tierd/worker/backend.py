"""The array library, precision and device of a worker's computation.

It covers the parts that the array API does not standardize: loading raw tensors, arrays over
foreign memory, and copies between numpy and a GPU. An array of `page` is never a copy: writes to
it are writes to the buffer. Pages lie where attention runs. Only a request loads torch or CUDA.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from array_api_compat import to_device
from numpy.typing import NDArray

from tierd.core.formats.block import DTYPE_BYTES, KVGeometry
from tierd.errors import ConfigError, Unsupported
from tierd.kernels.e4m3 import E4M3
from tierd.kernels.library import EMULATED, REFERENCE, asked_kernels
from tierd.worker.checkpoint import RawTensor

if TYPE_CHECKING:
    from tierd.client.session.device import Mark
    from tierd.worker.gpu import GpuMemory

T = TypeVar("T")
Array = Any
"""A numpy array, a torch tensor or, over memory of a GPU, a GpuArray."""

KERNEL_DTYPES = ("float16", "bfloat16", E4M3)
"""Precisions of KV that kernels attend to."""


@dataclass(frozen=True)
class Backend:
    """library: "numpy" or "torch". dtype: of weights and activations. device: "cpu", or a GPU such
    as "cuda:0", which holds pages and runs kernels. On a GPU torch computes there, numpy on the
    host."""

    library: str = "numpy"
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Raises ConfigError for an unsupported combination, Unsupported without torch."""
        known = {"numpy": ("float32",), "torch": ("float32", "bfloat16", "float16")}
        if self.dtype not in known.get(self.library, ()):
            raise ConfigError(f"backend: {self.library!r} in {self.dtype!r} is not supported; choose from {known}")
        if self.device != "cpu" and not self.is_on_gpu and self.library == "numpy":
            raise ConfigError(f"backend.device: is {self.device!r}; numpy takes 'cpu' or 'cuda:' and a number")
        if self.library == "torch":
            assert self.torch is not None

    @cached_property
    def torch(self) -> Any:
        """The torch module; None with numpy. Raises Unsupported if torch is not installed."""
        if self.library != "torch":
            return None
        try:
            import torch  # noqa: PLC0415 - only who asks for torch pays for it
        except ImportError as fault:
            raise Unsupported("backend: torch is not installed; `pip install tierd[worker]` or use numpy") from fault
        return torch

    @property
    def has_kernels(self) -> bool:
        """Whether kernels attend: on a GPU, or on a CPU if TIERD_KERNELS asks for emulated ones.

        Raises ConfigError for emulated kernels without a CPU, and for the reference on a GPU.
        """
        asked = asked_kernels()
        if asked == EMULATED and self.device != "cpu":
            raise ConfigError(
                f"TIERD_KERNELS: emulated kernels run on the CPU, the backend computes on {self.device!r}; unset it, or choose device='cpu'"
            )
        if asked == REFERENCE and self.is_on_gpu:
            raise ConfigError(
                f"TIERD_KERNELS: the reference attends on a CPU, pages of this backend lie on {self.device!r}; unset it, or choose device='cpu'"
            )
        return asked == EMULATED or self.is_on_gpu

    @property
    def is_on_gpu(self) -> bool:
        """Whether pages lie on a GPU."""
        return re.fullmatch(r"cuda(:\d+)?", self.device) is not None

    @property
    def kv_dtype(self) -> str:
        """Default type of pages: float32 for the reference, else a type of kernels. Raises ConfigError."""
        if not self.has_kernels:
            return "float32"
        return self.dtype if self.dtype in KERNEL_DTYPES else "float16"

    @property
    def ordinal(self) -> int:
        """Number of the GPU for new tensors, torch's current one if none is named; 0 with a CPU."""
        if self.device == "cuda" and self.torch is not None:
            return int(self.torch.empty(0, device=self.device).get_device())
        return int(self.device.partition(":")[2] or 0)

    @property
    def gpu(self) -> GpuMemory:
        """The GPU's memory in this process. Raises Unsupported."""
        from tierd.worker.gpu import gpu_memory  # noqa: PLC0415 - it looks for a driver

        return gpu_memory(self.ordinal)

    def weight(self, raw: RawTensor) -> Array:
        """A stored tensor, in this backend's precision and on its device."""
        if self.torch is None:
            return raw.float32()
        if raw.kind == "BF16":
            stored = self.torch.from_numpy(raw.data.view("<i2").copy()).view(self.torch.bfloat16).reshape(raw.shape)
        else:
            stored = self.torch.from_numpy(np.array(raw.float32()))
        return stored.to(device=self.device, dtype=getattr(self.torch, self.dtype))

    def ints(self, values: Sequence[int]) -> Array:
        """int64 [n], beside the weights."""
        array = np.asarray(values, dtype=np.int64)
        return array if self.torch is None else self.torch.from_numpy(array).to(self.device)

    def floats(self, values: NDArray[np.float32]) -> Array:
        """The same float32 values, beside the weights."""
        return values if self.torch is None else self.torch.from_numpy(values).to(self.device)

    def page(self, buffer: Any, *, geometry: KVGeometry, tokens: int) -> Array:
        """An array [layers, 2, tokens, kv_heads, head_dim] over a block's bytes, without a copy; in
        numpy uint8 for e4m3.

        buffer: of the buffer protocol or, on a GPU, the CUDA array interface, at least as long.
        The array is writable if the buffer is. torch has no read-only tensors: write only to
        private pages. Raises Unsupported for bfloat16 without torch, ConfigError for memory
        elsewhere.
        """
        shape = (geometry.layers, 2, tokens, geometry.kv_heads, geometry.head_dim)
        length_bytes = page_bytes(geometry, tokens)
        if self.torch is None and geometry.dtype == "bfloat16":
            raise Unsupported(
                f"kv dtype: numpy has no bfloat16; choose float32, float16 or {E4M3}, or the torch backend"
            )
        self._check_place(buffer)
        if self.is_on_gpu:
            return self.gpu.over(buffer, shape, geometry.dtype)
        raw = np.frombuffer(buffer, dtype=np.uint8, count=length_bytes)
        if self.torch is None:
            return raw.view("uint8" if geometry.dtype == E4M3 else geometry.dtype).reshape(shape)
        return self._tensor(raw).view(getattr(self.torch, geometry.dtype)).reshape(shape)

    def memory(self, length_bytes: int) -> Any:
        """This process's own memory for a page. Raises Overloaded if the GPU has none."""
        # An own mapping lies near the daemon's, so one kernel call reaches pages of both.
        return self.gpu.empty((length_bytes,), "uint8") if self.is_on_gpu else mmap.mmap(-1, length_bytes)

    def copy(self, source: Array, target: Array, *, tokens: int) -> None:
        """Copies the first tokens of one page into another."""
        if self.is_on_gpu:
            self.gpu.copy(source, target, tokens=tokens)
        else:
            target[:, :, :tokens] = source[:, :, :tokens]

    def to_pages(self, array: Array, dtype: str) -> Array:
        """Computed values for kernels. From numpy on a GPU a copy in this type (float16 for pages
        of e4m3); else the array itself."""
        if self.torch is None and self.is_on_gpu:
            return self.gpu.filled(array.astype("float16" if dtype == E4M3 else dtype))
        return array

    def from_kernels(self, array: Array) -> Array:
        """A kernel's result for the model; for numpy a copy, made after all running work."""
        return self.to_numpy(array) if self.torch is None else array

    def captured(self, work: Callable[[], T]) -> Callable[[], T]:
        """Replays the work's launches on the GPU, with the arrays of this call; each replay returns
        the same result arrays, with new contents. On a CPU it is the work itself.

        The work ran once before, and allocates nothing but through torch. Raises torch's errors for
        work that no graph can hold.
        """
        if not self.is_on_gpu:
            return work
        cuda = self.torch.cuda
        # Calls of other threads, such as the client's, do not end this thread's capture.
        with cuda.device(self.ordinal), cuda.graph(graph := cuda.CUDAGraph(), capture_error_mode="thread_local"):
            result = work()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def under_way(self) -> tuple[Mark, ...]:
        """Marks of work that must end before others read this worker's writes or overwrite its reads."""
        return (self.gpu.mark(),) if self.is_on_gpu else ()

    def finish(self) -> None:
        """Waits for running work. Raises DeadlineExceeded."""
        if self.is_on_gpu:
            self.gpu.finish()

    def trim(self) -> None:
        """Releases unused memory that was allocated here."""
        if self.is_on_gpu:
            self.gpu.trim()

    def _check_place(self, buffer: Any) -> None:
        is_there = hasattr(buffer, "__cuda_array_interface__")
        place = f"cuda:{buffer.device.id}" if is_there else "cpu"
        mine = f"cuda:{self.ordinal}" if self.is_on_gpu else "cpu"
        if place != mine:
            raise ConfigError(
                f"page: lies on {place}, this worker attends on {mine}; let the backend's device be the daemon's GPU, or choose another tier"
            )

    def _tensor(self, raw: NDArray[np.uint8]) -> Array:
        """A uint8 tensor over the same memory, read-only or not."""
        return self.torch.from_numpy(raw if raw.flags.writeable else np.asarray(_Borrowed(raw)))

    def to_numpy(self, array: Array) -> NDArray[np.float32]:
        """float32 on the host, for sampling."""
        if self.torch is None:
            return np.asarray(to_device(array, "cpu"), dtype=np.float32)
        return np.asarray(array.detach().to("cpu", self.torch.float32).numpy())


class _Borrowed:
    """A read-only array that claims to be writable: torch warns of tensors over read-only memory.

    It keeps the array alive; the mapping itself still refuses writes.
    """

    def __init__(self, array: NDArray[np.uint8]) -> None:
        """array: the one behind."""
        self._array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def page_bytes(geometry: KVGeometry, tokens: int) -> int:
    """Bytes of a block of so many tokens. Raises ConfigError for an unknown dtype."""
    if geometry.dtype not in DTYPE_BYTES:
        raise ConfigError(f"kv dtype: {geometry.dtype!r} is none of {sorted(DTYPE_BYTES)}; choose one of them")
    return geometry.layers * 2 * tokens * geometry.kv_heads * geometry.head_dim * DTYPE_BYTES[geometry.dtype]
