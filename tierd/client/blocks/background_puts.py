"""Unanswered: puts that wait for nobody (`put(..., wait=False)`), from their commit to the daemon's answer.

    copied and summed ──▶ Commit is sent ──▶ put returns     the daemon answers ──▶ read before
                               ▲                                   │        the next call, or by flush
                               └─── after a pause, a few times ◀── or refuses it for want of room

Purpose: the answers of such puts. Non-purpose: where their pages come from and how they are filled (writing.py).
Invariants: as many are under way as there are lines for them, and one more waits for the oldest. No call of the client
overtakes them, so it finds what it has put. What is sent again is the Commit: the pages hold the
bytes, and nobody reads a put's source after it has returned. The pages of a put that failed go
back, and its blocks are counted, with the reason.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from tierd.client.blocks.page_grants import Pending
from tierd.client.connect import cancellation, forks
from tierd.client.connect.credits import pause_s
from tierd.client.connect.link import Link
from tierd.client.session.pins import Hold
from tierd.client.transport import replies
from tierd.client.values import Lost
from tierd.core.formats.model import BlockStatus
from tierd.errors import DeadlineExceeded, Overloaded, TierdError, Unavailable

LINES = 4
"""Of a session's lines, those that such puts may use."""
MANY = 1 << 10
READ_S = 1.0
"""For the rest of an answer that has begun to come."""
NO_LINE_S = 0.01
"""Until a commit that is to be sent again, and finds no line, looks for one again."""


class Sent(NamedTuple):
    """A commit under way: its call, which link and reservation it is of, how many blocks it names,
    and when it is given up. tries: how often it was sent."""

    call: Pending | Refused
    link: Link
    reservation: int
    blocks: int
    deadline: float
    request: Any
    tries: int = 1


class Refused:
    """A commit that the daemon has not begun for want of room. It is sent again once pause_s have
    passed."""

    def __init__(self, sent: Sent, error: Overloaded, pause_s: float) -> None:
        self._sent, self._again_s = sent, time.monotonic() + pause_s
        self._error: TierdError = error
        self._call: Pending | None = None

    def comes(self, within_s: float) -> bool:
        """Whether there is an answer, or there is one in so long."""
        until = time.monotonic() + within_s
        while self._call is None:
            if self._again_s > until:
                return False
            time.sleep(max(0.0, self._again_s - time.monotonic()))
            if not self._sent.link.is_usable:
                self._error = Unavailable("daemon: it has gone since it refused the put; put again")
                return True
            self._call = _begun(self._sent.link, self._sent.request, self._sent.deadline)
            self._again_s = time.monotonic() + NO_LINE_S
        return self._call.comes(max(0.0, until - time.monotonic()))

    def reply(self, *, deadline: float) -> Any:
        """The reply. Raises TierdErrors: the refusal, where it was not sent again."""
        if self._call is None:
            raise self._error
        return self._call.reply(deadline=deadline)


class BackgroundPuts:
    """Those of one client. Threads may share it."""

    def __init__(self) -> None:
        self._sent = deque[Sent]()
        self._turn, self._counting = threading.Lock(), threading.Lock()
        self._lost = dict[str, tuple[int, str]]()  # by the kind of failure: blocks, and what was said last
        forks.register(self)

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._sent)

    def send(self, hold: Hold, request: Any, *, blocks: int, deadline: float) -> bool:
        """Sends the commit of a reservation; whether it has gone. If not, its caller may make it and wait."""
        with self._turn_by(deadline) as is_mine:
            call = self._begun(hold.link, request, deadline) if is_mine else None
            if call is not None:
                self._sent.append(Sent(call, hold.link, hold.reservation, blocks, deadline, request))
            return call is not None

    def settle(self, deadline: float) -> None:
        """Takes all answers that come by then."""
        if self._sent:
            with self._turn_by(deadline) as is_mine:
                if is_mine:
                    self._take(until=deadline)

    def flush(self, deadline: float) -> Lost:
        """Takes all answers; which blocks were not stored since this was asked last. Raises
        DeadlineExceeded
        while some are to come."""
        self.settle(deadline)
        if self._sent:
            raise DeadlineExceeded(f"flush: {len(self._sent)} puts are not answered yet; allow more with timeout_s")
        return self.lost()

    def lost(self) -> Lost:
        """Which were not, as far as it is known by now."""
        with self._counting:
            lost, self._lost = self._lost, {}
        reasons = (f"{blocks} blocks: {kind}: {said}" for kind, (blocks, said) in lost.items())
        return Lost(sum(blocks for blocks, _ in lost.values()), reasons)

    def forked(self) -> None:
        """In a child: they are the parent's."""
        forks.abandon(self._sent)
        self._sent, self._turn, self._counting, self._lost = deque(), threading.Lock(), threading.Lock(), {}

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
            call = _begun(link, request, deadline)
        if call is None and self._sent:
            self._take(until=deadline, count=1)
            call = _begun(link, request, deadline)
        return call

    def _take(self, *, until: float, count: int = MANY) -> None:
        """So many answers, the oldest first, as far as they come until then. A put's own deadline gives it up.

        A stopped verb does not stop this, because the answers belong to other verbs.
        """
        with cancellation.apart():
            while self._sent and count:
                sent = self._sent[0]
                is_here = sent.call.comes(max(0.0, min(until, sent.deadline) - time.monotonic()))
                if not is_here and until < sent.deadline:
                    return
                self._sent.popleft()
                again = self._close(sent, is_here=is_here)
                if again is None:
                    count -= 1
                else:
                    self._sent.appendleft(again)

    def _close(self, sent: Sent, *, is_here: bool) -> Sent | None:
        """Counts those of its blocks that were not stored. Where one was not its pages go back.
        What was refused for want of room goes on."""
        try:
            reply = sent.call.reply(deadline=time.monotonic() + (READ_S if is_here else 0.0))
            statuses = replies.handles_of(reply.handles)["status"]
        except BaseException as error:
            if isinstance(error, Overloaded):
                pause = pause_s(error, tries=sent.tries, left_s=sent.deadline - time.monotonic())
                if pause is not None:
                    return sent._replace(call=Refused(sent, error, pause), tries=sent.tries + 1)
            self._note_lost(sent, sent.blocks, type(error).__name__, str(error))
            if not isinstance(error, TierdError):
                raise
            return None
        if failed := int(np.count_nonzero(statuses == BlockStatus.FAILED)):
            self._note_lost(sent, failed, "FAILED", "their epoch has ended, or their pages have failed")
        return None

    def _note_lost(self, sent: Sent, blocks: int, kind: str, said: str) -> None:
        with self._counting:
            before, _ = self._lost.get(kind, (0, ""))
            self._lost[kind] = before + blocks, said
        if sent.link.session is not None:
            sent.link.session.let_go(reservations=[sent.reservation])


def _begun(link: Link, request: Any, deadline: float) -> Pending | None:
    """A commit, sent over a line that rests; None: there is none, or no turn."""
    call: Pending | None = link.transport.begin("Commit", request, deadline - time.monotonic(), LINES)
    return call
