"""Unanswered: puts that wait for nobody (`put(..., wait=False)`), from their commit to the daemon's answer.

    copied and summed ──▶ Commit is sent ──▶ put returns        the daemon answers ──▶ read before the client's next
    call, or by flush

Purpose: the answers of such puts. Non-purpose: where their pages come from and how they are filled (writing.py).
Invariants: as many are under way as there are lines for them, and one more waits for the oldest. No call of the client
overtakes them, so it finds what it has put. The pages of a put that failed go back, and its blocks are counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from tierd.client import forks, replies, stopping
from tierd.client.connection import Link
from tierd.client.pins import Hold
from tierd.client.spares import Pending
from tierd.core.model import BlockStatus
from tierd.errors import DeadlineExceeded, TierdError

LINES = 4
"""Of a session's lines, those that such puts may use."""
MANY = 1 << 10
READ_S = 1.0
"""For the rest of an answer that has begun to come."""


class Sent(NamedTuple):
    """A commit under way: over which link, of which reservation, of how many blocks, and when it is given up."""

    call: Pending
    link: Link
    reservation: int
    blocks: int
    deadline: float


class Unanswered:
    """Those of one client. Threads may share it."""

    def __init__(self) -> None:
        self._sent = deque[Sent]()
        self._turn, self._counting = threading.Lock(), threading.Lock()
        self._lost = 0
        forks.register(self)

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._sent)

    def send(self, hold: Hold, request: Any, *, blocks: int, deadline: float) -> bool:
        """Sends the commit of a reservation; whether it has gone. If not, its caller may make it and wait."""
        with self._turn_by(deadline) as is_mine:
            call = self._begun(hold.link, request, deadline) if is_mine else None
            if call is not None:
                self._sent.append(Sent(call, hold.link, hold.reservation, blocks, deadline))
            return call is not None

    def settle(self, deadline: float) -> None:
        """Takes all answers that come by then."""
        if self._sent:
            with self._turn_by(deadline) as is_mine:
                if is_mine:
                    self._take(until=deadline)

    def flush(self, deadline: float) -> int:
        """Takes all answers; how many blocks were not stored since this was asked last. Raises DeadlineExceeded
        while some are to come."""
        self.settle(deadline)
        if self._sent:
            raise DeadlineExceeded(f"flush: {len(self._sent)} puts are not answered yet; allow more with timeout_s")
        return self.lost()

    def lost(self) -> int:
        """How many were not, as far as it is known by now."""
        with self._counting:
            lost, self._lost = self._lost, 0
            return lost

    def forked(self) -> None:
        """In a child: they are the parent's."""
        forks.abandon(self._sent)
        self._sent, self._turn, self._counting, self._lost = deque(), threading.Lock(), threading.Lock(), 0

    @contextmanager
    def _turn_by(self, deadline: float) -> Iterator[bool]:
        """Around what one thread does at a time: whether its turn came by then."""
        is_mine = self._turn.acquire(timeout=max(0.0, deadline - time.monotonic()))
        try:
            yield is_mine
        finally:
            if is_mine:
                self._turn.release()

    def _begun(self, link: Link, request: Any, deadline: float) -> Pending | None:
        """The commit under way, over a line that rests, or that of the oldest put once it is answered. A turn is
        left for other calls."""
        self._take(until=0.0)
        call: Pending | None = None
        if len(self._sent) < min(LINES, link.credits.count - 1):
            call = link.transport.begin("Commit", request, deadline - time.monotonic(), LINES)
        if call is None and self._sent:
            self._take(until=deadline, count=1)
            call = link.transport.begin("Commit", request, deadline - time.monotonic(), LINES)
        return call

    def _take(self, *, until: float, count: int = MANY) -> None:
        """So many answers, the oldest first, as far as they come until then. A put's own deadline gives it up.

        A stopped verb does not stop this, because the answers belong to other verbs.
        """
        with stopping.apart():
            while self._sent and count:
                sent = self._sent[0]
                is_here = sent.call.comes(max(0.0, min(until, sent.deadline) - time.monotonic()))
                if not is_here and until < sent.deadline:
                    return
                self._sent.popleft()
                self._close(sent, is_here=is_here)
                count -= 1

    def _close(self, sent: Sent, *, is_here: bool) -> None:
        """Counts those of its blocks that were not stored. Where none was its pages go back."""
        lost = sent.blocks
        try:
            reply = sent.call.reply(deadline=time.monotonic() + (READ_S if is_here else 0.0))
            lost = int(np.count_nonzero(replies.handles_of(reply.handles)["status"] == BlockStatus.FAILED))
        except TierdError:
            pass
        finally:
            with self._counting:
                self._lost += lost
            if lost and sent.link.session is not None:
                sent.link.session.let_go(reservations=[sent.reservation])
