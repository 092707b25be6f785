"""Which array library computes, in what precision, where.

Purpose: the few things that the array API does not standardise: loading raw tensors, arrays over foreign memory, and the way between numpy and a GPU.
Non-purpose: any mathematics. Invariants: `page` never copies: what is written to its array is written to the buffer; pages lie where
attention runs; torch and CUDA are loaded only when asked for.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import to_device
from numpy.typing import NDArray

from tierd.core.formats.block import KVGeometry
from tierd.errors import ConfigError, Unsupported
from tierd.kernels.e4m3 import E4M3
from tierd.kernels.library import EMULATED, REFERENCE, asked_kernels
from tierd.worker.checkpoint import RawTensor

if TYPE_CHECKING:
    from tierd.client.session.device import Mark
    from tierd.worker.gpu import GpuMemory

Array = Any
"""A numpy array, a torch tensor or, over memory of a GPU, a GpuArray."""

KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, E4M3: 1}
"""Precisions of KV, bytes per value."""
KERNEL_DTYPES = ("float16", "bfloat16", E4M3)
"""Precisions of KV that kernels attend to."""


@dataclass(frozen=True)
class Backend:
    """library: "numpy" or "torch". dtype: of weights and activations. device: "cpu", or a GPU such as "cuda:0", where pages lie and kernels attend; torch computes
    there too, numpy on the host."""

    library: str = "numpy"
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be computed, Unsupported without torch."""
        known = {"numpy": ("float32",), "torch": ("float32", "bfloat16", "float16")}
        if self.dtype not in known.get(self.library, ()):
            raise ConfigError(f"backend: {self.library!r} in {self.dtype!r} is not to be had; choose from {known}")
        if self.device != "cpu" and not self.is_on_gpu and self.library == "numpy":
            raise ConfigError(f"backend.device: is {self.device!r}; numpy takes 'cpu' or 'cuda:' and a number")
        if self.library == "torch":
            assert self.torch is not None

    @cached_property
    def torch(self) -> Any:
        """The torch module; None with numpy. Raises Unsupported where torch is not installed."""
        if self.library != "torch":
            return None
        try:
            import torch  # noqa: PLC0415 - only who asks for torch pays for it
        except ImportError as fault:
            raise Unsupported("backend: torch is not installed; `pip install tierd[worker]` or use numpy") from fault
        return torch

    @property
    def has_kernels(self) -> bool:
        """Whether kernels attend: on a GPU unless TIERD_KERNELS asks for the reference, on a CPU where it asks for emulated ones. Raises ConfigError."""
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
        """Whether pages lie on one."""
        return re.fullmatch(r"cuda(:\d+)?", self.device) is not None

    @property
    def kv_dtype(self) -> str:
        """Of pages, where nobody says: float32 for the reference, else what kernels take. Raises ConfigError."""
        if not self.has_kernels:
            return "float32"
        return self.dtype if self.dtype in KERNEL_DTYPES else "float16"

    @property
    def ordinal(self) -> int:
        """Of the GPU where new tensors are made, by torch's current one if none is named; 0 with a CPU."""
        if self.device == "cuda" and self.torch is not None:
            return int(self.torch.empty(0, device=self.device).get_device())
        return int(self.device.partition(":")[2] or 0)

    @property
    def gpu(self) -> GpuMemory:
        """The GPU's memory in this process. Raises Unsupported."""
        from tierd.worker.gpu import gpu_memory  # noqa: PLC0415 - it looks for a driver

        return gpu_memory(self.ordinal)

    def weight(self, raw: RawTensor) -> Array:
        """A stored tensor, in this backend's precision and place."""
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
        """An array [layers, 2, tokens, kv_heads, head_dim] over a block's bytes, without a copy; in numpy uint8 for e4m3.

        buffer: anything with the buffer protocol or, for a backend on a GPU, the CUDA array interface, at least as long. Writable as the buffer is; torch knows no
        read-only tensors: nobody writes to pages that are not private. Raises Unsupported for bfloat16 without torch, ConfigError for memory elsewhere.
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
        """Memory of this process's for a page. Raises Overloaded for none on the GPU."""
        # A mapping of its own lies near the daemon's, so that one call of a kernel reaches pages of both.
        return self.gpu.empty((length_bytes,), "uint8") if self.is_on_gpu else mmap.mmap(-1, length_bytes)

    def copy(self, source: Array, target: Array, *, tokens: int) -> None:
        """The first tokens of one page into another."""
        if self.is_on_gpu:
            self.gpu.copy(source, target, tokens=tokens)
        else:
            target[:, :, :tokens] = source[:, :, :tokens]

    def to_pages(self, array: Array, dtype: str) -> Array:
        """What was computed, where kernels attend: of numpy on a GPU a copy in this type, for pages of e4m3 in float16; else the array itself."""
        if self.torch is None and self.is_on_gpu:
            return self.gpu.filled(array.astype("float16" if dtype == E4M3 else dtype))
        return array

    def from_kernels(self, array: Array) -> Array:
        """What kernels gave, where the model computes; to numpy a copy, after all that is under way."""
        return self.to_numpy(array) if self.torch is None else array

    def under_way(self) -> tuple[Mark, ...]:
        """What must be done before others may read what this worker has written to pages, or write to what it reads."""
        return (self.gpu.mark(),) if self.is_on_gpu else ()

    def finish(self) -> None:
        """Waits for what is under way. Raises DeadlineExceeded."""
        if self.is_on_gpu:
            self.gpu.finish()

    def trim(self) -> None:
        """Gives back memory that was made here and is not used."""
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
    """A read-only array that claims to be writable, since torch warns of tensors over read-only memory and has no other way.

    It keeps the array alive; the mapping itself still refuses to be written.
    """

    def __init__(self, array: NDArray[np.uint8]) -> None:
        """array: what lies behind."""
        self._array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def page_bytes(geometry: KVGeometry, tokens: int) -> int:
    """Bytes of a block of so many tokens. Raises ConfigError for an unknown dtype."""
    if geometry.dtype not in KV_BYTES:
        raise ConfigError(f"kv dtype: {geometry.dtype!r} is none of {sorted(KV_BYTES)}; choose one of them")
    return geometry.layers * 2 * tokens * geometry.kv_heads * geometry.head_dim * KV_BYTES[geometry.dtype]
