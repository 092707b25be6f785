"""Codec 0 as a codec to measure: each block keeps its own bytes."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.codecs import block
from tierd.codecs.block import Context, Lengths, Payload
from tierd.codecs.values import Bytes, KVShape, Raw, bytes_of, raw_of


@dataclass(frozen=True, slots=True)
class Identity:
    """16 bits a value, and the header."""

    name: str = "identity"
    number: int = block.IDENTITY
    version: int = 1
    is_exact: bool = True
    is_calibrated: bool = False

    def check(self, shape: KVShape) -> None:
        """Every shape will do."""

    def lengths(self, shape: KVShape) -> Lengths:
        """The block's own."""
        return Lengths(shape.block_bytes, shape.block_bytes)

    def expected_bytes(self, shape: KVShape) -> int:
        """The block's own."""
        return shape.block_bytes

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        return Payload(bytes_of(raw, shape), 0.0)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        return raw_of(payload, shape)


IDENTITY = Identity()
