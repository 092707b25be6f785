"""The values of a KV block: shape, and conversion between 16-bit floats and float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.block import KVGeometry
from tierd.errors import InvalidArgument

Raw = NDArray[np.uint16]
"""Bit patterns of a block's values: uint16 [layers, 2, tokens, kv_heads, head_dim], keys first."""
Floats = NDArray[np.float32]
"""The same as float32."""
Bytes = NDArray[np.uint8]

DTYPES = ("bfloat16", "float16")
LAYOUTS = ("NHD", "HND")
VALUES_MAX = (1 << 31) - 1
"""Of a block: its bytes stay below 4 GiB, as in BlockMeta."""


class Sizes(NamedTuple):
    """Of a block's values, in this order. pair: 2, keys and values."""

    layers: int
    pair: int
    tokens: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one block: its namespace's geometry and its own number of tokens."""

    geometry: KVGeometry
    tokens: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument for an opaque or impossible shape."""
        g = self.geometry
        if g.dtype not in DTYPES or g.layout not in LAYOUTS:
            raise InvalidArgument(
                f"codec: dtype {g.dtype!r} in layout {g.layout!r} cannot be encoded; use one of {DTYPES} in one of "
                f"{LAYOUTS}"
            )
        if min(self.sizes) < 1 or self.values > VALUES_MAX:
            raise InvalidArgument(
                f"codec: a block of {self.sizes} cannot be encoded; give sizes of 1 or more, and at most {VALUES_MAX} "
                "values"
            )

    @property
    def sizes(self) -> Sizes:
        """The shape of its array of values."""
        g = self.geometry
        return Sizes(g.layers, 2, self.tokens, g.kv_heads, g.head_dim)

    @property
    def text(self) -> str:
        """For people: sizes, dtype and layout."""
        return f"{tuple(self.sizes)} {self.geometry.dtype} {self.geometry.layout}"

    @property
    def values(self) -> int:
        """Number of values."""
        g = self.geometry
        return 2 * g.layers * self.tokens * g.kv_heads * g.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of the block before encoding."""
        return 2 * self.values


def raw_of(block: Any, shape: KVShape) -> Raw:
    """A block's values, without a copy. block: contiguous bytes. Raises InvalidArgument."""
    data = np.frombuffer(block, np.uint8)
    if len(data) != shape.block_bytes:
        raise InvalidArgument(
            f"codec: the block has {len(data)} bytes, its shape {shape.sizes} has {shape.block_bytes}; pass the "
            "block's own shape"
        )
    layers, pair, tokens, heads, dim = shape.sizes
    if shape.geometry.layout == "HND":
        return data.view(np.uint16).reshape(layers, pair, heads, tokens, dim).transpose(0, 1, 3, 2, 4)
    return data.view(np.uint16).reshape(shape.sizes)


def bytes_of(raw: Raw, shape: KVShape) -> Bytes:
    """The block's bytes, in the layout of its geometry."""
    order = raw.transpose(0, 1, 3, 2, 4) if shape.geometry.layout == "HND" else raw
    return np.ascontiguousarray(order).reshape(-1).view(np.uint8)


def floats_of(raw: Raw, dtype: str) -> Floats:
    """The values as float32; exact."""
    if dtype == "float16":
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def rounded(values: Floats, dtype: str) -> Raw:
    """float32 rounded to nearest, ties to even. Finite values stay finite: they saturate."""
    if dtype == "float16":
        return np.clip(values, -65504.0, 65504.0).astype(np.float16).view(np.uint16)
    words = np.clip(values, -BF16_MAX, BF16_MAX).view(np.uint32)
    return ((words + np.uint32(0x7FFF) + ((words >> 16) & 1)) >> 16).astype(np.uint16)


BF16_MAX = np.array(0x7F7F0000, np.uint32).view(np.float32)[()]
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bit pattern of infinity. Patterns from it on, without the sign, are not finite."""
ROUNDING = {"bfloat16": (2.0**-8, 2.0**-134), "float16": (2.0**-11, 2.0**-25)}
"""Error of `rounded`, at most: relative for normal numbers, absolute for smaller ones."""
