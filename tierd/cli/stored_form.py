"""Options --codec, --geometry and --bits: lengths of blocks that engines encode.

`tierctl simulate` and `tierctl replay` share them. Nothing is encoded here. The length of an
encoded block follows from its shape, or from --bits if it depends on values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import click

from tierd.cli.completion import several
from tierd.codecs.block import HEADER
from tierd.codecs.named import BY_NAME, codec_named
from tierd.codecs.values import KVShape
from tierd.core.formats.block import KVGeometry
from tierd.errors import InvalidArgument
from tierd.simulator.sequences import Encoding

USUAL = KVGeometry(1, 8, 128, "bfloat16")
"""The geometry whose rate is used if none is given."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """As on the command line. geometry: LAYERSxHEADSxDIM. bits: of a value. block_bytes: before encoding."""

    codec: str | None = None
    geometry: str | None = None
    bits: float | None = None
    block_bytes: int | None = None

    def block_bytes_of(self, tokens: int) -> int | None:
        """Bytes of a full block of so many tokens, before encoding; None: not given. Raises InvalidArgument."""
        if self.geometry and self.block_bytes:
            raise InvalidArgument("--geometry: it determines --block-bytes; leave out one of them")
        return KVShape(geometry_of(self.geometry), tokens).block_bytes if self.geometry else self.block_bytes

    def encoding(self, tokens: int) -> Encoding | None:
        """Lengths of encoded blocks of so many tokens; None without a codec.

        Raises InvalidArgument, Unsupported.
        """
        if self.codec is None:
            if self.bits:
                raise InvalidArgument("--bits: there is no --codec; name one")
            return None
        codec, shape = codec_named(self.codec), KVShape(geometry_of(self.geometry) if self.geometry else USUAL, tokens)
        codec.check(shape)
        least, most = codec.lengths(shape)
        if self.bits is None and least < most:
            raise InvalidArgument(f"--codec: the lengths of {codec.name} depend on the values; give --bits, of a value")
        rate = Fraction(most, shape.block_bytes) if self.bits is None else Fraction(self.bits) / 16
        return Encoding(HEADER.itemsize, rate)


def geometry_of(text: str) -> KVGeometry:
    """`32x8x128`: layers, kv heads and head_dim, of 16-bit values. Raises InvalidArgument."""
    if not re.fullmatch(r"\d{1,6}x\d{1,6}x\d{1,6}", text):
        raise InvalidArgument(f"--geometry: {text!r} is not LAYERSxHEADSxDIM; write for example 32x8x128")
    layers, heads, dim = map(int, text.split("x"))
    return KVGeometry(layers, heads, dim, "bfloat16")


def encoded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the three options to a command."""
    for option in (
        click.option(
            "--bits",
            type=click.FloatRange(0, 16, min_open=True),
            help="Bits of a value under --codec. [default: the codec's, if they are fixed]",
        ),
        click.option(
            "--geometry",
            metavar="LAYERSxHEADSxDIM",
            help="Shape of the model's KV, of 16-bit values; replaces --block-bytes.",
        ),
        click.option(
            "--codec",
            metavar="NAME",
            shell_complete=several(BY_NAME),
            help=f"Blocks have the lengths of this codec: {', '.join(BY_NAME)}.",
        ),
    ):
        command = option(command)
    return command
