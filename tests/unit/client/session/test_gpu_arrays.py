"""Arrays on a GPU are recognised without a driver: bytes, device, stream, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierd.client.session import gpu_arrays
from tierd.client.session.gpu_arrays import all_seen, are_on_gpu, seen, seen_here
from tierd.errors import InvalidArgument


class Array:
    """An array of u16 [3, 4] at an address, in stream 7."""

    device = SimpleNamespace(id=1)

    def __init__(self, **fields: Any) -> None:
        given = {"version": 3, "shape": (3, 4), "typestr": "<u2", "data": (4096, False), "stream": 7}
        self.__cuda_array_interface__ = given | fields


def facts(array: Any) -> tuple[Any, ...]:
    found = seen(array)
    return found.address, found.nbytes, found.device, found.stream, found.is_writable


def test_an_interface_becomes_bytes() -> None:
    """Bytes, device and stream follow from the interface; C order, axes of length 1 and empty arrays are
    contiguous, and slices stay inside."""
    assert facts(Array()) == (4096, 24, 1, 7, True)
    assert facts(Array(strides=(8, 2), data=(4096, True), stream=None)) == (4096, 24, 1, None, False)
    assert facts(Array(shape=(3, 1), strides=(2, 99)))[1] == 6
    assert facts(Array(shape=(0, 4), strides=(1, 1), data=(0, False)))[1] == 0
    part = seen(Array())[20:99]
    assert (part.address, len(part)) == (4116, 4)
    for strides in ((2, 6), (16, 2), (-8, 2)):
        with pytest.raises(InvalidArgument, match="is not contiguous"):
            seen(Array(strides=strides))


def test_other_objects_stay_as_they_are() -> None:
    """Host buffers and odd objects pass unchanged; a mixture is refused with its first host buffer."""
    for other in (b"x", bytearray(1), memoryview(b"x"), np.zeros(3), None, 7, "x", object(), lambda: 1, int):
        assert seen(other) is other
    found = all_seen([Array(), Array()])
    assert are_on_gpu(found) and not are_on_gpu([b""]) and not are_on_gpu([])
    with pytest.raises(InvalidArgument, match="buffer 2: it is in host memory"):
        are_on_gpu([*found, b"x"])


def test_in_another_thread_only_the_verb_raises() -> None:
    """`seen_here` keeps what it cannot see for the verb, which then raises."""
    wrong = [Array(strides=(1, 1))]
    assert seen_here(wrong) is wrong
    assert [each.stream for each in seen_here([Array()])] == [7]


def test_tensors_of_any_type_become_bytes() -> None:
    """A tensor's bytes, device and current stream, also in types that no interface exports; the default
    stream has its number. One that is not contiguous is refused."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    streams = iter((0, 99))
    told = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda _: SimpleNamespace(cuda_stream=next(streams))))
    for dtype, stream in ((torch.bfloat16, 1), (torch.float8_e4m3fn, 99)):
        tensor = torch.zeros((4, 6), dtype=dtype, requires_grad=dtype is torch.bfloat16)
        found = gpu_arrays._of_torch(told, tensor[1:3])
        assert (found.address, len(found)) == (tensor.data_ptr() + 6 * dtype.itemsize, 12 * dtype.itemsize)
        assert found.stream == stream
        with pytest.raises(InvalidArgument, match="is not contiguous"):
            gpu_arrays._of_torch(told, tensor[:, 1:])
    assert seen(tensor) is tensor
