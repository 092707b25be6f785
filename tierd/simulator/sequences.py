"""Traces as arrays, and their requests in the core's form.

Runs over one trace share these arrays, which never change. tierd.cli.trace reads files. A block has
one number, 0 and up in the order of first appearance, and one hash, which contains the number.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.instant_driver import Sequence
from tierd.core.plan import PutQuery

Numbers = NDArray[np.int64]
"""Numbers of blocks in a trace."""

Column = NDArray[np.int64]

TOKENS_PER_BLOCK = 512
"""Tokens of a full block, if the trace does not give them."""
BLOCK_BYTES = 64 << 10
"""Bytes of a full block, if neither the trace nor the user gives them."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Lengths of blocks that engines encode. Each has a header. Of a full block, a payload of `rate`
    of its bytes follows, rounded up. The first block of a sequence and short ones keep their bytes."""

    header_bytes: int
    rate: Fraction

    def full_bytes(self, plain: int) -> int:
        """Length of a full block of so many bytes, not the first of its sequence."""
        return self.header_bytes + min(plain, math.ceil(plain * self.rate))

    def lengths(self, plain: Column, full: Column, *, is_exact: NDArray[np.bool_]) -> Column:
        """Of blocks with these lengths before encoding, and these of their full blocks: int64 [n]."""
        sizes, where = np.unique(full, return_inverse=True)
        encoded = np.array([self.full_bytes(size) for size in sizes.tolist()], np.int64)
        return np.where(is_exact, self.header_bytes + plain, encoded[where])


@dataclass(frozen=True, slots=True)
class Measure:
    """Sizes of blocks. block_bytes: of a full one before encoding; None: the trace's, else
    BLOCK_BYTES. whole: a short one takes as much. encoding: None: blocks are stored as they are."""

    block_bytes: int | None = None
    whole: bool = False
    encoding: Encoding | None = None

    def page_bytes(self, plain: int) -> int:
        """Stored length of a full block of so many bytes."""
        return self.encoding.full_bytes(plain) if self.encoding else plain


@dataclass(frozen=True, slots=True)
class Request:
    """One request. time_ms: since the start of the trace. blocks: ids; the last may be short.

    block_tokens: of a full block. block_bytes: as recorded, 0: unknown. namespace: as recorded.
    """

    time_ms: int
    tokens: int
    blocks: array[int] | tuple[int, ...]
    block_tokens: int = TOKENS_PER_BLOCK
    block_bytes: int = 0
    namespace: int = 0


@dataclass(frozen=True)
class Trace:
    """A trace of n requests. blocks int64: the number of each block access, request after request.

    starts int64 [n + 1]: where each request begins. name: as its user calls it.
    times_s float64 [n]. int64 [n]: tokens; full_tokens, full_bytes (0: unknown); namespaces.
    """

    name: str
    blocks: Numbers
    starts: Column
    times_s: NDArray[np.float64]
    tokens: Column
    full_tokens: Column
    full_bytes: Column
    namespaces: Column

    def __len__(self) -> int:
        """How many requests."""
        return len(self.tokens)

    @cached_property
    def distinct(self) -> int:
        """The number of distinct blocks."""
        return int(self.blocks.max(initial=-1)) + 1

    @cached_property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return int(np.diff(self.starts).max(initial=0))

    @cached_property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return int(self.tokens.sum())

    @cached_property
    def hashes(self) -> NDArray[np.uint8]:
        """By number: uint8 [distinct, 32]. Three words spread as evenly as a hash's, as sketches
        need (splitmix64), then the number + 1."""
        words = np.zeros((self.distinct, 4), "<u8")
        words[:, 3] = np.arange(1, self.distinct + 1)
        for word in range(3):
            mixed = (words[:, 3] + np.uint64(word << 40)) * np.uint64(0x9E37_79B9_7F4A_7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
            words[:, word] = mixed ^ (mixed >> np.uint64(31))
        return words.view(np.uint8)

    def of(self, request: int) -> Numbers:
        """The blocks of a request, first to last."""
        return self.blocks[self.starts[request] : self.starts[request + 1]]

    def distinct_bytes(self, measure: Measure) -> int:
        """Bytes of all blocks, once each."""
        if measure.whole:
            return self.distinct * (measure.block_bytes or BLOCK_BYTES)
        counts = np.diff(self.starts)
        full = np.repeat(self.full_tokens, counts)
        covered, size = full.copy(), np.repeat(self._full_bytes(measure), counts)
        covered[self.starts[1:] - 1] = self.tokens - (counts - 1) * self.full_tokens
        _, first = np.unique(self.blocks, return_index=True)
        plain = np.maximum(1, size * covered // full)
        if measure.encoding:
            is_exact = covered < full
            is_exact[self.starts[:-1]] = True
            plain = measure.encoding.lengths(plain, size, is_exact=is_exact)
        return int(plain[first].sum())

    def sequence(self, request: int, measure: Measure) -> Sequence:
        """A request in the driver's form."""
        said: dict[str, Any] = {
            "namespace": int(self.namespaces[request]) + 1,
            "hashes": self.hashes[self.of(request)],
            "tokens": int(self.tokens[request]),
            "tokens_per_block": int(self.full_tokens[request]),
            "block_bytes": int(measure.block_bytes or self.full_bytes[request] or BLOCK_BYTES),
        }
        if measure.encoding:
            return EncodedBlocks(**said, encoding=measure.encoding)
        return WholeBlocks(**said) if measure.whole else Sequence(**said)

    def _full_bytes(self, measure: Measure) -> Column:
        known = np.where(self.full_bytes > 0, self.full_bytes, BLOCK_BYTES)
        return np.full(len(self), measure.block_bytes, np.int64) if measure.block_bytes else known


