"""Products with a basis of bfloat16: on tiles (AMX, tierd/native/codecs/product.h), else in float32.

A product of two numbers of bfloat16 is exact in float32, and so is that of a multiple below 2^15
with one. So machines differ in the order of sums alone. They may round a coefficient to different
multiples; the values of given multiples differ by no more than `slack`.

Tiles take numbers below 2^-126 as 0. A basis has none, and a sum loses at most 2^-126 per term.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops
from tierd.codecs.values import Floats, floats_of, rounded

Patterns = NDArray[np.uint16]
"""Numbers of bfloat16."""
Multiples = NDArray[np.int16]
"""Of a step: [coefficients, tokens]."""
FARTHEST = 32767
"""The largest multiple."""
UNIT = 2.0**-24
"""Of float32: the largest relative error of one operation."""
LEAST = 2.0**-126
"""The least normal number of float32 and bfloat16."""
_SIDE, _DEPTH = 16, 32
_PRODUCT = struct.Struct("<5Q2f")


class Off(NamedTuple):
    """largest: error of a value, as this machine decodes. slack: by which other machines may differ.
    top: the largest size of a value."""

    largest: float
    slack: float
    top: float


class Place(NamedTuple):
    """block, turns: TierdBlock and TierdTurns of codecs.cpp. first: of a group's values, in a token."""

    block: bytes
    turns: bytes
    first: int
    head_dim: int


def patterns_of(x: Floats) -> Patterns:
    """x rounded to bfloat16, without subnormal numbers."""
    return rounded(np.where(np.abs(x) < LEAST, np.float32(0), x), "bfloat16")


def floats_of_patterns(x: Patterns) -> Floats:
    """The numbers; exact."""
    return floats_of(x, "bfloat16")


