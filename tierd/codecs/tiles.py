"""The order of rotated codes in a page, so that tensor cores can multiply them as they lie.

A tile has 16 tokens of one head. Its codes are cut into blocks of 16 x 16, and four blocks adjoin.
Each lane of a warp has one word per block at 4 bits, and two at 8. They are the A operand of
the product m16n8k16 in cuda/src/turned.h (PTX ISA, "Matrix Fragments for mma.m16n8k16"). The rows
of a block are tokens for keys, and channels for values.

Pair i of a lane has the values of register i. At 4 bits, nibble i of the low half-word is its first
value, nibble i of the high half-word its second. At 8 bits, word i // 2 has four bytes: the first
values of its two pairs, then the second ones.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

TILE_TOKENS = 16
BLOCK = 16
ADJOINING = 4
"""Blocks whose words adjoin: one load of 16 bytes per lane at 4 bits."""
LANES = 32

Codes = NDArray[np.uint8]


@cache
def order(head_dim: int, bits: int, *, turned: bool) -> NDArray[np.intp]:
    """The source of each code of a tile: intp [16 * head_dim], indices into [16, head_dim].
    turned: rows of a block are channels."""
    lane, register, half = np.meshgrid(np.arange(LANES), np.arange(4), np.arange(2), indexing="ij")
    row = lane // 4 + 8 * (register % 2)
    column = 2 * (lane % 4) + 8 * (register // 2) + half
    token, channel = (column, row) if turned else (row, column)
    one = token * head_dim + channel  # [lane, register, half] of block 0
    if bits == 4:
        words = one.transpose(0, 2, 1).reshape(LANES, 1, 8)  # first values of the four pairs, then the second
    else:
        words = one.reshape(LANES, 2, 2, 2).transpose(0, 1, 3, 2).reshape(LANES, 2, 4)
    blocks = np.arange(head_dim // BLOCK) * BLOCK
    adjoining = min(ADJOINING, len(blocks))
    starts = blocks.reshape(-1, adjoining)  # [group, block]
    every = words[None, :, None] + starts[:, None, :, None, None]  # [group, lane, block, word, code]
    return every.reshape(-1)


def packed(codes: Codes, bits: int, *, turned: bool) -> Codes:
    """Codes of tiles, uint8 [tiles, 16, head_dim] -> uint8 [tiles, bytes]."""
    tiles, _, head_dim = codes.shape
    lying: Codes = codes.reshape(tiles, -1)[:, order(head_dim, bits, turned=turned)]
    return lying if bits == 8 else np.bitwise_or(lying[:, 0::2], np.left_shift(lying[:, 1::2], 4), dtype=np.uint8)


def unpacked(data: Codes, head_dim: int, bits: int, *, turned: bool) -> Codes:
    """The inverse of `packed`."""
    lying = data if bits == 8 else np.stack((data & 15, data >> 4), axis=-1).reshape(len(data), -1)
    codes = np.empty_like(lying)
    codes[:, order(head_dim, bits, turned=turned)] = lying
    return codes.reshape(len(data), TILE_TOKENS, head_dim)
