"""Arrays on a GPU as bytes at an address: of torch, by CUDA array interface, or by DLPack.

`seen` runs in the caller's thread, since torch and cupy have a current stream for each thread. It
copies nothing and loads no driver. The copies are in session/stream_copies.py.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tierd.errors import InvalidArgument, TierdError

DEFAULT_STREAM = 1
"""The default stream, by its number in both protocols and in the driver."""
_DLPACK_KINDS = (2, 13)
"""kDLCUDA and kDLCUDAManaged (dlpack.h)."""
_ON_HOST = (np.ndarray, bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True, eq=False)
class GpuBytes:
    """Bytes on a GPU. device: its number in this process, None: unknown. stream: the caller's,
    None: the array names none. owner: keeps the memory."""

    address: int
    nbytes: int
    device: int | None
    stream: int | None
    is_writable: bool
    owner: object

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> GpuBytes:
        """A slice without steps."""
        start, stop, _ = part.indices(self.nbytes)
        return replace(self, address=self.address + start, nbytes=max(0, stop - start))


def seen(buffer: Any) -> Any:
    """An array on a GPU as GpuBytes; other objects as they are. Raises InvalidArgument for an array
    that is not contiguous, or that its library does not export."""
    if isinstance(buffer, _ON_HOST):
        return buffer
    torch: Any = sys.modules.get("torch")
    kind: type[Any] | tuple[()] = getattr(torch, "Tensor", ())
    try:
        if isinstance(buffer, kind):
            return _of_torch(torch, buffer) if buffer.is_cuda else buffer
        if (interface := getattr(buffer, "__cuda_array_interface__", None)) is not None:
            return _of_interface(buffer, interface)
        place: Callable[[], tuple[int, int]] | None = getattr(buffer, "__dlpack_device__", None)
        return _of_dlpack(buffer) if place is not None and place()[0] in _DLPACK_KINDS else buffer
    except TierdError:
        raise
    except Exception as error:  # a library's own
        raise InvalidArgument(
            f"buffer: {type(buffer).__name__} does not export its memory on a GPU ({error}); pass a contiguous array of torch or cupy"
        ) from error


def all_seen(buffers: Any) -> Any:
    """A list of buffers, or one buffer, with arrays on a GPU as GpuBytes. Raises as `seen`."""
    return [seen(buffer) for buffer in buffers] if isinstance(buffers, list | tuple) else seen(buffers)


def seen_here(buffers: Any, *, has_rows: bool = False) -> Any:
    """As `all_seen`, for a verb that runs in another thread. That verb raises what is wrong.
    has_rows: one array on a GPU stands for a list of its rows."""
    with suppress(Exception):
        if has_rows and isinstance(seen(buffers), GpuBytes):
            buffers = list(buffers)
        return all_seen(buffers)
    return buffers


def are_on_gpu(buffers: Sequence[Any]) -> bool:
    """Whether buffers are GpuBytes. Raises InvalidArgument if only some are."""
    kinds = {isinstance(buffer, GpuBytes) for buffer in buffers}
    if len(kinds) > 1:
        at = next(i for i, buffer in enumerate(buffers) if not isinstance(buffer, GpuBytes))
        raise InvalidArgument(f"buffer {at}: it is in host memory, others are on a GPU; pass all of one kind")
    return kinds == {True}


def is_on_gpu(out: Any) -> bool:
    """Whether such buffers, a list or one, are GpuBytes."""
    return isinstance(out[0] if isinstance(out, list) and out else out, GpuBytes)


def copies() -> Any:
    """The module of the copies. It is loaded only when it is needed, because it looks for a driver."""
    from tierd.client.session import stream_copies  # noqa: PLC0415

    return stream_copies


def _of_torch(torch: Any, tensor: Any) -> GpuBytes:
    if not tensor.is_contiguous():
        raise _not_contiguous(tensor.shape, tensor.stride())
    stream = torch.cuda.current_stream(tensor.device).cuda_stream or DEFAULT_STREAM
    nbytes = tensor.numel() * tensor.element_size()
    return GpuBytes(tensor.data_ptr(), nbytes, tensor.device.index, stream, True, tensor)


def _of_interface(array: Any, interface: dict[str, Any]) -> GpuBytes:
    """Of the CUDA array interface, version 2 or 3."""
    shape, item_bytes, strides = interface["shape"], np.dtype(interface["typestr"]).itemsize, interface.get("strides")
    if strides is not None and not _is_dense(shape, strides, item_bytes):
        raise _not_contiguous(shape, strides)
    if interface.get("mask") is not None:
        raise InvalidArgument("buffer: it has a mask; pass an array without one")
    (address, is_read_only), stream = interface["data"], interface.get("stream")
    device = getattr(getattr(array, "device", None), "id", None)
    nbytes = item_bytes * math.prod(shape)
    return GpuBytes(int(address), nbytes, device, None if stream is None else int(stream), not is_read_only, array)


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h, with which a managed tensor begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _of_dlpack(array: Any) -> GpuBytes:
    """The capsule stays unconsumed and owns the memory. The default stream waits for the producer."""
    capsule = array.__dlpack__(stream=DEFAULT_STREAM)
    tensor = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    shape, item_bytes = tensor.shape[: tensor.axes], tensor.bits * tensor.lanes // 8
    strides = [step * item_bytes for step in tensor.strides[: tensor.axes]] if tensor.strides else None
    if strides is not None and not _is_dense(shape, strides, item_bytes):
        raise _not_contiguous(shape, strides)
    nbytes = tensor.bits * tensor.lanes * math.prod(shape) // 8
    return GpuBytes((tensor.data or 0) + tensor.offset, nbytes, tensor.device, None, True, capsule)


def _is_dense(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    """Whether elements follow each other in C order. strides: bytes."""
    if 0 in shape:
        return True
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != item_bytes:
            return False
        item_bytes *= length
    return True


def _not_contiguous(shape: Sequence[int], strides: Sequence[int]) -> InvalidArgument:
    return InvalidArgument(
        f"buffer: {tuple(shape)} with strides {tuple(strides)} is not contiguous; pass a contiguous array"
    )
