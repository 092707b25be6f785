"""Bytes in and out of buffers: the buffer protocol, numpy, DLPack (torch).

Each buffer becomes one flat view of bytes; element types do not matter. A buffer that is not
contiguous, not on the CPU or, for output, not writable is refused with the remedy. Arrays on a GPU
that gpu_arrays.py has seen are flat already.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tierd.client.session.gpu_arrays import GpuBytes
from tierd.errors import InvalidArgument

Bytes = NDArray[np.uint8]


def flat(buffer: Any, *, writable: bool = False) -> Bytes:
    """The bytes of a buffer, uint8 [n], without a copy. Raises InvalidArgument."""
    if isinstance(buffer, GpuBytes):
        if writable and not buffer.is_writable:
            raise InvalidArgument("buffer: the array on a GPU is read-only; pass a writable one to copy into")
        return cast("Bytes", buffer)
    array = _array(buffer)
    if not array.flags.c_contiguous:
        raise InvalidArgument(
            f"buffer: {array.shape} with strides {array.strides} is not contiguous; pass a contiguous one"
        )
    if writable and not array.flags.writeable:
        raise InvalidArgument("buffer: it is read-only; pass a writable one to copy into")
    return array if array.ndim == 1 and array.dtype == np.uint8 else array.reshape(-1).view(np.uint8)


def copy_all(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Copies each source to its target. Raises ValueError if lengths differ or a target is read-only."""
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if len(target) != len(source):
            raise ValueError(f"copy {i}: {len(source)} bytes into {len(target)}")
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)  # releases the GIL


def address_of(array: NDArray[Any], *, writable: bool = False) -> int:
    """The array's address. Raises ValueError if it must be writable and is not."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type] # in a fifth of the other's time
    except (TypeError, ValueError):
        if writable and not array.flags.writeable:
            raise ValueError("copy: a target is read-only") from None  # memmove would not check
        if not array.flags.c_contiguous:
            raise ValueError(f"copy: strides of {array.strides} are not contiguous") from None
        return int(array.__array_interface__["data"][0])


def after(out: Any, lengths: Sequence[int]) -> Any:
    """The rest of a caller's buffers after blocks of these lengths."""
    if out is None or isinstance(out, list | tuple):
        return out and out[len(lengths) :]
    return flat(out, writable=True)[int(np.sum(lengths)) :]


def pieces(buffers: Any, lengths: Sequence[int], *, writable: bool = False) -> list[Bytes]:
    """One flat view for each block, from a list of buffers or one buffer with the blocks in
    order. Buffers may be longer than their block. Raises InvalidArgument if one is too short or
    missing."""
    if not isinstance(buffers, list | tuple):
        return _cut(flat(buffers, writable=writable), lengths)
    if len(buffers) < len(lengths):
        raise InvalidArgument(f"buffers: {len(buffers)} for {len(lengths)} blocks; pass one each")
    found = [flat(buffer, writable=writable) for buffer in buffers[: len(lengths)]]
    if list(map(len, found)) == lengths:
        return found
    for i, (piece, length) in enumerate(zip(found, lengths, strict=True)):
        if len(piece) < length:
            raise InvalidArgument(f"buffer {i}: {len(piece)} bytes for a block of {length}; pass a longer one")
    return [piece[:length] for piece, length in zip(found, lengths, strict=True)]


def are_in_pieces(out: Any) -> bool:
    """Whether a list has a list of pieces for each block, and not a buffer."""
    return isinstance(out, list | tuple) and bool(out) and isinstance(out[0], list | tuple)


def of_blocks(out: Sequence[Sequence[Any]], count: int) -> list[list[Bytes]]:
    """Flat views of the pieces of the first blocks. Raises InvalidArgument."""
    if len(out) < count:
        raise InvalidArgument(f"buffers: {len(out)} for {count} blocks; pass one each")
    for number, its in enumerate(out[:count]):
        if not isinstance(its, list | tuple):
            raise InvalidArgument(
                f"buffer {number}: {type(its).__name__}, but buffer 0 is in pieces; pass all of one kind"
            )
    return [[flat(piece, writable=True) for piece in its] for its in out[:count]]


def _cut(whole: Bytes, lengths: Sequence[int]) -> list[Bytes]:
    ends = list(accumulate(lengths))
    if ends and ends[-1] > len(whole):
        raise InvalidArgument(f"buffer: {len(whole)} bytes for blocks of {ends[-1]} in all; pass a longer one")
    return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _array(buffer: Any) -> NDArray[Any]:
    if isinstance(buffer, np.ndarray):
        return buffer
    if hasattr(buffer, "__dlpack__"):
        return _from_dlpack(buffer)
    try:
        return np.frombuffer(memoryview(buffer).cast("B"), dtype=np.uint8)
    except TypeError as error:
        raise InvalidArgument(
            f"buffer: {type(buffer).__name__} gives no contiguous bytes ({error}); pass bytes, a numpy array or a CPU tensor"
        ) from error


def _from_dlpack(buffer: Any) -> NDArray[Any]:
    try:
        return np.from_dlpack(buffer)
    except (BufferError, RuntimeError, TypeError, ValueError):
        # numpy lacks bfloat16 and float8, so view them as bytes.
        try:
            return np.from_dlpack(buffer.view(_byte_type(buffer)))
        except Exception as error:
            raise InvalidArgument(
                f"buffer: {type(buffer).__name__} cannot be read through DLPack ({error}); pass a contiguous CPU tensor that"
                " needs no gradient"
            ) from error


def _byte_type(tensor: Any) -> Any:
    """torch.uint8, without importing torch: if there is a tensor, the module is loaded."""
    import sys  # noqa: PLC0415

    return sys.modules[type(tensor).__module__.partition(".")[0]].uint8
