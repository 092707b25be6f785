"""Bytes of keys and values: of a token, of a request, and what allocation wastes."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.codecs.named import codec_named
from tierd.codecs.values import KVShape
from tierd.core.formats.block import KVGeometry
from tierd.errors import InvalidArgument
from tierd.plan.models import Model

BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8": 8.0}
CODECS = ("rot-8-8", "rot-8-4", "rot-4-4")
TOKENS_PER_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Form:
    """How values are kept. bits: of one, scales included."""

    name: str
    bits: float

    def token_bytes(self, model: Model) -> float:
        """Of a token in all layers, before any window."""
        return model.token_values * self.bits / 8

    def request_bytes(self, model: Model, tokens: int) -> float:
        """Of a request of so many tokens; windows and states count."""
        return model.request_values(tokens) * self.bits / 8 + model.state_bytes


def form_of(name: str) -> Form:
    """A dtype, or a codec of rotated codes with its scales, for heads of 128. Raises InvalidArgument."""
    if name in BITS:
        return Form(name, BITS[name])
    if name not in CODECS:
        raise InvalidArgument(f"--dtype: {name!r} is not known; give one of {', '.join((*BITS, *CODECS))}")
    shape = KVShape(KVGeometry(1, 8, 128, "bfloat16"), TOKENS_PER_BLOCK)
    return Form(name, 16 * codec_named(name).lengths(shape).most / shape.block_bytes)


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of allocated memory that hold nothing. contiguous: room for `context` tokens each.
    paged: half of a block each."""

    contiguous: float
    paged: float


def waste_of(model: Model, *, context: int, mean: float) -> Waste:
    """context: of the longest request. mean: tokens of a request in its middle."""
    used, whole = model.request_values(round(mean)), model.request_values(context)
    block = model.request_values(TOKENS_PER_BLOCK) / 2
    return Waste(max(0.0, 1 - used / whole) if whole else 0.0, block / (used + block) if used else 0.0)
