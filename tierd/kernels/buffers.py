"""Arrays as kernels see them: an address, a shape, strides. Bad ones are refused before a launch.

`Buffer.of` takes numpy, torch and anything with the CUDA array interface. It does not own memory,
and copies and moves nothing. `Buffer.checked` checks shape, type, device and alignment; kernels get
only checked addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierd.errors import InvalidArgument

Array = Any
"""A numpy array, a torch tensor, another array on a GPU, or a Buffer (memory by its address)."""
Layout = tuple[Any, ...]
"""Alignment, shape, strides, type and place as the array's library gives them, to compare."""
DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float8_e4m3fn": "e4m3",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint32": "u32",
    "uint64": "u64",
}
"""Names of numpy (with ml_dtypes) and torch, and those of the kernels."""
BYTES = {"bf16": 2, "f16": 2, "f32": 4, "e4m3": 1, "i32": 4, "i64": 8, "u8": 1, "u32": 4, "u64": 8}
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Buffer:
    """name: of the argument, for errors. strides: bytes. dtype: of DTYPES' values. device: "cpu" or
    such as "cuda:0"."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str

    @classmethod
    def of(cls, name: str, array: Array) -> Buffer:
        """The buffer of an array. Raises InvalidArgument for other objects or unknown types."""
        if isinstance(array, Buffer):
            return replace(array, name=name)
        address, (_, shape, strides, kind, place) = seen(name, array)
        if hasattr(array, "data_ptr"):
            strides = tuple(step * array.element_size() for step in strides)
        return cls(name, address, tuple(shape), strides, _dtype(name, str(kind).removeprefix("torch.")), str(place))

    def checked(self, shape: Sequence[int | None], *dtypes: str, device: str, dense_from: int = 0) -> Buffer:
        """The buffer itself. Raises InvalidArgument if it differs. shape: None for any length.
        dense_from: from this axis on elements have no gaps."""
        if self.device != device:
            raise InvalidArgument(f"{self.name}: is on {self.device}, the kernel runs on {device}; move it there")
        if dtypes and self.dtype not in dtypes:
            raise InvalidArgument(f"{self.name}: has type {self.dtype}; the kernel takes {' or '.join(dtypes)}")
        if len(self.shape) != len(shape) or any(
            want not in (None, has) for want, has in zip(shape, self.shape, strict=True)
        ):
            raise InvalidArgument(
                f"{self.name}: has shape {list(self.shape)}; wanted {['any' if n is None else n for n in shape]}"
            )
        step = BYTES[self.dtype]
        for axis in range(len(shape) - 1, dense_from - 1, -1) if 0 not in self.shape else ():  # no elements, no gaps
            if self.shape[axis] > 1 and self.strides[axis] != step:
                raise InvalidArgument(
                    f"{self.name}: axis {axis} has a stride of {self.strides[axis]} bytes, wanted {step}; make it contiguous"
                )
            step *= self.shape[axis]
        return self

    def aligned(self) -> Buffer:
        """The buffer itself. Raises InvalidArgument if it or a row is not 16-byte aligned."""
        odd = [step for step in (self.address, *self.strides[:-1]) if step % ALIGNMENT_BYTES]
        if odd:
            raise InvalidArgument(
                f"{self.name}: address and strides {odd} are no multiples of {ALIGNMENT_BYTES}; kernels read so many bytes at a time"
            )
        return self


def seen(name: str, array: Array) -> tuple[int, Layout]:
    """An array's address, and all else that checks need. Raises InvalidArgument if it is none."""
    if isinstance(array, Buffer):
        at, shape, strides, place = array.address, array.shape, array.strides, array.device
    elif hasattr(array, "data_ptr"):
        at, shape, strides, place = array.data_ptr(), array.shape, array.stride(), array.device
    elif (interface := getattr(array, "__cuda_array_interface__", None)) is not None:
        at, shape, strides, place = (
            interface["data"][0],
            tuple(array.shape),
            tuple(array.strides),
            f"cuda:{array.device.id}",
        )
    elif (interface := getattr(array, "__array_interface__", None)) is not None:
        at, shape, strides, place = interface["data"][0], array.shape, array.strides, "cpu"
    else:
        raise InvalidArgument(f"{name}: {type(array).__name__} is no array; give one of numpy, torch or cupy")
    return at, (at % ALIGNMENT_BYTES, shape, strides, array.dtype, place)


def address_of(buffer: Buffer | None) -> int | None:
    """The buffer's address; for None a null pointer."""
    return buffer.address if buffer else None


def _dtype(name: str, kind: str) -> str:
    if kind not in DTYPES:
        raise InvalidArgument(f"{name}: no kernel takes type {kind}; known are {', '.join(DTYPES)}")
    return DTYPES[kind]
