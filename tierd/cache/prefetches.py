"""Prefetches: what became of the pages that they brought, and which of their transfers may start.

`Ledger`: a page that a prefetch brought is used by the first get that it serves. If its time ends
first, or the page is freed, its bytes were wasted. Generations identify pages. A transfer that
several prefetches want is dropped when the last of them is cancelled.

`Turns`: batches of prefetches take a share of a link's places, before they queue at the link. A
batch that waits here is dropped when its prefetch is cancelled. If a get waits for one of its
blocks, it goes ahead at once, as demand.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

from tierd.core.arrays.sets import among
from tierd.core.formats.model import Reason, StructArray
from tierd.core.plan import Plan
from tierd.metrics import Metrics

TTL_S = 60.0
"""Time in which a get should use what a prefetch brings, if its caller gives none."""
OF_SESSION = 4096
"""Prefetches of a session that can be cancelled; older ones cannot."""


@dataclass(frozen=True, slots=True)
class Started:
    """id: 0 if nothing was started. blocks: transfers that the call started."""

    id: int = 0
    blocks: int = 0


@dataclass(slots=True)
class _Prefetch:
    session: int
    origin: str
    transfers: list[int] = field(default_factory=list)
    pages: set[int] = field(default_factory=set)
    leases: list[int] = field(default_factory=list)
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """A prefetch's purpose. origin: lookup or call. ttl_s: time for a get to use it."""

    origin: str = "call"
    ttl_s: float = TTL_S


class Ledger:
    """See the module. now: monotonic time in seconds. next_id: a number that was never used before,
    also by earlier daemons."""

    def __init__(self, metrics: Metrics, *, now: Callable[[], float], next_id: Callable[[], int]) -> None:
        self._metrics, self._now, self._next_id = metrics, now, next_id
        self._open: dict[int, _Prefetch] = {}
        self._pages: dict[int, tuple[int, int, int]] = {}  # by generation: prefetch, tier, bytes
        self._ends: list[tuple[float, int]] = []
        self._of_session: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._owners: Counter[int] = Counter()  # by transfer: prefetches that want it
        self._kept: dict[int, None] = {}
        self.staged: Counter[int] = Counter()
        """Bytes brought and not used yet, by tier."""
        self.let_go: Callable[[int, int], None] = lambda _session, _lease: None
        """Releases a lease of a session."""

    def __len__(self) -> int:
        """Pages brought and not used yet."""
        return len(self._pages)

    def begin(self, session: int, plan: Plan, order: Order, *, number: int = 0) -> int:
        """Books the pages that a plan brings. Those that only lie on the way of others do not count.
        number: the prefetch goes on; 0: a new one. Returns its number; 0: it has nothing to bring."""
        wanted = [*plan.transfers["id"].tolist(), *plan.waits.tolist()]
        if not number:
            if not (wanted or plan.is_short):
                return 0
            number = self._next_id()
            self._open[number] = _Prefetch(session, order.origin)
            heapq.heappush(self._ends, (self._now() + order.ttl_s, number))
            self._of_session[session][number] = None
            if len(self._of_session[session]) > OF_SESSION:
                del self._of_session[session][next(iter(self._of_session[session]))]
        made = self._open[number]
        made.is_short = plan.is_short
        made.transfers += wanted
        self._owners.update(wanted)
        ends = plan.transfers[~among(plan.transfers["id"], plan.transfers["after"])]
        for generation, tier, length in ends["target"][["generation", "tier", "length"]].tolist():
            self._pages[generation] = (number, tier, length)
            made.pages.add(generation)
            self.staged[tier] += length
        return number

    def complete(self, number: int) -> None:
        """The prefetch does not go on: it ends with its pages."""
        if made := self._open.get(number):
            made.is_short = False
            if not made.pages:
                self._close(number)

    def is_open(self, session: int, number: int) -> bool:
        """Whether the prefetch is the session's, and was neither cancelled nor ended."""
        return number in self._of_session.get(session, ())

    def keep(self, number: int, lease: int) -> None:
        """A lease keeps the prefetch's pages until they were used, their time ends, or `yield_room`."""
        if lease and number in self._open:
            self._open[number].leases.append(lease)
            self._kept[number] = None

    def yield_room(self) -> bool:
        """Somebody finds no room: no lease keeps pages of prefetches any more. False: none did."""
        kept = list(self._kept)
        for number in kept:
            self._let_go(number)
        return bool(kept)

    def _let_go(self, number: int) -> None:
        if number in self._kept:
            del self._kept[number]
            made = self._open[number]
            leases, made.leases = made.leases, []
            for lease in leases:
                self.let_go(made.session, lease)

    def cancel(self, session: int, numbers: Iterable[int]) -> list[int]:
        """Ends these prefetches, as far as they are the session's. Returns the transfers that no
        other prefetch wants."""
        found = list[int]()
        for number in numbers:
            if self.is_open(session, number):
                found += self._disown(number)
                self._let_go(number)  # which may free pages, and so end it
                self.complete(number)
        return found

    def _disown(self, number: int) -> list[int]:
        """The session forgets the prefetch. Returns the transfers that no other one wants."""
        made, freed = self._open[number], list[int]()
        theirs = self._of_session.get(made.session, {})
        theirs.pop(number, None)
        if not theirs:
            self._of_session.pop(made.session, None)
        for transfer in made.transfers:
            self._owners[transfer] -= 1
            if not self._owners[transfer]:
                del self._owners[transfer]
                freed.append(transfer)
        made.transfers = []
        return freed

    def of(self, session: int) -> list[int]:
        """The session's prefetches that can be cancelled."""
        return list(self._of_session.get(session, ()))

    def use(self, generations: Iterable[int]) -> None:
        """A get was served from these pages."""
        if self._pages:
            self.expire()
            for generation in generations:
                self._end(generation, "used")

    def free(self, freed: StructArray) -> None:
        """FREED pages: those not used were wasted; those that no bytes had reached, dropped."""
        if self._pages and len(freed):
            gone = zip(freed["extent"]["generation"].tolist(), freed["was_ready"].tolist(), strict=True)
            for generation, was_ready in gone:
                self._end(generation, "wasted" if was_ready else "dropped")

    def fail(self, generations: Iterable[int]) -> None:
        """No bytes will come to these pages: dropped, even while a lease keeps them."""
        if self._pages:
            for generation in generations:
                self._end(generation, "dropped")

    def expire(self) -> None:
        """Ends the prefetches whose time is over: what was not used was wasted."""
        while self._ends and self._ends[0][0] <= self._now():
            _, number = heapq.heappop(self._ends)
            if number in self._open:
                for generation in list(self._open[number].pages):
                    self._end(generation, "wasted")
            if number in self._open:  # it had no pages
                self._close(number)

    def _end(self, generation: int, outcome: str) -> None:
        number, tier, size = self._pages.pop(generation, (0, 0, 0))
        if number:
            made = self._open[number]
            made.pages.discard(generation)
            self.staged[tier] -= size
            self._metrics.prefetched.labels(origin=made.origin, outcome=outcome).inc(size)
            if not made.pages and not made.is_short:
                self._close(number)

    def _close(self, number: int) -> None:
        self._disown(number)
        self._let_go(number)
        del self._open[number]


