"""Puts with wait=False, from their commit to the daemon's answer.

    copied and summed ──▶ Commit is sent ──▶ put returns     the daemon answers ──▶ read before
                               ▲                                   │         the next call, or flush
                               └─── after a pause, a few times ◀── or refuses it for lack of room

writing.py finds and fills the pages. At most LINES such puts are in progress; one more waits for
the oldest. No call of the client overtakes them, so the call finds their blocks. Only the Commit is
sent again: the pages hold the bytes, and a put's source is not read after it has returned. The
pages of a failed put are released, and its blocks are counted, with the reason.
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
"""Lines of a session that such puts may use."""
MANY = 1 << 10
READ_S = 1.0
"""Time limit for the rest of an answer that has begun to arrive."""
NO_LINE_S = 0.01
"""Pause before a commit that found no free line looks again."""


class Sent(NamedTuple):
    """A commit in progress: call, link, reservation, blocks, deadline. tries: times sent."""

    call: Pending | Refused
    link: Link
    reservation: int
    blocks: int
    deadline: float
    request: Any
    tries: int = 1


class Refused:
    """A commit that was refused for lack of room, to be sent again after pause_s."""

    def __init__(self, sent: Sent, error: Overloaded, pause_s: float) -> None:
        self._sent, self._again_s = sent, time.monotonic() + pause_s
        self._error: TierdError = error
        self._call: Pending | None = None

    def comes(self, within_s: float) -> bool:
        """Whether an answer arrives within within_s."""
        until = time.monotonic() + within_s
        while self._call is None:
            if self._again_s > until:
                return False
            time.sleep(max(0.0, self._again_s - time.monotonic()))
            if not self._sent.link.is_usable:
                self._error = Unavailable("daemon: its connection ended after it refused the put; put again")
                return True
            self._call = _begun(self._sent.link, self._sent.request, self._sent.deadline)
            self._again_s = time.monotonic() + NO_LINE_S
        return self._call.comes(max(0.0, until - time.monotonic()))

    def reply(self, *, deadline: float) -> Any:
        """The reply. Raises TierdErrors: the refusal, if the commit was not sent again."""
        if self._call is None:
            raise self._error
        return self._call.reply(deadline=deadline)


class BackgroundPuts:
    """The puts with wait=False of one client. Threads may share it."""

    def __init__(self) -> None:
        self._sent = deque[Sent]()
        self._turn, self._counting = threading.Lock(), threading.Lock()
        self._lost = dict[str, tuple[int, str]]()  # by kind of failure: number of blocks, last message
        forks.register(self)

    def __len__(self) -> int:
        """Number of puts in progress."""
        return len(self._sent)

    def send(self, hold: Hold, request: Any, *, blocks: int, deadline: float) -> bool:
        """Sends the commit of a reservation. False: it was not sent; its caller may send it and wait."""
        with self._turn_by(deadline) as is_mine:
            call = self._begun(hold.link, request, deadline) if is_mine else None
            if call is not None:
                self._sent.append(Sent(call, hold.link, hold.reservation, blocks, deadline, request))
            return call is not None

    def settle(self, deadline: float) -> None:
        """Takes all answers that arrive until the deadline."""
        if self._sent:
            with self._turn_by(deadline) as is_mine:
                if is_mine:
                    self._take(until=deadline)

    def flush(self, deadline: float) -> Lost:
        """Takes all answers; counts lost blocks. Raises DeadlineExceeded while answers are missing."""
        self.settle(deadline)
        if self._sent:
            raise DeadlineExceeded(f"flush: {len(self._sent)} puts are not answered yet; allow more with timeout_s")
        return self.lost()

    def lost(self) -> Lost:
        """Counts blocks not stored, as far as is known now."""
        with self._counting:
            lost, self._lost = self._lost, {}
        reasons = (f"{blocks} blocks: {kind}: {said}" for kind, (blocks, said) in lost.items())
        return Lost(sum(blocks for blocks, _ in lost.values()), reasons)

    def forked(self) -> None:
        """In a child process: abandons the parent's puts."""
        forks.abandon(self._sent)
        self._sent, self._turn, self._counting, self._lost = deque(), threading.Lock(), threading.Lock(), {}

    @contextmanager
    def _turn_by(self, deadline: float) -> Iterator[bool]:
        """Lets one thread in at a time; yields whether its turn came in time."""
        is_mine = self._turn.acquire(timeout=max(0.0, deadline - time.monotonic()))
        try:
            yield is_mine
        finally:
            if is_mine:
                self._turn.release()

    def _begun(self, link: Link, request: Any, deadline: float) -> Pending | None:
        """Sends a commit over a free line, or over that of the oldest put once it is answered.
        It keeps one turn free for other calls."""
        self._take(until=0.0)
        call: Pending | None = None
        if len(self._sent) < min(LINES, link.credits.count - 1):
            call = _begun(link, request, deadline)
        if call is None and self._sent:
            self._take(until=deadline, count=1)
            call = _begun(link, request, deadline)
        return call

    def _take(self, *, until: float, count: int = MANY) -> None:
        """Takes up to `count` answers, oldest first, until a time or the put's own deadline.
        Cancelling a verb does not stop this, because the answers belong to other verbs."""
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
        """Counts the blocks that were not stored; if there are any, releases the put's pages. A
        commit refused for lack of room continues."""
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
    """Sends a commit over a free line; None: no line or no turn is free."""
    call: Pending | None = link.transport.begin("Commit", request, deadline - time.monotonic(), LINES)
    return call
