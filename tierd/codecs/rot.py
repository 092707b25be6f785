"""Codecs rot-8-8, rot-8-4 and rot-4-4: rotated keys and values in pages that kernels attend to.

Payload: [layer][kv head][tile of 16 tokens], each tile contiguous: key codes, value codes, 16 key
scales, 16 value scales (float16). At 4 bits and head_dim 128 a tile has 2,112 bytes, 4.125 bits a
value. Tokens beyond the block's end have scale 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierd.codecs import loops, rotated
from tierd.codecs.block import Context, Lengths, Payload, room, room_for_raw
from tierd.codecs.tiles import TILE_TOKENS, packed, unpacked
from tierd.codecs.values import Bytes, Floats, KVShape, Raw, floats_of, rounded
from tierd.errors import Unsupported

HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Rot:
    """key_bits, value_bits: 8 or 4."""

    number: int
    key_bits: int
    value_bits: int
    version: int = 1
    is_exact: bool = False
    is_calibrated: bool = False

    @property
    def name(self) -> str:
        """rot-8-4, for instance."""
        return f"rot-{self.key_bits}-{self.value_bits}"

    def check(self, shape: KVShape) -> None:
        """Raises Unsupported for a head_dim that no kernel takes."""
        if shape.geometry.head_dim not in HEAD_DIMS:
            raise Unsupported(
                f"codec {self.name}: head_dim {shape.geometry.head_dim} is not one of {HEAD_DIMS}; use int8"
            )

    def lengths(self, shape: KVShape) -> Lengths:
        """One length per shape."""
        length = self._tiles(shape) * sum(self._lengths(shape.geometry.head_dim))
        return Lengths(length, length)

    def expected_bytes(self, shape: KVShape) -> int:
        """One length per shape."""
        return self.lengths(shape).most

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        if loops.library is None:
            return self._plain_encode(raw, shape)
        whole, data = room(self.lengths(shape).most, context)
        return Payload(data, rotated.native_encode(raw, shape, data, (self.key_bits, self.value_bits)), whole)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        rotated.check_scales(payload.reshape(self._tiles(shape), -1)[:, -4 * TILE_TOKENS :])
        if loops.library is None:
            return self._plain_decode(payload, shape)
        return rotated.native_decode(payload, shape, room_for_raw(shape, context), (self.key_bits, self.value_bits))

    def _plain_encode(self, raw: Raw, shape: KVShape) -> Payload:
        values = floats_of(raw, shape.geometry.dtype)
        parts, scales, errors = [], [], []
        for pair, bits in enumerate((self.key_bits, self.value_bits)):
            tiles = _cut(values[:, pair])
            done = rotated.encode(tiles.reshape(-1, tiles.shape[-1]), bits)
            parts.append(packed(done.codes.reshape(tiles.shape), bits, turned=pair == 1))
            scales.append(done.scales.reshape(-1, TILE_TOKENS).view(np.uint8))
            errors.append(done.error)
        data = np.concatenate((*parts, *scales), axis=1).reshape(-1)
        return Payload(data, float(np.max(errors)))  # NaN stays NaN

    def _plain_decode(self, payload: Bytes, shape: KVShape) -> Raw:
        layers, _, tokens, heads, dim = shape.sizes
        ends = np.cumsum(self._lengths(dim))
        keys, coded, *scales = np.split(payload.reshape(self._tiles(shape), -1), ends[:-1], axis=1)
        values = np.empty(shape.sizes, np.float32)
        for pair, (data, bits) in enumerate(((keys, self.key_bits), (coded, self.value_bits))):
            codes = unpacked(data, dim, bits, turned=pair == 1).reshape(-1, dim)
            rows = rotated.decode(codes, np.ascontiguousarray(scales[pair]).view(np.float16).reshape(-1), bits)
            values[:, pair] = rows.reshape(layers, heads, -1, dim)[:, :, :tokens].transpose(0, 2, 1, 3)
        return rounded(values, shape.geometry.dtype)

    def _lengths(self, head_dim: int) -> list[int]:
        """Bytes of a tile's four parts."""
        codes = TILE_TOKENS * head_dim // 8
        return [self.key_bits * codes, self.value_bits * codes, 2 * TILE_TOKENS, 2 * TILE_TOKENS]

    @staticmethod
    def _tiles(shape: KVShape) -> int:
        g = shape.geometry
        return g.layers * g.kv_heads * -(-shape.tokens // TILE_TOKENS)


def _cut(values: Floats) -> Floats:
    """[layers, tokens, heads, dim] -> [layers * heads * tiles, 16, dim], filled with zeros."""
    layers, tokens, heads, dim = values.shape
    filled = np.zeros((layers, heads, -(-tokens // TILE_TOKENS) * TILE_TOKENS, dim), np.float32)
    filled[:, :, :tokens] = values.transpose(0, 2, 1, 3)
    return filled.reshape(-1, TILE_TOKENS, dim)
