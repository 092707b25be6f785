"""The codecs' loops in C++ (tierd/native/codecs.cpp), if a compiler built them.

Each codec has a plain form in numpy, with the same bytes. Without the library that form is used. A
call releases the interpreter lock.
"""

from __future__ import annotations

import struct
import threading
from ctypes import CDLL
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.values import Bytes, KVShape, Raw
from tierd.native import find_library

library: CDLL | None = find_library("codecs")
"""None: there is no library, or a test wants the plain forms."""
STEP = 16
"""Loops over values take head_dims that are multiples of this."""
LINE = 64
"""Bytes of a cache line."""
KEPT_BYTES = 16 << 20
"""A thread keeps scratch memory up to this size for each use."""
_THREAD = threading.local()
_BLOCK = struct.Struct("<6Q4q")


def address_of(array: NDArray[Any]) -> int:
    """Of its first item."""
    address: int = array.__array_interface__["data"][0]
    return address


def described(raw: Raw, shape: KVShape) -> bytes:
    """TierdBlock of codecs.cpp."""
    g, strides = shape.geometry, raw.strides
    return _BLOCK.pack(
        *(address_of(raw), g.layers, shape.tokens, g.kv_heads, g.head_dim, g.dtype == "float16"),
        *(strides[0] >> 1, strides[1] >> 1, strides[2] >> 1, strides[3] >> 1),
    )


def scratch(use: str, length: int) -> Bytes:
    """Memory of this thread for one use, until the next call with that use. It begins at a cache line.
    Fresh memory costs more than many a loop."""
    held: Bytes | None = _THREAD.__dict__.get(use)
    if held is None or len(held) < length:
        held = aligned(length)
        if length <= KEPT_BYTES:
            _THREAD.__dict__[use] = held
    return held[:length]


def aligned(length: int) -> Bytes:
    """Fresh memory that begins at a cache line."""
    memory = np.empty(length + LINE, np.uint8)
    first = -address_of(memory) % LINE
    return memory[first : first + length]


def largest(values: NDArray[np.uint16]) -> int:
    """The largest pattern without its sign; 16-bit floats compare like integers then. values: contiguous."""
    if library is None:
        return int((values & 0x7FFF).max())
    return int(library.tierd_largest(address_of(values), values.size))
