"""Codecs kivi-4 and kivi-2: asymmetric rounding in groups of 32 (KIVI, arXiv 2402.02750, section 3).

A group of keys is one channel over 32 consecutive tokens, after RoPE. A group of values is 32
channels of one token. Each has a minimum and a step in float16. Tokens beyond the last 32 stay as
they are: the paper's residual.

Payload: [layer][32 tokens][kv head], each tile contiguous: key codes, value codes, key steps, key
minima, value steps, value minima. Then the values of the last tokens, [layer][keys, values][token].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops
from tierd.codecs.block import Context, Lengths, Payload, room, room_for_raw
from tierd.codecs.values import INFINITY, Bytes, Floats, KVShape, Raw, floats_of, rounded
from tierd.errors import CorruptRecord, Unsupported

GROUP = 32


class _Groups(NamedTuple):
    """codes: float32, whole numbers. steps, minima: float16, one per group. error: largest of a value."""

    codes: Floats
    steps: NDArray[np.float16]
    minima: NDArray[np.float16]
    error: float


@dataclass(frozen=True, slots=True)
class Kivi:
    """bits: 4 or 2. A value has one bit more, for step and minimum."""

    number: int
    bits: int
    version: int = 1
    is_exact: bool = False
    is_calibrated: bool = False

    @property
    def name(self) -> str:
        """kivi-2, for instance."""
        return f"kivi-{self.bits}"

    def check(self, shape: KVShape) -> None:
        """Raises Unsupported."""
        if shape.geometry.head_dim % GROUP:
            raise Unsupported(
                f"codec {self.name}: head_dim {shape.geometry.head_dim} is not a multiple of {GROUP}; use int8"
            )

    def lengths(self, shape: KVShape) -> Lengths:
        """One length per shape."""
        layers, _, tokens, heads, dim = shape.sizes
        length = self._tiles(shape) * sum(self._lengths(dim)) + 4 * layers * (tokens % GROUP) * heads * dim
        return Lengths(length, length)

    def expected_bytes(self, shape: KVShape) -> int:
        """One length per shape."""
        return self.lengths(shape).most

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        whole, data = room(self.lengths(shape).most, context)
        error = self._plain_encode(raw, shape, data) if loops.library is None else self._native_encode(raw, shape, data)
        last = raw[:, :, shape.tokens - shape.tokens % GROUP :].reshape(-1).view(np.uint8)
        data[len(data) - len(last) :] = last
        return Payload(data, error, whole)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        raw = room_for_raw(shape, context)
        coded, last = np.split(payload, [self._tiles(shape) * sum(self._lengths(shape.geometry.head_dim))])
        if len(coded):
            self._check_scales(coded, shape)
            if loops.library is None:
                self._plain_decode(coded, shape, raw)
            else:
                self._native(loops.library.tierd_kivi_decode, raw, shape, coded)
        rest = raw[:, :, shape.tokens - shape.tokens % GROUP :]
        rest[...] = np.ascontiguousarray(last).view(np.uint16).reshape(rest.shape)
        return raw

    def _native_encode(self, raw: Raw, shape: KVShape, data: Bytes) -> float:
        assert loops.library is not None
        bits = self._native(loops.library.tierd_kivi_encode, raw, shape, data)
        return float(np.array(bits, np.uint32).view(np.float32))

    def _native(self, loop: Callable[..., int], raw: Raw, shape: KVShape, data: Bytes) -> int:
        scratch = np.empty(GROUP // 4 * shape.geometry.head_dim, np.float32)
        return loop(loops.described(raw, shape), self.bits, loops.address_of(scratch), loops.address_of(data))

    def _check_scales(self, coded: Bytes, shape: KVShape) -> None:
        """Raises CorruptRecord for a step or minimum that is not finite."""
        codes = sum(self._lengths(shape.geometry.head_dim)[:2])
        scales = coded.reshape(self._tiles(shape), -1)[:, codes:].view(np.uint16)
        if loops.largest(np.ascontiguousarray(scales)) >= INFINITY["float16"]:
            raise CorruptRecord(f"codec {self.name}: a group's step or minimum is not finite; read another copy")

    def _plain_encode(self, raw: Raw, shape: KVShape, data: Bytes) -> float:
        """Writes tiles to data. Returns the largest error; NaN stays NaN."""
        whole, dim = shape.tokens - shape.tokens % GROUP, shape.geometry.head_dim
        values = floats_of(raw[:, :, :whole], shape.geometry.dtype)
        parts, scales, errors = [], [], [0.0]
        for pair, axis in ((0, 1), (1, -1)):
            tiles = _cut(values[:, pair])
            by_group = tiles.reshape(len(tiles), GROUP, dim // GROUP, GROUP) if pair else tiles
            done = self._grouped(by_group, axis)
            parts.append(self._packed(done.codes.reshape(tiles.shape)))
            scales += [array.reshape(len(tiles), dim).view(np.uint8) for array in (done.steps, done.minima)]
            errors.append(done.error)
        tiles_data = np.concatenate((*parts, *scales), axis=1).reshape(-1)
        data[: len(tiles_data)] = tiles_data
        return float(np.max(errors))

    def _plain_decode(self, coded: Bytes, shape: KVShape, raw: Raw) -> None:
        """Writes the tiles' tokens to raw."""
        layers, _, tokens, heads, dim = shape.sizes
        whole, lengths, tiles = tokens - tokens % GROUP, self._lengths(dim), self._tiles(shape)
        keys, values, *scales = np.split(coded.reshape(tiles, sum(lengths)), np.cumsum(lengths)[:-1], axis=1)
        for pair, part in enumerate((keys, values)):
            groups = (tiles, GROUP, dim // GROUP, GROUP) if pair else (tiles, GROUP, dim)
            sizes = (tiles, GROUP, dim // GROUP, 1) if pair else (tiles, 1, dim)
            steps, minima = (
                np.ascontiguousarray(each).view(np.float16).astype(np.float32).reshape(sizes)
                for each in scales[2 * pair : 2 * pair + 2]
            )
            decoded = self._unpacked(part, dim).reshape(groups) * steps + minima
            joined = decoded.reshape(layers, whole // GROUP, heads, GROUP, dim).transpose(0, 1, 3, 2, 4)
            raw[:, pair, :whole] = rounded(joined.reshape(layers, whole, heads, dim), shape.geometry.dtype)

    @staticmethod
    def _tiles(shape: KVShape) -> int:
        g = shape.geometry
        return g.layers * (shape.tokens // GROUP) * g.kv_heads

    def _lengths(self, head_dim: int) -> list[int]:
        """Bytes of a tile's six parts."""
        codes = GROUP * head_dim * self.bits // 8
        return [codes, codes, *[2 * head_dim] * 4]

    def _grouped(self, tiles: Floats, axis: int) -> _Groups:
        """Codes of groups along an axis."""
        top = np.float32((1 << self.bits) - 1)
        zero = np.float32(0)  # a sum with it is never -0
        minima = (tiles.min(axis=axis, keepdims=True) + zero).astype(np.float16)
        lows = minima.astype(np.float32)
        spans = np.maximum(tiles.max(axis=axis, keepdims=True) - lows, zero) + zero
        steps = (spans * (np.float32(1) / top)).astype(np.float16)
        widths = steps.astype(np.float32)
        inverse = np.float32(1) / np.where(widths > 0, widths, np.float32(np.inf))
        codes = np.clip(np.rint((tiles - lows) * inverse), zero, top)
        return _Groups(codes, steps, minima, float(np.abs(tiles - (codes * widths + lows)).max(initial=0.0)))

    def _packed(self, codes: Floats) -> Bytes:
        """[tiles, 32, dim] -> [tiles, bytes]. A byte has one channel of tokens t, t + n, ..., lowest
        bits first; n is 32 * bits / 8."""
        tiles, _, dim = codes.shape
        parts = codes.astype(np.uint8).reshape(tiles, 8 // self.bits, GROUP * self.bits // 8, dim)
        data = parts[:, 0].copy()
        for i in range(1, 8 // self.bits):
            data |= parts[:, i] << np.uint8(i * self.bits)
        return data.reshape(tiles, GROUP * self.bits // 8 * dim)

    def _unpacked(self, data: Bytes, head_dim: int) -> Floats:
        """The inverse of `_packed`."""
        parts = [data >> np.uint8(i * self.bits) & np.uint8((1 << self.bits) - 1) for i in range(8 // self.bits)]
        return np.stack(parts, axis=1).reshape(len(data), GROUP, head_dim).astype(np.float32)


def _cut(values: Floats) -> Floats:
    """[layers, tokens, heads, dim] -> [layers * tiles * heads, 32, dim]."""
    layers, tokens, heads, dim = values.shape
    tiles = values.reshape(layers, tokens // GROUP, GROUP, heads, dim).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(tiles).reshape(-1, GROUP, dim)
