"""Limits the calls in progress, and acts on clients that exceed their credits.

    within its credits ──▶ served
    beyond them        ──▶ Overloaded, with a time to retry, which grows each time
    far beyond, for long ▶ cut off: its session ends

No session exceeds its credits, and all together do not exceed the queue. Slow calls cannot take the
places of quick ones. Calls that free something are never refused. guard.py checks identity and
deadlines, cache/read_queues.py the queues of disks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tierd.errors import Overloaded

ENDLESS = {"/tierd.v1.Cache/Watch", "/tierd.v1.Admin/Scrub"}
"""Streams that live as long as their reader."""
ENDLESS_LIMIT = 8
"""Limit of endless streams for one session."""
FREEING = {"/tierd.v1.Cache/Release", "/tierd.v1.Cache/Abort"}
"""Calls that free room at once. Refusing them would keep the room taken."""
SLOW = {f"/tierd.v1.Cache/{verb}" for verb in ("Acquire", "Reserve", "Commit", "Put", "Get")}
"""Calls that may wait for a disk, a thread, or a slow client."""
ADMIN = "/tierd.v1.Admin/"
"""Operators are served even if the queue is full."""
RETRY_AFTER_S = 0.05
"""The shortest retry hint. A call takes less time."""
PATIENCE = 8
"""Refusals tolerated at a time, as a multiple of a session's credits."""
FORGIVEN_PER_S = 1
"""Refusals forgotten per second, as a multiple of the credits. Retry hints grow faster, so clients
that follow them are never cut off."""


@dataclass(slots=True)
class Excess:
    """A session's refusals that are not forgotten yet, and the time of the last one."""

    level: float = 0.0
    at: float = 0.0


class Place:
    """A call's place. It is freed when the object is collected at the latest, as for a call
    cancelled early."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self.is_taken = True

    def leave(self) -> None:
        """Frees the place. Safe to call twice."""
        if self.is_taken:
            self.is_taken = False
            self._give_back()

    def __enter__(self) -> None:
        """Handling begins."""

    def __exit__(self, *_: object) -> None:
        self.leave()

    def __del__(self) -> None:
        self.leave()


class Credits:
    """Calls in progress. now: monotonic time in seconds. cut_off(session, why): ends a session."""

    def __init__(
        self,
        *,
        queue_limit: int,
        session_credits: int,
        now: Callable[[], float],
        cut_off: Callable[[int, Overloaded], None],
    ) -> None:
        self._told = 0  # the most credits that a session was ever told
        self.set_limits(queue_limit=queue_limit, session_credits=session_credits)
        self._now = now
        self._cut_off = cut_off
        self._running: Counter[int] = Counter()  # by session, without endless ones
        self._slow = 0
        self._endless: Counter[int] = Counter()
        self._excess: dict[int, Excess] = {}

    def set_limits(self, *, queue_limit: int, session_credits: int) -> None:
        """Sets both limits. Sessions learn of other credits when they connect again. Until then
        calls beyond them are refused, and no session is cut off for it."""
        self._queue_limit = queue_limit
        self.slow_limit = max(1, queue_limit - queue_limit // 4)
        self._half = max(1, queue_limit // 2)
        self.share = min(session_credits, self._half)
        self._told = max(self._told, self.share)

    @property
    def running(self) -> int:
        """Calls in progress, without endless ones."""
        return self._running.total()

    def place(self, method: str, session: int, *, is_shared: bool = False) -> Place:
        """Takes a place for a call. is_shared: a session that stands for many clients. Raises
        Overloaded."""
        if method in FREEING:
            return Place(lambda: None)
        self._check(method, session, is_shared=is_shared)
        self._calls(method)[session] += 1
        self._slow += method in SLOW
        return Place(lambda: self._give_back(method, session))

    def _give_back(self, method: str, session: int) -> None:
        calls = self._calls(method)
        self._slow -= method in SLOW
        calls[session] -= 1
        if not calls[session]:
            del calls[session]

    def forget(self, session: int) -> None:
        """Forgets a session that has ended."""
        self._excess.pop(session, None)

    def _calls(self, method: str) -> Counter[int]:
        return self._endless if method in ENDLESS else self._running

    def _check(self, method: str, session: int, *, is_shared: bool) -> None:
        if method in ENDLESS:
            if self._endless[session] >= ENDLESS_LIMIT:
                why = f"streams: {ENDLESS_LIMIT} of this session are open, the limit; close some of them"
                raise self._refusal(session, why, is_shared=is_shared)
            return
        share = self._half if is_shared else self.share
        if self._running[session] >= share:
            why = f"calls: {share} of this session in progress (server.session_credits); wait until some end"
            raise self._refusal(session, why, is_shared=is_shared)
        if not method.startswith(ADMIN) and self.running >= self._queue_limit:
            why = f"calls: {self._queue_limit} in progress (server.queue_limit); try again later"
            raise Overloaded(why, retry_after_s=RETRY_AFTER_S)
        if method in SLOW and self._slow >= self.slow_limit:
            why = f"calls: {self.slow_limit} slow ones in progress, of server.queue_limit {self._queue_limit}; try again later"
            raise Overloaded(why, retry_after_s=RETRY_AFTER_S)

    def _refusal(self, session: int, why: str, *, is_shared: bool) -> Overloaded:
        """Refuses a call beyond a session's credits, and cuts the session off after too many. A
        shared session is never cut off."""
        if is_shared or self.share <= self._running[session] < self._told:
            return Overloaded(why, retry_after_s=RETRY_AFTER_S)
        excess, now = self._excess.setdefault(session, Excess(at=self._now())), self._now()
        forgiven = (now - excess.at) * FORGIVEN_PER_S * self.share
        excess.level, excess.at = max(0.0, excess.level - forgiven) + 1, now
        if excess.level > PATIENCE * self.share:
            del self._excess[session]
            error = Overloaded(
                f"session: disconnected after {PATIENCE * self.share} calls beyond its {self.share} credits"
                " (server.session_credits); keep to the credits in the hello reply",
                retry_after_s=RETRY_AFTER_S * 2**PATIENCE,
            )
            self._cut_off(session, error)
            return error
        return Overloaded(why, retry_after_s=RETRY_AFTER_S * 2 ** (excess.level / self.share))
