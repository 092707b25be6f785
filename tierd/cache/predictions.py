"""Predicted turns: brings a session's blocks back shortly before they are expected to be used.

A prefetch with the hint that a turn has ended begins a pause. A lookup or get of the chain's last
full block ends it. `tierd.policies.returns` learns the pauses of each namespace and hint. It says
when to bring the blocks, if at all. A guard for each stops it while most of that is wasted. All is
off unless `mover.prefetch_predicted` is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierd.cache.prefetches import Order, Outcome, Started
from tierd.core.formats.model import Hint, Wanted
from tierd.core.plan import GroupQuery
from tierd.errors import TierdError
from tierd.policies.returns import AGES_S, Guard, Returns

PAUSES = 4096
"""Sessions that are watched; those away for longest are given up."""
KINDS = 1024
"""Namespaces and hints of which pauses are remembered; the oldest are forgotten."""

Name = tuple[int, bytes]
"""Namespace and hash of a chain's last full block."""
Kind = tuple[int, Hint]
Bring = Callable[[int, Sequence[GroupQuery], Wanted, Order], Started]
"""`Gets.prefetch`."""


class Timer(Protocol):
    """As asyncio.TimerHandle."""

    def cancel(self) -> None:
        """It does not fire."""


class Loop(Protocol):
    """The part of an event loop that predictions use."""

    def time(self) -> float:
        """Monotonic seconds."""
        ...

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Calls back once."""
        ...


@dataclass(slots=True)
class _Learnt:
    returns: Returns = field(default_factory=Returns)
    guard: Guard = field(default_factory=Guard)


@dataclass(slots=True)
class _Pause:
    kind: Kind
    began_s: float
    timer: Timer | None = None


class Predictions:
    """See the module. bring: starts a prefetch. loop: whose clock and timers it uses."""

    def __init__(self, bring: Bring, *, is_on: bool, loop: Callable[[], Loop] = asyncio.get_running_loop) -> None:
        self._bring, self._is_on, self._loop = bring, is_on, loop
        self._pauses: dict[Name, _Pause] = {}
        self._learnt: dict[Kind, _Learnt] = {}

    def pause(self, session: int, groups: Sequence[GroupQuery], tier: Wanted, order: Order) -> None:
        """A session's turn has ended. order: its hint, and the time for a get to use the blocks."""
        name = _name_of(groups[0]) if self._is_on else None
        if name is None:
            return
        loop, kind = self._loop(), (groups[0].namespaces[0], order.hint)
        if (former := self._pauses.pop(name, None)) and former.timer:
            former.timer.cancel()
        pause = self._pauses[name] = _Pause(kind, loop.time())
        learnt = self._learnt.setdefault(kind, _Learnt())
        if len(self._learnt) > KINDS:
            del self._learnt[next(iter(self._learnt))]
        if (found := learnt.returns.predict(order.ttl_s)) is not None:
            begin = Order("predicted", found.horizon_s, order.hint, lambda outcome: _told(learnt.guard, outcome))
            pause.timer = loop.call_later(found.after_s, self._start, learnt.guard, session, tuple(groups), tier, begin)
        self._give_up()

    def ask(self, groups: Sequence[GroupQuery]) -> None:
        """These blocks were looked up or got: sessions whose last block is among them are back."""
        if not self._pauses:
            return
        group, now = groups[0], self._loop().time()
        for row in range(len(group.hashes) - 1, -1, -1):
            pause = self._pauses.pop((group.namespaces[0], group.hashes[row].tobytes()), None)
            if pause is not None:
                if pause.timer:
                    pause.timer.cancel()
                if pause.kind in self._learnt:
                    self._learnt[pause.kind].returns.ended(now - pause.began_s)
                return

    def _start(self, guard: Guard, session: int, groups: Sequence[GroupQuery], tier: Wanted, order: Order) -> None:
        if not guard.allows():
            return
        try:
            started = self._bring(session, groups, tier, order)
        except TierdError:  # the session or the namespace has ended
            started = Started()
        if not started.id:
            guard.told(used=0, wasted=0)

    def _give_up(self) -> None:
        now = self._loop().time()
        while self._pauses:
            name = next(iter(self._pauses))
            away_s = now - self._pauses[name].began_s
            if away_s < AGES_S[-1] and len(self._pauses) <= PAUSES:
                return
            pause = self._pauses.pop(name)
            if pause.timer:
                pause.timer.cancel()
            if pause.kind in self._learnt:
                self._learnt[pause.kind].returns.given_up(away_s)


def _told(guard: Guard, outcome: Outcome) -> None:
    guard.told(used=outcome.used, wasted=outcome.wasted)


def _name_of(group: GroupQuery) -> Name | None:
    """None: the chain has no full block."""
    full = group.tokens // group.tokens_per_block
    return (group.namespaces[0], group.hashes[full - 1].tobytes()) if full else None