class _Turn(Enum):
    DROPPED = 0
    COUNTED = 1
    AHEAD = 2


@dataclass(slots=True, eq=False)
class _Waiting:
    ids: frozenset[int]
    turn: asyncio.Future[_Turn]


Link = tuple[int, int]
"""Positions of the tiers that a transfer reads from and writes to."""


class Turns:
    """See the module. limit: returns the batches of prefetches at one time on each link."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._active: Counter[Link] = Counter()
        self._waiting: defaultdict[Link, deque[_Waiting]] = defaultdict(deque)
        self._known: set[int] = set()
        self._wanted: set[int] = set()
        self._dropped: set[int] = set()

    def expect(self, batch: StructArray) -> None:
        """A batch of TRANSFER records starts; it asks for its turn later."""
        if batch["reason"][0] == Reason.PREFETCH:
            self._known.update(batch["id"].tolist())

    def end(self, batch: StructArray) -> None:
        """The batch has ended."""
        if self._known:
            for known in (self._known, self._wanted, self._dropped):
                known.difference_update(batch["id"].tolist())

    def want(self, ids: Iterable[int]) -> None:
        """A get waits for these transfers: they go ahead, as demand."""
        if self._known:
            self._wanted |= self._known.intersection(ids)
            self._settle(lambda waiting: not self._wanted.isdisjoint(waiting.ids), _Turn.AHEAD)

    def drop(self, ids: Iterable[int]) -> None:
        """Drops batches that have not begun, if no get waits for them and all of their transfers are
        dropped."""
        self._dropped |= self._known.intersection(ids)
        self._settle(lambda waiting: self._dropped.issuperset(waiting.ids), _Turn.DROPPED)

    @asynccontextmanager
    async def of(self, batch: StructArray) -> AsyncIterator[bool]:
        """Held while the batch is copied. False: it was dropped."""
        ids = frozenset(batch["id"].tolist())
        if not self._known.issuperset(ids):
            yield True
            return
        link = int(batch["source"]["tier"][0]), int(batch["target"]["tier"][0])
        turn = await self._turn(link, ids)
        if turn is _Turn.AHEAD:
            batch["reason"] = Reason.DEMAND
        try:
            yield turn is not _Turn.DROPPED
        finally:
            if turn is _Turn.COUNTED:
                self._give_back(link)

    async def _turn(self, link: Link, ids: frozenset[int]) -> _Turn:
        if not self._wanted.isdisjoint(ids):
            return _Turn.AHEAD
        if self._dropped.issuperset(ids):
            return _Turn.DROPPED
        if self._active[link] < self._limit():
            self._active[link] += 1
            return _Turn.COUNTED
        waiting = _Waiting(ids, asyncio.get_running_loop().create_future())
        self._waiting[link].append(waiting)
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.result() is _Turn.COUNTED:
                self._give_back(link)
            raise

    def _settle(self, is_its: Callable[[_Waiting], bool], turn: _Turn) -> None:
        for line in self._waiting.values():
            for waiting in [each for each in line if is_its(each)]:
                line.remove(waiting)
                if not waiting.turn.done():
                    waiting.turn.set_result(turn)

    def _give_back(self, link: Link) -> None:
        self._active[link] -= 1
        line = self._waiting[link]
        while line and self._active[link] < self._limit():
            waiting = line.popleft()
            if not waiting.turn.done():
                self._active[link] += 1
                waiting.turn.set_result(_Turn.COUNTED)
