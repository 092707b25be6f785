"""Page grants: pages reserved for the next puts, so that a put soon after another is one call.

    put is answered ──▶ order ──▶ the daemon reserves ──▶ the next puts take pages of the stock;
    the last but one of them orders again

This saves the time of Reserve. Puts are in writing.py; core/requests/puts.py decides how much the
daemon grants. Pages are private until a commit names them, so no lookup finds them. There is one
order at a time. A put whose pages have not arrived reserves for itself; only a call without room
waits for an order. No lock is held during I/O. Unused pages are released by the first call after
STALE_S, when their turn among the calls is needed, and with the link. Reserve tells a
put which blocks exist, which saves their copies. So after a commit that answers EXISTS, nothing is
ordered for a while. The same holds after a stock of which few pages were used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.client.transport import replies, requests
from tierd.client.values import PutGroup
from tierd.core.formats.block import size_class
from tierd.core.formats.model import PUT_BLOCK, StructArray
from tierd.errors import TierdError

STALE_S = 1.0
"""Puts at most this far apart count as consecutive."""
PUTS_AHEAD = 8
STOCK_BYTES = 128 << 20
"""Maximum order: pages for this many puts, or this many bytes, but always for one put."""
PUTS_WITHOUT = 32
"""Puts without an order after a refusal or after blocks that existed."""
ANSWER_TIMEOUT_S = 5.0

Key = tuple[int, int]
"""Namespace and rank."""


class Pending(Protocol):
    """A call that was sent."""

    @property
    def is_answered(self) -> bool:
        """Whether its reply, or the end of its line, can be read."""
        ...

    def comes(self, within_s: float) -> bool:
        """Waits up to within_s for `is_answered`."""
        ...

    def reply(self, *, deadline: float) -> Any:
        """Its reply. Raises TierdErrors."""
        ...

    def drop(self) -> None:
        """Gives it up without waiting; the daemon takes back its result."""
        ...


Begin = Callable[[str, Any, float], Pending | None]
"""Sends a call: method, message, timeout in seconds. None: there is no room for it now."""
LetGo = Callable[[list[int]], None]
"""Releases reservations without waiting."""
Pages = tuple[int, StructArray]
"""A reservation and its HANDLE [n]."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Puts that pages are for: their namespace and rank, maximum blocks, and maximum bytes of each."""

    key: Key
    count: int
    length: int

    def is_like(self, other: Shape) -> bool:
        """Whether pages for one suit blocks of the other: not too small, and not larger than
        needed, since a block keeps its page."""
        return self.key == other.key and size_class(self.length) == size_class(other.length)

    def fits(self, other: Shape) -> bool:
        """Whether a put of the other shape finds all the pages that it needs."""
        return self.count >= other.count and self.is_like(other)


