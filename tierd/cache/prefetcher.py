"""Begins prefetches, and goes on with those that lacked room within their share.

A prefetch brings the first blocks of its chains, as far as the share of prefetches allows. The rest
comes once gets have used what earlier prefetches brought, in the order of arrival. A get of the
same chains ends this, since it brings the rest itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tierd.cache.prefetches import Ledger, Order, Started
from tierd.core.core import Core
from tierd.core.formats.model import Wanted
from tierd.core.plan import Allowance, GroupQuery, Plan
from tierd.errors import TierdError

STEP = 8
"""A prefetch goes on once one part in so many of what is staged is free again. So few steps do much."""


class _Ask(NamedTuple):
    session: int
    groups: tuple[GroupQuery, ...]
    kind: Wanted
    order: Order


class Prefetcher:
    """See the module. allow: what a session may bring into a kind of tier now.

    carry_out: starts a plan of a session. now: the core's time.
    """

    def __init__(
        self,
        core: Core,
        ledger: Ledger,
        *,
        allow: Callable[[int, Wanted], Allowance],
        carry_out: Callable[[Plan, int], None],
        now: Callable[[], float],
    ) -> None:
        self._core, self._ledger = core, ledger
        self._allow, self._carry_out, self._now = allow, carry_out, now
        self._short: dict[int, _Ask] = {}

    def begin(self, session: int, groups: Sequence[GroupQuery], kind: Wanted, order: Order) -> Started:
        """Begins to bring the blocks near."""
        self.resume()
        return self._bring(_Ask(session, tuple(groups), kind, order), number=0)

    def asked(self, groups: Sequence[GroupQuery]) -> None:
        """A get asks for these chains: it brings what prefetches of them did not."""
        if self._short:
            name = _name_of(groups)
            for number in [number for number, ask in self._short.items() if _name_of(ask.groups) == name]:
                self._end(number)

    def resume(self) -> None:
        """Goes on with the prefetches that lacked room, while there is some."""
        self._ledger.expire()
        while self._short:
            number, ask = next(iter(self._short.items()))
            if not self._ledger.is_open(ask.session, number):
                self._end(number)
                continue
            left = self._allow(ask.session, ask.kind).bytes
            if left is not None and left * STEP <= self._ledger.staged.total():
                return
            try:
                self._bring(ask, number)
            except TierdError:  # the namespace has ended
                self._end(number)
            if number in self._short:
                return

    def _end(self, number: int) -> None:
        del self._short[number]
        self._ledger.complete(number)

    def _bring(self, ask: _Ask, number: int) -> Started:
        """number: of the prefetch that this goes on with; 0: a new one."""
        allowance = self._allow(ask.session, ask.kind)
        plan = self._core.prefetch(ask.session, groups=ask.groups, kind=ask.kind, now=self._now(), allowance=allowance)
        self._carry_out(plan, ask.session)
        number = self._ledger.begin(ask.session, plan, ask.order, number=number)
        if number:
            self._ledger.keep(number, self._core.keep(ask.session, plan.transfers["block"], ask.kind))
        if plan.is_short:
            self._short[number] = ask
        else:
            self._short.pop(number, None)
        return Started(number, len(plan.transfers))


def _name_of(groups: Sequence[GroupQuery]) -> tuple[int, bytes]:
    group = groups[0]
    return group.namespaces[0], group.hashes[-1:].tobytes()
