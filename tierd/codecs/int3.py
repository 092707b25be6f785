"""Codec int3: rotated keys and values at 3 bits a value.

Payload: scales of all rows (float16), then three planes of one bit a value. Rows are in the order
[layer][keys, values][token][kv head].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierd.codecs import loops, rotated
from tierd.codecs.block import Context, Lengths, Payload, room, room_for_raw
from tierd.codecs.values import Bytes, KVShape, Raw, floats_of, rounded

BITS = 3


@dataclass(frozen=True, slots=True)
class Int3:
    """3.25 bits a value at head_dim 64."""

    number: int
    name: str = "int3"
    version: int = 1
    is_exact: bool = False
    is_calibrated: bool = False

    def check(self, shape: KVShape) -> None:
        """Raises Unsupported."""
        rotated.signs(shape.geometry.head_dim)

    def lengths(self, shape: KVShape) -> Lengths:
        """One length per shape."""
        length = 2 * (shape.values // shape.geometry.head_dim) + BITS * shape.values // 8
        return Lengths(length, length)

    def expected_bytes(self, shape: KVShape) -> int:
        """One length per shape."""
        return self.lengths(shape).most

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        if loops.library is not None:
            whole, data = room(self.lengths(shape).most, context)
            return Payload(data, rotated.native_encode(raw, shape, (BITS, BITS), data), whole)
        values = floats_of(raw, shape.geometry.dtype)
        done = rotated.encode(values.reshape(-1, shape.geometry.head_dim), BITS)
        planes = [np.packbits(done.codes >> bit & 1, bitorder="little") for bit in range(BITS)]
        return Payload(np.concatenate((done.scales.view(np.uint8), *planes)), done.error)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        rows = shape.values // shape.geometry.head_dim
        rotated.check_scales(payload[: 2 * rows])
        if loops.library is not None:
            return rotated.native_decode(payload, shape, room_for_raw(shape, context), (BITS, BITS))
        planes = np.unpackbits(payload[2 * rows :].reshape(BITS, -1), axis=1, bitorder="little")
        codes = planes[0] | planes[1] << 1 | planes[2] << 2
        scales = payload[: 2 * rows].view(np.float16)
        values = rotated.decode(codes.reshape(rows, -1), scales, BITS).reshape(shape.sizes)
        return rounded(values, shape.geometry.dtype)
