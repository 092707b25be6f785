"""Rotated codes lie as the tensor cores' operand takes them."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.codecs.rotated import hadamard
from tierd.codecs.tiles import order, packed, unpacked


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packing_is_undone(dim: int, bits: int, turned: bool) -> None:
    """Each code has one place, and unpacking finds it again."""
    assert sorted(order(dim, bits, turned=turned)) == list(range(16 * dim))
    codes = np.random.default_rng(dim).integers(0, 1 << bits, (3, 16, dim)).astype(np.uint8)
    data = packed(codes, bits, turned=turned)
    assert data.shape == (3, 2 * dim * bits)
    assert np.array_equal(unpacked(data, dim, bits, turned=turned), codes)


@pytest.mark.parametrize("turned", [False, True])
def test_a_lane_finds_its_fragment(turned: bool) -> None:
    """Pair i of a lane's word has row l / 4 + 8 (i % 2), and columns from 2 (l % 4) + 8 (i // 2) on."""
    dim = 128
    codes = np.random.default_rng(0).integers(0, 16, (1, 16, dim)).astype(np.uint8)
    words = packed(codes, 4, turned=turned).view("<u4").reshape(dim // 64, 32, 4)
    for block in range(dim // 16):
        part = codes[0, :, 16 * block : 16 * block + 16]
        matrix = part.T if turned else part
        for lane in range(32):
            word = int(words[block // 4, lane, block % 4])
            for i in range(4):
                pair = (word >> (4 * i)) & 0x000F000F  # one shift and one mask, as the kernel does
                row, column = lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2)
                assert (pair & 15, pair >> 16) == (matrix[row, column], matrix[row, column + 1])


def test_the_transform_is_hadamards() -> None:
    """It is orthogonal, its own inverse, and the first row of its matrix is constant."""
    matrix = hadamard(np.eye(64, dtype=np.float32))
    assert np.allclose(matrix @ matrix.T, np.eye(64), atol=1e-6) and np.allclose(matrix[0], 1 / 8)
    rows = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    assert np.allclose(hadamard(hadamard(rows)), rows, atol=1e-5)
