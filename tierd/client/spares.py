"""Spares: pages that are reserved for the next put while this one copies, or after it, so that a put which follows another soon is one call.

    put ──▶ order ──▶ Reserve is on its way, while nobody waits ──▶ the next put takes its pages, and orders again

Purpose: the time that Reserve takes, for those who put in a row. Non-purpose: what a put is (verbs.py), how much the daemon gives ahead (core/puts.py).
Invariants: the pages are private until a commit names them, so nothing of them can be found; one order at a time, and nobody waits for it: a put whose pages are
not there yet reserves for itself; what nobody took goes back with the first call after STALE_S. Who puts what is held already is told so by Reserve and spared
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
"""Of an order; it has come long before, or is given up."""

Key = tuple[int, int]
"""Namespace and rank."""


class Pending(Protocol):
    """A call that was sent."""

    @property
    def has_reply(self) -> bool:
        """Whether `reply` waits for nothing."""
        ...

    def reply(self) -> Any:
        """Its reply. Raises TierdErrors."""
        ...

    def give_up(self) -> None:
        """Its reply is not wanted any more."""
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
        self._last: tuple[Key, int, float] | None = None
        self._without = 0

    @property
    def is_stale(self) -> bool:
        """Whether an order waits in vain."""
        order = self._order
        return order is not None and time.monotonic() - order.time_s > STALE_S

    def take(self, group: PutGroup, *, length: int) -> tuple[int, StructArray] | None:
        """A reservation of private pages, one at least for each block of the group, of so many bytes at least, and its HANDLE [n]; None: there is none yet."""
        with self._turn:
            order = self._order
            if order is None or order.key != _key(group) or order.length < length or order.count < len(group.hashes):
                return None
            if not order.pending.has_reply:
                return None
            self._order = None
        return self._taken(order)

    def order(self, group: PutGroup, *, length: int, taken: int = 0) -> None:
        """Asks for pages like this put's, if one came before it a moment ago. taken: the spare reservation that this put has."""
        now, key, count = time.monotonic(), _key(group), len(group.hashes)
        with self._turn:
            last, self._last = self._last, (key, count, now)
            self._without -= self._without > 0
            if self._without or self._order is not None or last is None:
                return
            if last[0] != key or now - last[2] > STALE_S:
                return
            count = max(count, last[1])
            pending = self._begin("Reserve", _request(key, count, length, taken), ANSWER_TIMEOUT_S)
            self._order = Order(key, count, length, pending, now) if pending is not None else None

    def pause(self) -> None:
        """Nothing is ordered for a while, and what was is given back."""
        self._without = PUTS_WITHOUT
        self.give_back()

    def give_back(self) -> None:
        """What was ordered is not wanted any more."""
        with self._turn:
            order, self._order = self._order, None
        if order is None:
            return
        if not order.pending.has_reply:
            order.pending.give_up()
        elif taken := self._taken(order):
            self._let_go(taken[0])

    def _taken(self, order: Order) -> tuple[int, StructArray] | None:
        try:
            reply = order.pending.reply()
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
