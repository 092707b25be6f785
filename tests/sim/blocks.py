"""Blocks of the simulation: names, queries, and their pages in a client's memory.

Purpose: `Blocks`, a piece of a chain as queries and commits need it; `Page`, a block's bytes in
memory. Non-purpose: calls (client.py). Invariant: names, lengths and tokens follow from a chain's
number, bytes from namespace and hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.sim.arena import Segment
from tests.sim.oracle import Key, bytes_of
from tierd.core.formats.layout import GENERATION, generation_offset
from tierd.core.formats.model import COMMIT_BLOCK, PUT_BLOCK, ROOT, StructArray
from tierd.core.plan import GroupQuery, PutQuery
from tierd.testing.content import chain

TOKENS = 16
CHAINS = 3
SHORT_TAIL = 3
"""A chain whose number is a multiple of this ends in a short block."""


@cache
def hashes_of(number: int, depth: int) -> StructArray:
    """uint8 [depth, 32] of a chain, read-only."""
    return chain(number, depth)


@dataclass(frozen=True, slots=True)
class Page:
    """A block in the memory that a client maps."""

    key: Key
    segment: Segment
    slot: int
    offset: int
    length: int
    generation: int

    def bytes(self) -> bytes:
        """The present bytes."""
        assert self.segment.data is not None
        return bytes(self.segment.data[self.offset : self.offset + self.length])

    def write(self, start: int, stop: int) -> None:
        """Writes a part of the block's bytes."""
        assert self.segment.data is not None
        data = bytes_of(self.key, self.length)[start:stop]
        self.segment.data[self.offset + start : self.offset + start + len(data)] = data

    def spoil(self, at: int) -> None:
        """Changes a byte."""
        assert self.segment.data is not None
        self.segment.data[self.offset + at % self.length] ^= 0x55

    @property
    def is_current(self) -> bool:
        """Whether the catalogue's word has the handle's generation; a lease checks the same."""
        word = np.frombuffer(self.segment.table, "<u8", count=1, offset=generation_offset(self.slot))[0]
        return int(word & GENERATION) == self.generation


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks first to stop - 1 of a chain of depth blocks, in a namespace."""

    namespace: int
    chain: int
    first: int
    stop: int
    depth: int
    block_bytes: int

    @property
    def hashes(self) -> StructArray:
        """uint8 [blocks, 32], from the chain's first block to the last of these."""
        return hashes_of(self.chain, self.depth)[: self.stop]

    def key(self, number: int) -> Key:
        """The key of a block of the chain."""
        return self.namespace, self.hashes[number].tobytes()

    def tokens(self, number: int) -> int:
        """Tokens of a block."""
        return 7 if number == self.depth - 1 and self.chain % SHORT_TAIL == 0 else TOKENS

    def length(self, number: int) -> int:
        """Length of a block in bytes."""
        return self.block_bytes * self.tokens(number) // TOKENS

    @property
    def numbers(self) -> range:
        """The blocks' numbers in the chain."""
        return range(self.first, self.stop)

    def query(self) -> GroupQuery:
        """A query for all blocks from the chain's first on."""
        tokens = sum(self.tokens(i) for i in range(self.stop))
        return GroupQuery((self.namespace,), self.hashes, TOKENS, tokens)

    def put(self, *, private: bool) -> PutQuery:
        """A reservation of these blocks."""
        blocks = np.zeros(len(self.numbers), PUT_BLOCK)
        if not private:
            blocks["hash"] = self.hashes[self.first :]
        blocks["tokens"] = [self.tokens(i) for i in self.numbers]
        blocks["length"] = [self.length(i) for i in self.numbers]
        return PutQuery(self.namespace, self.parent(self.first), self.first, blocks)

    def parent(self, number: int) -> bytes:
        """Hash of the block before."""
        return self.hashes[number - 1].tobytes() if number else ROOT

    def named(self, indices: Sequence[int]) -> StructArray:
        """COMMIT_BLOCK of some of these, by their indices in the reservation."""
        rows = np.zeros(len(indices), COMMIT_BLOCK)
        for row, index in zip(rows, indices, strict=True):
            number = self.first + index
            row["hash"] = self.hashes[number]
            row["parent"] = np.frombuffer(self.parent(number), np.uint8)
            row["index"], row["position"] = index, number
            row["tokens"], row["length"] = self.tokens(number), self.length(number)
        return rows
