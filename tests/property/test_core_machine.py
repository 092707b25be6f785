"""Core against a plain model: random calls of several sessions, random ends of transfers.

The model checks every plan. Promises: no page has two holders, no pinned page is freed, no block is
visible before its commit. Every handle leads to the bytes of its name. Generations and ids never
repeat. Plans report every freed page. A new core adopts ready blocks and live sessions' pages.
After the last session nothing is left.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from core_ahead import Ahead
from core_clients import CORRUPT, FAILED, READY, SHARE, Lease, chains, kinds, new_core, picks
from core_model import Stage
from core_world import CHAINS, DEPTH, DOMAINS, WORLDS, chain
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tierd.core.core import Core
from tierd.core.formats.model import DAEMON, SEALED, TierKind
from tierd.core.plan import Start

requests = st.lists(st.tuples(picks, picks, chains), min_size=1, max_size=8)


class CoreMachine(Ahead):
    """The rules of the daemon and its operators, and the invariants after every step."""

    @initialize(world=st.sampled_from(sorted(WORLDS)), wanted=requests)
    def begin(self, world: str, wanted: list[tuple[int, int, int]]) -> None:
        self.build(world)
        self.request(wanted, TierKind.HOST, hold=False)

    # -- whole requests, so that tiers fill up

    @rule(wanted=requests, kind=kinds, hold=st.sampled_from([False, False, True]))
    def request(self, wanted: list[tuple[int, int, int]], kind: TierKind, hold: bool) -> None:
        """Acquires sequences, puts the missing blocks and releases all, as an engine does."""
        for who, where, which in wanted:
            older = set(self.leases) | {0}
            self.acquire(who, where, which, kind)
            self.land_all()
            for number in [i for i in self.leases if i not in older]:
                self.settle([i for i, lease in self.leases.items() if not lease.settled].index(number))
            self.put(who, where, which, kind)
            for number in [i for i in self.leases if i not in older and not hold]:
                self.release(list(self.leases).index(number))
            self.demote(8)

    def put(self, who: int, where: int, which: int, kind: TierKind) -> None:
        older = set(self.reservations)
        self.reserve(who, where, which, 0, DEPTH, private=False, kind=kind)
        for number in [i for i in self.reservations if i not in older]:
            able = [i for i, made in self.reservations.items() if made.idle]
            self.begin_commit(able.index(number), 0)
            self.finish_commit(len(self.commits) - 1, good=True, lease=True, keep_open=False)

    def land_all(self) -> None:
        while self.model.flights:
            self.finish(8, 0, READY)

    # -- background work

    @precondition(lambda self: self.model.flights)
    @rule(how_many=st.integers(1, 8), which=picks, bad=st.sampled_from([READY, READY, READY, FAILED, CORRUPT]))
    def finish(self, how_many: int, which: int, bad: int) -> None:
        statuses: dict[int, int] = {}
        for _ in range(how_many):
            able = [f for f in self.model.flights.values() if f.started and f.id not in statuses]
            if not able:
                break
            flight = self.pick(able, which)
            statuses[flight.id] = bad if not statuses else READY
            if statuses[flight.id] is not READY:
                self.fail_followers(flight.id, statuses)
            self.model.land(flight.id, statuses[flight.id])
        for failed in [i for i in statuses if i in self.model.flights]:
            self.model.land(failed, FAILED)
        self.tell(statuses)

    def fail_followers(self, first: int, statuses: dict[int, int]) -> None:
        for follower in [f.id for f in self.model.flights.values() if f.after == first]:
            statuses[follower] = FAILED
            self.fail_followers(follower, statuses)

    def tell(self, statuses: dict[int, int]) -> None:
        ids = np.array(list(statuses), np.uint64)
        codes = np.array(list(statuses.values()), np.uint16)
        self.apply(self.core.finish(ids, statuses=codes, now=self.tick()))

    @rule(limit=st.integers(1, 8))
    def demote(self, limit: int) -> None:
        self.apply(self.core.demote(self.tick(), limit=limit))

    @rule(which=picks, amount=st.integers(1, 6))
    def persist(self, which: int, amount: int) -> None:
        self.apply(self.core.persist(self.some_blocks(which, amount), now=self.tick()))

    def some_blocks(self, which: int, amount: int) -> np.ndarray:
        keys = [k for k, tiers in self.model.held.items() if tiers]
        chosen = {keys[(which + i) % len(keys)] for i in range(amount)} if keys else set()
        found = [self.core.find_block(*key) for key in sorted(chosen)]
        assert None not in found
        return np.array(found, np.int64)

    # -- faults and operators

    @precondition(lambda self: any(self.model.held.values()))
    @rule(which=picks)
    def condemn(self, which: int) -> None:
        held = [g for tiers in self.model.held.values() for g in tiers.values()]
        page = self.model.pages[self.pick(held, which)]
        assert page.content is not None
        block = self.core.find_block(*page.content)
        assert block is not None
        extents = self.core.extents(np.array([block]), tier=page.tier)
        assert extents["generation"].tolist() == [page.generation]
        self.model.condemn(page.generation)
        self.apply(self.core.condemn(extents, now=self.tick()))
        assert page.generation not in self.model.pages or self.may_be_pinned(page.generation)

    def may_be_pinned(self, generation: int) -> bool:
        return bool(self.model.pins[generation]) or any(not lease.settled for lease in self.leases.values())

    @rule(which=picks, amount=st.integers(1, 3))
    def lose(self, which: int, amount: int) -> None:
        """After a failed sync some of a store's pages have no bytes, reported already or not."""
        stores = [t for t, spec in enumerate(self.specs) if spec.kind is TierKind.NVME]
        written = [p for p in self.model.pages.values() if p.tier in stores and p.stage is not Stage.WRITING]
        lost = {self.pick(written, which + i).generation for i in range(amount)} if written else set()
        for generation in lost:
            self.model.lose(generation)
        self.apply(self.core.lose(self.model.extents(sorted(lost)), now=self.tick()))
        pinned = {g for g in lost & self.model.pages.keys() if self.may_be_pinned(g)}
        assert not lost & (self.model.pages.keys() - pinned)

    @rule(which=picks, amount=st.integers(1, 4), where=st.integers(-1, 4))
    def evict(self, which: int, amount: int, where: int) -> None:
        tier = where if 0 <= where < len(self.specs) else None
        self.apply(self.core.evict(self.some_blocks(which, amount), tier=tier, now=self.tick()))

    @rule(which=picks, amount=st.integers(1, 3), pin=st.booleans())
    def pin_blocks(self, which: int, amount: int, pin: bool) -> None:
        blocks = self.some_blocks(which, amount)
        changed = self.core.pin_blocks(blocks) if pin else self.core.unpin_blocks(blocks)
        assert 0 <= changed <= len(blocks)

    @rule(domain=st.sampled_from(DOMAINS), number=st.integers(0, 1))
    def forget_namespace(self, domain: int, number: int) -> None:
        old = self.namespaces[domain][number]
        self.namespaces[domain][number] = next(self.namespace_ids)
        held = sum(key[0] == old and bool(tiers) for key, tiers in self.model.held.items())
        self.model.forget({old})
        forgotten = self.core.forget_namespaces([old], now=self.tick())
        assert forgotten.blocks >= held  # and blocks of which only a lease still has a page
        self.apply(forgotten.plan)

    @precondition(lambda self: self.model.ending)
    @rule(which=picks, begin=st.integers(0, 7))
    def free_some(self, which: int, begin: int) -> None:
        """Frees one of eight parts of an ended epoch's blocks."""
        self.free(self.pick(sorted(self.model.ending), which), slice(begin, None, 8))

    @precondition(lambda self: self.model.ending)
    @rule(which=picks)
    def free_all(self, which: int) -> None:
        """Frees all blocks of an ended epoch."""
        ended = self.pick(sorted(self.model.ending), which)
        self.free(ended, slice(None))
        self.model.ending.discard(ended)
        left = [p for p in self.model.pages.values() if p.stage is Stage.READY and p.content and p.content[0] == ended]
        assert all(self.may_be_pinned(p.generation) for p in left)

    def free(self, namespace: int, part: slice) -> None:
        for ids in self.core.pieces():
            self.apply(self.core.free_forgotten(ids[part], namespaces=[namespace], now=self.tick()))

    @rule(which=picks, serving=st.booleans())
    def set_serving(self, which: int, serving: bool) -> None:
        tier = which % len(self.specs)
        self.model.serving[tier] = serving
        self.core.set_serving(tier, serving)

    @rule(which=picks, stores=st.integers(0, 3))
    def set_direct(self, which: int, stores: int) -> None:
        """A device starts to read some stores directly, or stops."""
        devices = [tier for tier, spec in enumerate(self.specs) if spec.kind is TierKind.DEVICE]
        far = [tier for tier, spec in enumerate(self.specs) if spec.kind is TierKind.NVME]
        if devices:
            tier, direct = self.pick(devices, which), frozenset(t for i, t in enumerate(far) if stores >> i & 1)
            self.model.direct[tier] = direct
            self.core.set_direct(tier, direct)

    # -- a new daemon

    @rule(live=st.booleans())
    def restart(self, live: bool) -> None:
        """A new core adopts the ready blocks of every tier, and the pages that live sessions
        hold."""
        old, model = self.core, self.model
        self.core = new_core(
            self.specs,
            start=Start(max(model.used_generations, default=0) + 1, max(model.used_segments, default=0) + 1),
        )
        model.direct.clear()
        leases, reservations = self.leases, self.reservations
        self.leases, self.reservations, self.commits = {}, {}, []
        sessions = model.sessions if live else {}
        for session, domain in sessions.items():
            self.core.open_session(session, domain=domain)
        written = {g for r in reservations.values() for g in r.pages.values() if r.session in sessions}
        read = {g for lease in leases.values() for g in lease.generations if lease.session in sessions}
        model.restart(written | read, sessions)
        for tier in range(len(self.specs)):
            self.adopt(old, tier)
        for session in sorted(sessions):
            held = [lease.generations for lease in leases.values() if lease.session == session]
            mine = [r.pages.values() for r in reservations.values() if r.session == session]
            self.restore(session, {g for part in held for g in part}, {g for part in mine for g in part})
        for tier in range(len(self.specs)):
            self.core.close_empty(tier)
        for domain in () if live else DOMAINS:
            self.open_session(domain)

    def adopt(self, old: Core, tier: int) -> None:
        generations = [tiers[tier] for tiers in self.model.held.values() if tier in tiers]
        keys = [self.model.pages[g].content for g in generations]
        blocks = np.array([old.find_block(*key) for key in keys if key], np.int64)
        extents, metas = old.extents(blocks, tier=tier), old.metas(blocks)
        assert extents["generation"].tolist() == generations
        for name in ("generation", "segment", "offset"):
            metas[name] = extents[name]
        segments = [a for (t, _), a in self.model.segments.items() if t == tier]
        assert self.core.adopt(tier, segments=segments, extents=extents, metas=metas, now=self.tick()).all()
        for key in keys:
            block = self.core.find_block(*key) if key else None
            assert block is not None
            self.model.move(self.core.extents(np.array([block]), tier=tier)[0])

    def restore(self, session: int, pinned: set[int], reserved: set[int]) -> None:
        """Restores the session's pages: ready ones, those of ended epochs, those being written."""
        read, written = sorted(pinned), sorted(reserved & self.model.pages.keys())
        answer = self.core.restore(
            session, pinned=self.model.extents(read), reserved=self.model.extents(written), now=self.tick()
        )
        assert answer.pinned.all()
        assert answer.reserved.all()
        held = sorted(pinned | set(written))
        assert bool(answer.lease) == bool(held)
        if held:
            self.leases[answer.lease] = Lease(session, [], 0, settled=True, generations=held)
            self.model.pins.update(held)
        for segment, mapped in self.model.descriptors.items():
            tiers = [t for (t, _), a in self.model.segments.items() if a.segment == segment]
            if session in mapped and tiers:
                self.core.note_attached(session, tier=tiers[0], segment=segment)

    # -- after every step

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        for tier, stats in enumerate(self.core.tier_stats()):
            held = sum(page.tier == tier for page in self.model.pages.values())
            assert held == stats.pages_reserved + stats.pages_ready + stats.pages_retiring
            assert stats.used_bytes <= stats.assigned_bytes <= stats.capacity_bytes
        for stats in self.core.session_stats():
            for spec, pinned, reserved in zip(self.specs, stats.pinned_bytes, stats.reserved_bytes, strict=True):
                assert pinned + reserved <= SHARE * spec.capacity_bytes

    @invariant()
    def words_say_what_is_found(self) -> None:
        if hasattr(self, "core"):
            self.model.check_words()

    @invariant()
    def what_is_found_is_held(self) -> None:
        if not hasattr(self, "core"):
            return
        for namespace in (n for pair in self.namespaces.values() for n in pair):
            for number in range(CHAINS):
                asked = chain(self.world, namespace, number)
                found = self.core.lookup([asked.group()], self.now).tier_of[0]
                assert found.tolist() == [[self.model.nearest((namespace, h)) for h in asked.hashes]]

    def teardown(self) -> None:
        """With all sessions ended and blocks evicted, only empty daemon segments stay."""
        if not hasattr(self, "core") or sys.exc_info()[0] is not None:
            return  # no step ran, or a step has already failed
        self.land_all()
        while self.commits:
            self.finish_commit(0, good=True, lease=True, keep_open=False)
        for session in sorted(self.model.sessions):
            self.open_session(1)
            self.end_session(sorted(self.model.sessions).index(session))
        self.land_all()
        for namespace in sorted(self.model.ending):
            self.free(namespace, slice(None))
        self.core.unpin_blocks(self.core.blocks())
        self.apply(self.core.evict(self.core.blocks(), tier=None, now=self.tick()))
        assert not self.model.pages, f"left behind: {self.model.pages}"
        self.core.check()
        for position, (spec, stats) in enumerate(zip(self.specs, self.core.tier_stats(), strict=True)):
            assert stats.used_bytes == stats.quarantined_bytes
            waits = spec.writer_owned and all(s.writer in (DAEMON, SEALED) for s in self.core.segments(position))
            assert stats.assigned_bytes == 0 or stats.pages_quarantined or waits


TestCore = pytest.mark.timeout(3600)(CoreMachine.TestCase)  # nightly plays thousands of games
