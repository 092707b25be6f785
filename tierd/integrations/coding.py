"""The option `codec` of engines: encodes blocks from their pieces, decodes them into pieces.

Threads encode several blocks at a time. A load copies stored blocks first. It decodes the copies
after the lease was checked, and each block's own checksum is checked too. An engine whose memory
has the values in another order than a block gives that order to `Codings.arrange`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.client.connect import forks
from tierd.codecs.coding import Coding, coded_spec, coding_of
from tierd.codecs.loops import scratch
from tierd.core.formats.block import KVGeometry, NamespaceSpec
from tierd.errors import ConfigError, TierdError
from tierd.integrations.options import Options
from tierd.integrations.pieces import Bytes, Pieces, copy_in, copy_out

THREADS = 4
"""Blocks that are encoded or decoded at a time, at most."""
Order = NDArray[np.intp]
"""intp [values]: the place in the engine's memory of each value of a block, whose order is [layers,
keys and values, tokens, kv_heads, head_dim]. An order of one layer's values holds in each layer."""
T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """A block to encode. number: of the block in its sequence, from 0."""

    pieces: Pieces
    tokens: int
    number: int


@dataclass(frozen=True, slots=True)
class Target:
    """A copied block to decode. index: in its group's leased blocks."""

    index: int
    data: Bytes
    pieces: Pieces
    tokens: int


@dataclass(frozen=True, slots=True)
class Engine:
    """A coding, and the order of the engine's memory; None: the block's."""

    coding: Coding
    order: Order | None = None

    def encoded(self, source: Source) -> Bytes:
        """The stored form of a block. Raises InvalidArgument."""
        block = scratch("block", self._length(source.tokens))
        copy_in(source.pieces, block)
        if self.order is not None:
            block = _parts(block, self.order)[:, self.order].reshape(-1).view(np.uint8)
        return self.coding.encode(block, tokens=source.tokens, number=source.number)

    def decode(self, target: Target) -> bool:
        """Decodes into the pieces; False, with the pieces unchanged, for a block that is not of this coding."""
        try:
            out = scratch("block", self._length(target.tokens))
            block = self.coding.decode(target.data, tokens=target.tokens, out=out)
        except (TierdError, MemoryError) as error:
            _log.warning("tierd: a stored block counts as missing: %s", error)
            return False
        if self.order is not None:
            ordered = np.empty_like(_parts(block, self.order))
            ordered[:, self.order] = _parts(block, self.order)
            block = ordered.reshape(-1).view(np.uint8)
        copy_out(block, target.pieces)
        return True

    def _length(self, tokens: int) -> int:
        """Bytes of a block of so many tokens."""
        return self.coding.full.block_bytes // self.coding.full.tokens * tokens


class Codings:
    """The codings of one engine process, by namespace; threads may share it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._held: dict[tuple[str, KVGeometry, int], Engine] = {}
        forks.register(self)

    def spec(self, spec: NamespaceSpec, geometry: KVGeometry) -> NamespaceSpec:
        """The namespace with the option's codec, or unchanged without one. Raises ConfigError."""
        if not self._options.codec:
            check_calibration(self._options)
            return spec
        coding = self._coding(spec, geometry)
        _say(said(coding))
        return self._add(spec, coding)

    def of(self, spec: NamespaceSpec) -> Engine | None:
        """How blocks of this namespace are encoded; None: not at all. Raises ConfigError."""
        if not spec.codec:
            return None
        held = self._held.get(_key(spec))
        if held is None:
            self._add(spec, self._coding(spec, spec.geometry))
            held = self._held.get(_key(spec))
        if held is None:
            raise ConfigError(
                f"codec: the namespace has {spec.codec!r}, this process {self._options.codec!r}; give both "
                "the same options"
            )
        return held

    def arrange(self, spec: NamespaceSpec, order: Order) -> None:
        """Sets the order of values in the engine's memory, for blocks of this namespace. Raises ConfigError."""
        held = self.of(spec)
        if held is not None:
            self._held[_key(spec)] = Engine(held.coding, order)

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Does the work on every item, several at a time. Raises what the work raises, after all have
        ended: none writes into the engine's memory later."""
        done = [self._pool.submit(work, item) for item in items]
        wait(done)
        return [each.result() for each in done]

    def forked(self) -> None:
        """In the child: it has none of the threads."""
        self.__dict__.pop("_pool", None)

    def _coding(self, spec: NamespaceSpec, geometry: KVGeometry) -> Coding:
        codec, calibration = self._options.codec, self._options.calibration
        return coding_of(codec, calibration, geometry=geometry, tokens_per_block=spec.tokens_per_block)

    def _add(self, spec: NamespaceSpec, coding: Coding) -> NamespaceSpec:
        coded = coded_spec(spec, coding)
        self._held.setdefault(_key(coded), Engine(coding))
        return coded

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="tierd-codec")


def check_calibration(options: Options) -> None:
    """Raises ConfigError for a calibration without a codec."""
    if options.calibration:
        raise ConfigError(f"calibration: {options.calibration!r} is given without `codec`; name the codec too")


def refuse_codec(options: Options, face: str, remedy: str) -> None:
    """Raises ConfigError if the options ask for a codec, which this integration does not have."""
    if options.codec or options.calibration:
        raise ConfigError(
            f"codec: {options.codec!r} is set, {face} stores blocks as they are; {remedy}, or leave it out"
        )


def said(coding: Coding) -> str:
    """One sentence about a coding, for the engine's log."""
    lengths, full = coding.codec.lengths(coding.full), coding.full
    bits = sorted({f"{8 * min(n, full.block_bytes) / full.values:.2f}" for n in lengths})
    loss = "without loss" if coding.codec.is_exact else "with loss; first and short blocks are exact"
    return f"tierd: codec {coding.text} encodes KV in {' to '.join(bits)} bits a value instead of 16, {loss}"


@cache
def _say(text: str) -> None:
    """Logs a sentence, once a process."""
    _log.warning("%s", text)


def _parts(block: Bytes, order: Order) -> Any:
    """Each part of the block that has this order: uint16 [parts, values]."""
    return block.view(np.uint16).reshape(-1, len(order))


def _key(spec: NamespaceSpec) -> tuple[str, KVGeometry, int]:
    return spec.codec, spec.geometry, spec.tokens_per_block
