"""Pages reserved ahead of puts: for several puts at a time, later committed, aborted or kept.

Purpose: rules of the core's machine. Non-purpose: their commits and aborts (`core_clients.py`: they
are reservations like any other).
"""

from __future__ import annotations

from dataclasses import replace

from core_clients import Entry, Reservation, chains, kinds, picks
from core_tangles import Tangles
from core_world import CHAINS, DEPTH, chain
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tierd.core.formats.model import StructArray, TierKind
from tierd.core.plan import PutQuery
from tierd.core.requests.puts import AHEAD_SHARE


class Ahead(Tangles):
    """See the module."""

    @rule(who=picks, where=picks, which=chains, count=st.integers(1, DEPTH), puts=st.integers(1, 8), kind=kinds)
    def reserve_ahead(self, who: int, where: int, which: int, count: int, puts: int, kind: TierKind) -> None:
        """Each reservation has all its pages, large enough for any chain; no other page is
        reserved."""
        session, kind = self.any_session(who), self.kind_here(kind, who)
        namespace = self.any_chain(session, where, which).namespace
        older = {generation for made in self.reservations.values() for generation in made.pages.values()}
        answer = self.core.reserve_ahead(
            session, group=self.roomy(namespace, count), puts=puts, kind=kind, now=self.tick()
        )
        self.apply(answer.plan)
        assert len(answer.reservations) <= puts
        new: list[Reservation] = []
        assert answer.extents.shape == (len(answer.reservations), count)
        for turn, (number, extents) in enumerate(zip(answer.reservations, answer.extents, strict=True)):
            its = chain(self.world, namespace, (which + turn) % CHAINS)
            made = Reservation(session, [Entry(its, i, its.parent(i)) for i in range(count)], private=True)
            made.pages = {i: self.check_reserved(session, extent, kind) for i, extent in enumerate(extents)}
            made.ahead_bytes = sum(self.page_bytes(e) << self.specs[int(e["tier"])].sealed_puts for e in extents)
            assert number not in self.reservations
            self.reservations[number] = made
            new.append(made)
        given = [int(generation) for generation in answer.extents["generation"].ravel()]
        self.take_sealed(answer.plan, new)
        assert len(set(given)) == len(given), "one page for two blocks"
        assert not set(given) & older, "pages of another reservation"
        if given:
            assert self.ahead_bytes * AHEAD_SHARE <= sum(s.capacity_bytes for s in self.specs if s.kind is kind)

    @invariant()
    def what_is_ahead_is_counted(self) -> None:
        if hasattr(self, "core"):
            assert self.core._sessions.ahead_bytes == self.ahead_bytes

    @property
    def ahead_bytes(self) -> int:
        return sum(made.ahead_bytes for made in self.reservations.values())

    def roomy(self, namespace: int, count: int) -> PutQuery:
        """Private blocks, each as long as the longest at its number in the namespace's chains."""
        query = chain(self.world, namespace, 0).put(0, count, private=True)
        blocks = query.blocks.copy()
        for number in range(count):
            blocks["length"][number] = max(chain(self.world, namespace, i).lengths[number] for i in range(CHAINS))
        return replace(query, blocks=blocks)

    def page_bytes(self, extent: StructArray) -> int:
        return next(a.class_bytes for a in self.model.segments.values() if a.segment == int(extent["segment"]))