@dataclass(frozen=True)
class Basis:
    """forward, inverse: uint16 [coefficients, n], a group's. See transform_fit.Basis."""

    forward: Patterns
    inverse: Patterns

    @cached_property
    def floats(self) -> tuple[Floats, Floats]:
        """Both as float32."""
        return floats_of_patterns(self.forward), floats_of_patterns(self.inverse)

    @cached_property
    def tiles(self) -> tuple[Patterns, Patterns]:
        """Both in the order of product.h."""
        left, right = _padded(self.forward), _padded(self.inverse)
        rows, depth = len(left) // _SIDE, left.shape[1] // _DEPTH
        first = left.reshape(rows, _SIDE, depth, _DEPTH).transpose(0, 2, 1, 3)
        rows, depth = right.shape[1] // _SIDE, len(right) // _DEPTH
        second = right.reshape(depth, _SIDE, 2, rows, _SIDE).transpose(3, 0, 1, 4, 2)
        return _aligned(first), _aligned(second)

    @cached_property
    def lengths(self) -> Floats:
        """Of the longest column of each 32 rows of the inverse, or what is left of them."""
        parts = (floats_of_patterns(self.inverse[at : at + _DEPTH]) for at in range(0, len(self.inverse), _DEPTH))
        return np.sqrt([np.square(part).sum(axis=0).max() for part in parts], dtype=np.float32)

    def multiples(self, rows: Floats, rank: int, step: np.float32) -> Multiples | None:
        """The nearest multiples of the step to the first `rank` coefficients of rows: [tokens, n],
        contiguous. None: one is beyond FARTHEST."""
        inverse = np.float32(1 / step)
        if not has_tiles():
            q = np.rint(self.floats[0][:rank] @ rows.T * inverse)
            return q.astype(np.int16) if np.abs(q).max() <= FARTHEST else None
        assert loops.library is not None
        tokens, width = rows.shape
        found = np.empty((rank, tokens), np.int16)
        head = _PRODUCT.pack(loops.address_of(self.tiles[0]), rank, len(self.forward), width, tokens, step, inverse)
        scratch = loops.scratch("product", 2 * _up(tokens) * _up(width))
        fits = loops.library.tierd_product_forward(
            *(head, loops.address_of(rows), loops.address_of(scratch), loops.address_of(found))
        )
        return found if fits else None

    def values(self, q: Multiples, step: np.float32, to: Floats | None = None) -> Floats:
        """Rows without their mean of multiples: [tokens, n]. to: their place, contiguous."""
        if to is None:
            to = np.empty((q.shape[1], self.inverse.shape[1]), np.float32)
        if has_tiles():
            assert loops.library is not None
            call = self._call(q, step)
            loops.library.tierd_product_values(*call.arguments, loops.address_of(to), loops.address_of(call.found))
        else:
            np.multiply(self._sums(q), step, out=to)
        return to

    def put(self, q: Multiples, step: np.float32, place: Place) -> None:
        """Writes the values into a block; for tiles, and head_dims that are multiples of 32."""
        assert loops.library is not None
        call = self._call(q, step)
        values = loops.scratch("rows", 4 * place.head_dim * q.shape[1])
        loops.library.tierd_product_block(
            *(*call.arguments, place.block, place.turns, place.first),
            *(loops.address_of(values), loops.address_of(call.found)),
        )

    def off(self, q: Multiples, step: np.float32, rows: Floats) -> Off:
        """The error of `values` against rows.

        The slack holds for any order of sums: a unit per term, of the sum of the terms' sizes. See
        Higham, Accuracy and Stability of Numerical Algorithms, section 4.2. Cauchy and Schwarz
        bound the sizes of each 32 coefficients together. Tiles split multiples beyond 256: these
        are twice the terms, of twice the size at most.
        """
        rank = len(q)
        if has_tiles():
            assert loops.library is not None
            call = self._call(q, step)
            loops.library.tierd_product_errors(*call.arguments, loops.address_of(rows), loops.address_of(call.found))
            largest, top, *squares = call.found.tolist()
        else:
            largest, top = (float(np.abs(x).max()) for x in (rows - self._sums(q) * step, rows))
            every = np.square(q, dtype=np.float32)
            squares = list(np.add.reduceat(every, np.arange(0, rank, _DEPTH), axis=0).max(axis=1))
        size = (1 + 64 * UNIT) * float(np.sqrt(squares) @ self.lengths[: len(squares)])
        terms = UNIT * ((rank + 8) + 2 * (2 * rank + 8))
        return Off(largest, float(step) * (terms * size + 4 * rank * LEAST), top)

    def _sums(self, q: Multiples) -> Floats:
        found: Floats = q.T.astype(np.float32) @ self.floats[1][: len(q)]
        return found

    def _call(self, q: Multiples, step: np.float32) -> _Call:
        """For products with the inverse."""
        rank, tokens = q.shape
        size = (rank, len(self.inverse), self.inverse.shape[1], tokens)
        head = _PRODUCT.pack(loops.address_of(self.tiles[1]), *size, step, 0.0)
        scratch = loops.scratch("product", 4 * _up(tokens) * _up(rank) + 4 * _up(rank))
        arguments = (head, loops.address_of(q), loops.address_of(scratch))
        return _Call(arguments, np.empty(2 + _up(rank) // _DEPTH, np.float32))


class _Call(NamedTuple):
    """arguments: TierdProduct, multiples and scratch memory of product.h. found: room for its results."""

    arguments: tuple[bytes, int, int]
    found: Floats


def has_tiles() -> bool:
    """Whether this machine has tiles."""
    return loops.library is not None and bool(loops.library.tierd_has_tiles())


def _up(count: int) -> int:
    return -(-count // 32) * 32


def _padded(matrix: Patterns) -> Patterns:
    return np.pad(matrix, [(0, _up(size) - size) for size in matrix.shape])


def _aligned(tiles: NDArray[Any]) -> Patterns:
    """A copy that begins at a cache line: others load at half the speed or less.."""
    found: Patterns = loops.aligned(2 * tiles.size).view(np.uint16)
    found[:] = tiles.reshape(-1)
    return found
