"""Encodes the blocks of one namespace before they are stored, and decodes them again.

Two kinds of blocks keep their own bytes. One is the first block of a sequence: attention sinks are
in it (StreamingLLM, arXiv 2309.17453, section 3). The other is a short block, which may still grow.
A decoded block has the namespace's shape, and the namespace's codec or codec 0. Anything else is
refused, so that it counts as not stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierd.codecs import block as blocks
from tierd.codecs.block import HEADER, Codec, Context, Wanted
from tierd.codecs.calibration import Calibration, load
from tierd.codecs.named import BY_NUMBER, codec_named
from tierd.codecs.values import Bytes, KVShape
from tierd.core.formats.block import KVGeometry, NamespaceSpec
from tierd.errors import ConfigError, TierdError


def stays_exact(number: Any, tokens: Any, full_tokens: int) -> Any:
    """Whether a block is never encoded, for one block or arrays of them.

    True for the first block of a sequence, and for blocks that are not full. number: in its
    sequence, from 0.
    """
    return (number == 0) | (tokens < full_tokens)


@dataclass(frozen=True, slots=True)
class Coding:
    """codec: for all blocks but exact ones. full: the shape of a full block."""

    codec: Codec
    full: KVShape
    calibration: Calibration | None = None

    @property
    def text(self) -> str:
        """As in a namespace: the name and, if the codec is calibrated, the calibration's hash."""
        return f"{self.codec.name}@{self.calibration.hash.hex()}" if self.calibration else self.codec.name

    @property
    def most_bytes(self) -> int:
        """Length of the longest block. Any block may have codec 0."""
        return HEADER.itemsize + self.full.block_bytes

    def stored_bytes(self, tokens: int, *, number: int) -> int:
        """Length of a block of so many tokens, at most; exact if the codec has one length per shape.

        number: of the block in its sequence, from 0.
        """
        shape = self._shape(tokens)
        if self._is_exact(number, tokens):
            return HEADER.itemsize + shape.block_bytes
        return HEADER.itemsize + min(self.codec.lengths(shape).most, shape.block_bytes)

    def encode(self, block: Any, *, tokens: int, number: int) -> Bytes:
        """Header and payload. block: contiguous bytes, of so many tokens. number: of the block in its
        sequence, from 0. Raises InvalidArgument."""
        shape = self._shape(tokens)
        if self._is_exact(number, tokens):
            return blocks.exact(block, shape)
        context = Context(number * self.full.tokens, self.calibration)
        return blocks.encode(self.codec, block, shape, context)

    def decode(self, data: Any, *, tokens: int, out: Bytes | None = None) -> Bytes:
        """The block's bytes. out: memory for them, of their length. Raises CorruptRecord, Unsupported
        unless it is one of this coding."""
        known = {self.calibration.hash: self.calibration} if self.calibration else {}
        shape, number = self._shape(tokens), self.codec.number
        return blocks.decode(data, BY_NUMBER, known, wanted=Wanted(shape, number), out=out).block

    def _is_exact(self, number: int, tokens: int) -> bool:
        return bool(stays_exact(number, tokens, self.full.tokens))

    def _shape(self, tokens: int) -> KVShape:
        return self.full if tokens == self.full.tokens else replace(self.full, tokens=tokens)


def coding_of(name: str, calibration: str, *, geometry: KVGeometry, tokens_per_block: int) -> Coding:
    """The coding that a user's options ask for. calibration: path of its file, "" for none.

    Raises ConfigError for an unknown codec, and for a geometry that is unknown or that the codec
    does not take. So it does for a calibration that is missing, damaged, superfluous or of another
    model.
    """
    if not geometry.layers:
        raise ConfigError(
            f"codec {name[:32]!r}: the engine's blocks have no layers of one shape of keys and values; leave out "
            "`codec`"
        )
    try:
        codec, full = codec_named(name), KVShape(geometry, tokens_per_block)
        codec.check(full)
        held = load(Path(calibration)) if calibration else None
    except (TierdError, OSError) as error:
        raise ConfigError(f"codec {name[:32]!r} with calibration {calibration!r}: {error}") from error
    if codec.is_calibrated != bool(held):
        fault, remedy = (
            ("needs a calibration", "make one with `tierctl calibrate`, and give its file in `calibration`")
            if codec.is_calibrated
            else ("takes no calibration", "leave out `calibration`")
        )
        raise ConfigError(f"codec {name} {fault}; {remedy}")
    if held and _model(held.geometry) != _model(geometry):
        raise ConfigError(
            f"codec {name}: calibration {calibration} is for (layers, kv_heads, head_dim) {_model(held.geometry)}, the "
            f"engine has {_model(geometry)}; make one for this model with `tierctl calibrate`"
        )
    return Coding(codec, full, held)


def coded_spec(spec: NamespaceSpec, coding: Coding) -> NamespaceSpec:
    """The namespace of blocks in this coding. Only it shares blocks with other engines of the coding."""
    return replace(spec, codec=coding.text, block_bytes=coding.most_bytes, geometry=coding.full.geometry)


def _model(geometry: KVGeometry) -> tuple[int, int, int]:
    return geometry.layers, geometry.kv_heads, geometry.head_dim