@dataclass(frozen=True, slots=True)
class EncodedBlocks(Sequence):
    """A sequence whose blocks have the lengths of an encoding."""

    encoding: Encoding

    def put(self, first: int) -> PutQuery:
        """The blocks from number `first` on, to be written."""
        query = Sequence.put(self, first)
        blocks = query.blocks
        is_exact = blocks["tokens"] < self.tokens_per_block
        if first == 0:
            is_exact[:1] = True
        full = np.full(len(blocks), self.block_bytes, np.int64)
        blocks["length"] = self.encoding.lengths(blocks["length"].astype(np.int64), full, is_exact=is_exact)
        return query


class WholeBlocks(Sequence):
    """A sequence whose last block takes as many bytes as the others, even if it is short."""

    def put(self, first: int) -> PutQuery:
        """The blocks from number `first` on, to be written."""
        query = super().put(first)
        query.blocks["length"] = self.block_bytes
        return query


def numbers_of(hashes: NDArray[Any]) -> Numbers:
    """The numbers of blocks by their hashes, uint64 [n, 4] of the core."""
    return hashes[:, 3].astype(np.int64) - 1


def trace_of(requests: Iterable[Request], *, name: str) -> Trace:
    """A trace as arrays."""
    blocks, rows = array("q"), []
    for request in requests:
        blocks.extend(request.blocks)
        rows.append(
            (
                len(request.blocks),
                request.time_ms,
                request.tokens,
                request.block_tokens,
                request.block_bytes,
                request.namespace,
            )
        )
    columns = np.asarray(rows, np.int64).reshape(-1, 6).T
    counts, times_ms, tokens, full_tokens, full_bytes, namespaces = (column.copy() for column in columns)
    numbers = _renumbered(np.asarray(blocks), np.repeat(namespaces, counts))
    starts = np.concatenate(([0], np.cumsum(counts)))
    return Trace(name, numbers, starts, times_ms / 1000, tokens, full_tokens, full_bytes, namespaces)


def _renumbered(ids: Numbers, namespaces: Column) -> Numbers:
    """0, 1, ... in the order of their first appearance; one id in two namespaces is two blocks."""
    _, plain = np.unique(ids, return_inverse=True)
    _, space = np.unique(namespaces, return_inverse=True)
    _, first, inverse = np.unique(
        plain + space * (int(plain.max(initial=0)) + 1), return_index=True, return_inverse=True
    )
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[inverse], np.int64)
