"""Spares: pages that are reserved for the next put while this one copies, or after it, so that a put which follows another soon is one call.

    put ──▶ order ──▶ Reserve is on its way, while nobody waits ──▶ the next put takes its pages, and orders again

Purpose: the time that Reserve takes, for those who put in a row. Non-purpose: what a put is (verbs.py), how much the daemon gives ahead (core/puts.py).
Invariants: the pages are private until a commit names them, so nothing of them can be found; one order at a time, and nobody waits for it but who has no room
without its pages: a put whose pages are not there yet reserves for itself; no lock is held while anything is sent or read; what nobody took goes back with the first
call after STALE_S, when its turn among the calls is wanted, and with its link. Who puts what is held already is told so by Reserve and spared
the copy: one commit that says EXISTS, and nothing is ordered for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.client import protocol
from tierd.client.values import PutGroup
from tierd.core.model import PUT_BLOCK, BlockStatus, StructArray
from tierd.errors import TierdError

LEAST_BYTES = 1 << 20
"""Of a put; with less, what Reserve takes is waited for."""
STALE_S = 1.0
"""Between two puts that still count as in a row."""
PUTS_WITHOUT = 32
"""After a refusal, or blocks that existed."""
ANSWER_TIMEOUT_S = 5.0

Key = tuple[int, int]
"""Namespace and rank."""


class Pending(Protocol):
    """A call that was sent."""

    @property
    def is_answered(self) -> bool:
        """Whether its reply, or the end of its line, is there to be read."""
        ...

    def reply(self, *, deadline: float) -> Any:
        """Its reply. Raises TierdErrors."""
        ...

    def drop(self) -> None:
        """Gives it up, without waiting: what it gives goes back."""
        ...


Begin = Callable[[str, Any, float], Pending | None]
"""Sends a call: method, message, seconds that it may take. None: there is no room for it now."""
LetGo = Callable[[int], None]
"""Gives a reservation back, without waiting."""


@dataclass(frozen=True, slots=True)
class Order:
    """Pages that were asked for: so many, of so many bytes each."""

    key: Key
    count: int
    length: int
    pending: Pending
    time_s: float


class Spares:
    """Those of one link. Threads may share it."""

    def __init__(self, begin: Begin, let_go: LetGo) -> None:
        self._begin, self._let_go = begin, let_go
        self._turn = threading.Lock()
        self._order: Order | None = None
        self._is_ordering, self._is_unwanted, self._is_closed = False, False, False
        self._last: tuple[Key, int, float] | None = None
        self._without = 0

    @property
    def is_stale(self) -> bool:
        """Whether an order waits in vain."""
        order = self._order
        return order is not None and time.monotonic() - order.time_s > STALE_S

    def take(self, group: PutGroup, *, length: int, deadline: float) -> tuple[int, StructArray] | None:
        """A reservation of private pages, one at least for each block of the group, of so many bytes at least, and its HANDLE [n]; None: there is none yet."""
        with self._turn:
            order = self._order
            if order is None or order.key != _key(group) or order.length < length or order.count < len(group.hashes):
                return None
            if not order.pending.is_answered:
                return None
            self._order = None
        return self._taken(order, deadline=deadline)

    def order(self, group: PutGroup, *, length: int, deadline: float, taken: int = 0) -> None:
        """Asks for pages like this put's, if one came before it a moment ago. taken: the spare reservation that this put has."""
        now, key, count = time.monotonic(), _key(group), len(group.hashes)
        with self._turn:
            last, self._last = self._last, (key, count, now)
            self._without -= self._without > 0
            if self._without or self._order is not None or self._is_ordering or self._is_closed or last is None:
                return
            if last[0] != key or now - last[2] > STALE_S or now >= deadline:
                return
            count = max(count, last[1])
            self._is_ordering, self._is_unwanted = True, False
        pending = None
        try:
            pending = self._begin("Reserve", _request(key, count, length, taken), min(ANSWER_TIMEOUT_S, deadline - now))
        finally:
            self._placed(Order(key, count, length, pending, now) if pending is not None else None)

    def pause(self, deadline: float) -> None:
        """Nothing is ordered for a while, and what was is given back."""
        self._without = PUTS_WITHOUT
        self.give_back(deadline)

    def give_back(self, deadline: float) -> None:
        """Waits for no answer: an order without one is given up. deadline: of reading one that has begun to come."""
        order = self._picked_up()
        if order is None:
            return
        if not order.pending.is_answered:
            order.pending.drop()
        elif taken := self._taken(order, deadline=deadline):
            self._let_go(taken[0])

    def reservation(self, *, deadline: float) -> int:
        """That of an order, for who wants to give it back and know when that is done; 0: there is none."""
        order = self._picked_up()
        taken = self._taken(order, deadline=deadline) if order is not None else None
        return taken[0] if taken else 0

    def close(self) -> None:
        """The link has ended: nothing is ordered any more, and nobody reads an answer."""
        self._is_closed = True
        order = self._picked_up()
        if order is not None:
            order.pending.drop()

    def _picked_up(self) -> Order | None:
        with self._turn:
            order, self._order = self._order, None
            self._is_unwanted = self._is_ordering
        return order

    def _placed(self, order: Order | None) -> None:
        """An order was sent, or could not be."""
        with self._turn:
            self._is_ordering = False
            is_wanted = not self._is_unwanted
            if is_wanted:
                self._order = order
        if order is not None and not is_wanted:
            order.pending.drop()

    def _taken(self, order: Order, *, deadline: float) -> tuple[int, StructArray] | None:
        try:
            reply = order.pending.reply(deadline=deadline)
            handles = protocol.handles_of(b"".join(reply.handles), count=order.count).copy()
        except TierdError:
            self._without = PUTS_WITHOUT
            return None
        if reply.reservation and (handles["status"] == BlockStatus.RESERVED).all():
            return reply.reservation, handles
        self._without = PUTS_WITHOUT
        if reply.reservation:
            self._let_go(reply.reservation)
        return None


def _key(group: PutGroup) -> Key:
    return group.namespace.id, group.rank


def _request(key: Key, count: int, length: int, taken: int) -> pb.ReserveRequest:
    blocks = np.zeros(count, dtype=PUT_BLOCK)
    blocks["length"], blocks["tokens"] = length, 1
    namespace, rank = key
    group = pb.PutGroup(namespace=namespace, rank=rank, blocks=blocks.tobytes())
    return pb.ReserveRequest(groups=[group], ahead=True, taken=taken, **protocol.wanted_tier("host"))