class PageGrants:
    """The page grants of one link. Threads may share it."""

    def __init__(self, begin: Begin, let_go: LetGo) -> None:
        self._begin, self._let_go = begin, let_go
        self._turn = threading.Lock()
        self._order: tuple[Shape, Pending] | None = None
        self._shape: Shape | None = None
        self._stock: list[Pages] = []
        self._is_ordering, self._is_closed = False, False
        self._pickups = 0
        """Times that all pages were released; an order begun before that is not wanted any more."""
        self._last: Shape | None = None
        self._last_s, self._used_s = 0.0, 0.0
        """Times of the last put, and of the last one that took or ordered pages."""
        self._without = self._taken = 0
        """Next puts that do not order; puts that took pages from the current stock."""

    @property
    def is_stale(self) -> bool:
        """Whether pages or an order were unused for longer than STALE_S."""
        is_any = self._order is not None or bool(self._stock)
        return is_any and time.monotonic() - self._used_s > STALE_S

    def take(self, group: PutGroup, *, length: int, deadline: float) -> Pages | None:
        """A reservation of private pages, one of at least `length` bytes for each block of the
        group, and its HANDLE [n]. None: there is none yet."""
        self._receive(deadline)
        wanted = Shape(_key(group), len(group.hashes), length)
        with self._turn:
            if self._shape is None or not self._shape.fits(wanted) or not self._stock:
                return None
            self._used_s = time.monotonic()
            self._taken += 1
            return self._stock.pop()

    def order(self, group: PutGroup, *, length: int, deadline: float) -> None:
        """Orders pages like this put's if another put came just before and the stock is low. The
        last grant serves a put that comes before the answer."""
        now, this = time.monotonic(), Shape(_key(group), len(group.hashes), length)
        with self._turn:
            last, last_s = self._last, self._last_s
            self._last, self._last_s = this, now
            self._without -= self._without > 0
            if self._without or self._order is not None or self._is_ordering or self._is_closed or last is None:
                return
            if not last.is_like(this) or now - last_s > STALE_S or now >= deadline:
                return
            fits = self._shape is not None and self._shape.fits(this)
            if fits and len(self._stock) >= min(2, _puts_ahead(this)):
                return
            is_grown = self._shape is not None and self._shape.is_like(this)
            useless = [] if fits else self._cleared(is_grown=is_grown)
            is_worth_it = self._is_ordering = not self._without
            self._used_s, pickups = now, self._pickups
        if useless:
            self._let_go(useless)
        if not is_worth_it:
            return
        shape, pending = Shape(this.key, max(this.count, last.count), length), None
        try:
            pending = self._begin("Reserve", _request(shape), min(ANSWER_TIMEOUT_S, deadline - now))
        finally:
            self._placed((shape, pending) if pending is not None else None, pickups)

    def pause(self, deadline: float) -> None:
        """Releases all pages, and orders none for the next PUTS_WITHOUT puts."""
        self._without = PUTS_WITHOUT
        self.give_back(deadline)

    def give_back(self, deadline: float) -> None:
        """Releases all pages and gives up an unanswered order. deadline: to read a begun answer."""
        self._receive(deadline)
        order, numbers = self._picked_up()
        if order is not None:
            order[1].drop()
        if numbers:
            self._let_go(numbers)

    def reservations(self, *, deadline: float) -> list[int]:
        """All reservations, for a caller that releases them and waits; it waits for an order, too."""
        self._receive(deadline, is_awaited=True)
        order, numbers = self._picked_up()
        if order is not None:
            order[1].drop()
        return numbers

    def close(self) -> None:
        """The link has ended: orders no more. Releases all pages, since views keep the session."""
        self._is_closed = True
        order, numbers = self._picked_up()
        if order is not None:
            order[1].drop()
        if numbers:
            self._let_go(numbers)

    def _picked_up(self) -> tuple[tuple[Shape, Pending] | None, list[int]]:
        """Takes the order and the stock; the caller owns them now."""
        with self._turn:
            order, self._order = self._order, None
            self._pickups += 1
            numbers = self._cleared()
        return order, numbers

    def _cleared(self, *, is_grown: bool = False) -> list[int]:
        """Empties the stock. If most of it was not used, and puts have not grown, nothing is
        ordered for a while. The caller holds the lock."""
        numbers, self._stock = [number for number, _ in self._stock], []
        if len(numbers) > self._taken and not is_grown:
            self._without = PUTS_WITHOUT
        self._taken = 0
        return numbers

    def _placed(self, order: tuple[Shape, Pending] | None, pickups: int) -> None:
        """An order was sent, or could not be. pickups: `_pickups` when it began."""
        with self._turn:
            self._is_ordering = False
            is_wanted = pickups == self._pickups
            if is_wanted:
                self._order = order
        if order is not None and not is_wanted:
            order[1].drop()

    def _receive(self, deadline: float, *, is_awaited: bool = False) -> None:
        """Moves an answered order into the stock. Releases pages of an old stock that differ, and
        pages that are not wanted any more."""
        with self._turn:
            order = self._order
            if order is None or not (is_awaited or order[1].is_answered):
                return
            self._order, pickups = None, self._pickups
        shape, pages = order[0], self._delivered(*order, deadline=deadline)
        if not pages:
            self._without = PUTS_WITHOUT
            return
        with self._turn:
            if pickups != self._pickups:
                old = [number for number, _ in pages]
            elif shape == self._shape:
                old, self._stock = [], [*pages, *self._stock]
            else:
                old = self._cleared()
                self._stock, self._shape = pages, shape
        if old:
            self._let_go(old)

    def _delivered(self, shape: Shape, pending: Pending, *, deadline: float) -> list[Pages]:
        numbers: list[int] = []
        try:
            reply = pending.reply(deadline=deadline)
            numbers = list(reply.ahead)
            found = [replies.handles_of(data, count=shape.count).copy() for data in reply.handles]
            return list(zip(numbers, found, strict=True))
        except (TierdError, ValueError):
            if numbers:
                self._let_go(numbers)
            return []


def _key(group: PutGroup) -> Key:
    return group.namespace.id, group.rank


def _puts_ahead(shape: Shape) -> int:
    return max(1, min(PUTS_AHEAD, STOCK_BYTES // (shape.count * shape.length)))


def _request(shape: Shape) -> pb.ReserveRequest:
    blocks = np.zeros(shape.count, dtype=PUT_BLOCK)
    blocks["length"], blocks["tokens"] = shape.length, 1
    namespace, rank = shape.key
    group = pb.PutGroup(namespace=namespace, rank=rank, blocks=blocks.tobytes())
    return pb.ReserveRequest(groups=[group], ahead=_puts_ahead(shape), **requests.wanted_tier("host"))
