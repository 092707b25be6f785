"""A load, layer by layer: an engine computes with the first layers while others are copied.

One thread carries the load out (`EngineStore.load`): it copies the first piece of every block into
the engine's memory, then the second. A layer is the number of a piece in its block. Another thread
waits for layers, or gives the load up. Bytes are final, but not confirmed before the result: a
page may have changed while it was copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from tierd.client import Group, Lease
from tierd.errors import Unavailable
from tierd.integrations.coding import Codings, Engine, Target
from tierd.integrations.pieces import Bytes, Pieces, copy_piece, copy_rows, matched, piece_bytes, rows_out

TOGETHER = 64
"""Pieces that are copied one by one between two looks whether the load is given up."""


AwaitLayer = Callable[[int], object]
"""Waits until a layer is in the daemon's pages. Raises Unavailable if it does not come."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """tokens: served and copied, over all groups. good: per group, good blocks from the first requested.
    first: per group, leading blocks not needed and not copied.
    tier_tokens: by the position of the tier that had them."""

    tokens: int = 0
    good: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    tier_tokens: tuple[int, ...] = ()


class LayerLoad:
    """The progress of one load. stream: a torch.cuda.Stream in which pieces on a device are copied;
    None: each copy has ended when its call returns. until: when the thread
    that waits for its layers gives it up; None: no thread does."""

    def __init__(self, stream: Any = None, *, until: float | None = None) -> None:
        self._stream, self.until = stream, until
        self._turn = threading.Condition()
        self._writers, self._is_over = 0, np.zeros(1, np.int32)
        self._arrivals: list[Any] = []  # by layer: an event of the stream
        self._loaded: Loaded | None = None

    # -- for the thread that needs the layers

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` has ended it."""
        return bool(self._is_over[0])

    def wait(self, layer: int, *, timeout_s: float) -> bool:
        """Waits until this layer of all blocks is in the engine's memory, or the load has ended.
        False: not in time, or given up. With a stream, this call waits for the order of copies, and
        the caller's own stream for the bytes.
        """
        with self._turn:
            self._turn.wait_for(lambda: layer < len(self._arrivals) or self._has_ended, timeout_s)
            if self.is_given_up or (not self._has_ended and layer >= len(self._arrivals)):
                return False
            arrival = self._arrivals[layer] if layer < len(self._arrivals) else None
        if arrival is not None:
            arrival.wait()
        return True

    def result(self, *, timeout_s: float) -> Loaded | None:
        """The good blocks; None if the load has not ended in time or was given up."""
        with self._turn:
            self._turn.wait_for(lambda: self._has_ended, timeout_s)
            return None if self.is_given_up else self._loaded

    def give_up(self) -> bool:
        """Ends the load, unless it has a result. Once this has returned, nothing writes into the
        engine's memory; a copy under way is awaited. Returns whether it was given up."""
        with self._turn:
            if self._loaded is not None:
                return False
            self._is_over[0] = 1
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._writers == 0)
        if self._stream is not None:
            self._stream.synchronize()
        return True

    # -- for the thread that loads

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around writes to the engine's memory. Raises Unavailable once the load is given up."""
        with self._turn:
            if self.is_given_up:
                raise Unavailable("load: the engine has given it up; its blocks are computed")
            self._writers += 1
        try:
            with self._ordered():
                yield
        finally:
            with self._turn:
                self._writers -= 1
                self._turn.notify_all()

    def copy(
        self, blocks: Sequence[tuple[Bytes, Pieces]], *, are_all: bool = True, await_layer: AwaitLayer = lambda _: None
    ) -> None:
        """Copies pages to their pieces, layer by layer. are_all: no layer has bytes that come later.
        await_layer: called before a layer is read. Raises as these and `writing`, and
        InvalidArgument."""
        rows = rows_out(blocks)
        if rows is not None:
            for layer, each in enumerate(rows):
                await_layer(layer)
                with self.writing():
                    copy_rows(each, self._is_over)
                self._arrived(is_told=are_all)
            return
        for layer, parts in enumerate(zip_longest(*[matched(pieces, page) for page, pieces in blocks])):
            await_layer(layer)
            for start in range(0, len(parts), TOGETHER):
                with self.writing():
                    for part in parts[start : start + TOGETHER]:
                        if part is not None:  # blocks of another group have fewer layers
                            copy_piece(*part, is_awaited=self._stream is None)
            self._arrived(is_told=are_all)
        if self._stream is not None:
            self._stream.synchronize()

    def end(self, loaded: Loaded) -> Loaded:
        """Sets the result, if there is none; nothing is good if the load was given up."""
        if self._stream is not None:
            self._stream.synchronize()  # a failure leaves copies under way
        with self._turn:
            if self.is_given_up:
                loaded = Loaded(good=(0,) * len(loaded.good))
            self._loaded = self._loaded or loaded
            self._turn.notify_all()
            return self._loaded

    @property
    def _has_ended(self) -> bool:
        return self.is_given_up or self._loaded is not None

    def _ordered(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        import torch  # noqa: PLC0415

        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def _arrived(self, *, is_told: bool) -> None:
        """The next layer is in the engine's memory, or will be at this place of the stream."""
        if not is_told:
            return
        arrival = self._stream.record_event() if self._stream is not None else None
        with self._turn:
            self._arrivals.append(arrival)
            self._turn.notify_all()


@dataclass(frozen=True, slots=True)
class Filled:
    """copied: per group, the blocks from its first one on. coded: encoded blocks, in memory of their own."""

    copied: list[int]
    coded: list[tuple[Engine, Target]]


def fill(
    lease: Lease,
    groups: Sequence[Group],
    targets: Sequence[Sequence[Pieces | None]],
    codings: Codings,
    load: LayerLoad,
) -> Filled:
    """Copies the wanted blocks of a lease. Raises as LayerLoad.copy, and if a layer does not come."""
    views = iter(lease.views())
    blocks, filled = list[tuple[Bytes, Pieces]](), Filled([], [])
    for group, leased, pieces in zip(groups, lease.groups, targets, strict=True):
        engine = codings.of(group.namespace.spec)
        for index in range(leased.count):
            view, wanted = next(views), pieces[leased.first + index]
            if wanted is not None and engine is not None:
                tokens = int(leased.handles["tokens"][0, index])
                filled.coded.append((engine, Target(index, view.copy(), wanted, tokens)))
            elif wanted is not None:
                blocks.append((view, wanted))
        filled.copied.append(leased.first + leased.count)
    load.copy(blocks, are_all=not filled.coded, await_layer=partial(_await, lease, groups, blocks, load.until or 0.0))
    return filled


def _await(
    lease: Lease, groups: Sequence[Group], blocks: Sequence[tuple[Bytes, Pieces]], until: float, layer: int
) -> None:
    """Waits for a layer of a lease's pages; for all if the engine's pieces are no layers."""
    if not lease.is_pending:
        return
    sizes, layers = {piece_bytes(piece) for piece in blocks[0][1]}, groups[0].namespace.spec.geometry.layers
    wanted = layer if len(groups) == len(sizes) == 1 and len(blocks[0][1]) == layers else None
    if not lease.await_layer(wanted, timeout_s=max(0.0, until - time.monotonic())):
        raise Unavailable("load: the daemon did not bring a layer in time; its blocks are computed")


def decoded(filled: Filled, good: int, codings: Codings, load: LayerLoad) -> list[int]:
    """Decodes the blocks before `good`. Returns the numbers, in their groups, of those that cannot be."""

    def one(engine: Engine, target: Target) -> bool:
        with load.writing():
            return engine.decode(target)

    valid = [(engine, target) for engine, target in filled.coded if target.index < good]
    done = codings.each(lambda each: one(*each), valid)
    return [target.index for (_, target), is_good in zip(valid, done, strict=True) if not is_good]


def loaded_of(lease: Lease, copied: Sequence[int], good: int) -> Loaded:
    """The blocks that are good: those before `good` in each group."""
    first = tuple(group.first for group in lease.groups)
    whole = good >= max((group.count for group in lease.groups), default=0)
    if whole:
        return Loaded(lease.tokens, tuple(copied), first, lease.tier_tokens)
    if len(lease.groups) == 1:
        return Loaded(lease.tokens_of(good), (lease.groups[0].first + good,), first, lease.tier_tokens)
    return Loaded(good=(0,) * len(lease.groups))
