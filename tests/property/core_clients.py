"""The clients' half of the core's machine: sessions, gets, puts. `test_core_machine.py`: the
rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from core_model import Key, Model, Stage
from core_world import CHAINS, DEPTH, DOMAINS, WORLDS, Chain, chain
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tierd.core.core import Core
from tierd.core.formats.model import COMMIT_BLOCK, SEALED, BlockStatus, StructArray, TierKind, TierSpec
from tierd.core.plan import Committing, Plan, Reserved
from tierd.policies.named import NamedPolicies

SHARE = 0.5
SESSION_LIMIT = 4
READY, FAILED, CORRUPT = BlockStatus.READY, BlockStatus.FAILED, BlockStatus.CORRUPT

picks = st.integers(0, 1 << 12)
chains = st.integers(0, CHAINS - 1)
depths = st.integers(0, DEPTH)
kinds = st.sampled_from([TierKind.HOST, TierKind.HOST, TierKind.DEVICE])


@dataclass
class Entry:
    """Block `number` of a chain. parent: the hash that its writer states."""

    chain: Chain
    number: int
    parent: bytes

    @property
    def key(self) -> Key:
        return (self.chain.namespace, self.chain.hashes[self.number])


@dataclass
class Reservation:
    """entries: by index, the block that is or will be there, and its parent's hash.
    pages: index -> generation that the session writes. ahead_bytes: size of pages for a future
    put."""

    session: int
    entries: list[Entry]
    private: bool
    pages: dict[int, int] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    ahead_bytes: int = 0

    @property
    def idle(self) -> list[int]:
        """Indices that can be committed now."""
        return sorted(self.pages.keys() - self.busy)


@dataclass
class Commit:
    committing: Committing
    keys: list[Key]
    generations: list[int]


@dataclass
class Lease:
    session: int
    asked: list[list[Chain]]  # per group, per rank
    tokens: int
    settled: bool = False
    generations: list[int] = field(default_factory=list)


def new_core(specs: list[TierSpec], **more: Any) -> Core:
    return Core(specs, policies=NamedPolicies(), session_share=SHARE, **more)


class Clients(RuleBasedStateMachine):
    """A core, its model, and the clients' calls."""

    def build(self, world: str) -> None:
        self.world = WORLDS[world]
        self.specs = self.world.tiers
        self.core = new_core(self.specs)
        self.model = Model(self.specs)
        self.session_ids, self.namespace_ids = count(1), count(1)
        self.namespaces = {domain: [next(self.namespace_ids) for _ in range(2)] for domain in DOMAINS}
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        self.commits: list[Commit] = []
        self.now = 0.0
        self.digests: dict[Key, bytes] = {}
        for domain in (1, 1, 2):
            self.open_session(domain)

    # -- helpers of the rules

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def pick(self, things: list, number: int):
        return things[number % len(things)]

    def any_session(self, number: int) -> int:
        return self.pick(sorted(self.model.sessions), number)

    def any_chain(self, session: int, number: int, which: int) -> Chain:
        return chain(self.world, self.pick(self.namespaces[self.model.sessions[session]], number), which)

    def kind_here(self, kind: TierKind, luck: int) -> TierKind:
        """The kind, or mostly a host tier if no tier has this kind."""
        return kind if luck % 8 == 0 or any(spec.kind is kind for spec in self.specs) else TierKind.HOST

    def apply(self, plan: Plan) -> None:
        self.model.apply(plan)
        for begun in plan.segments:
            if begun.writer in self.model.sessions:
                self.attach(begun.writer, begun.tier, begun.segment)

    # -- sessions

    @precondition(lambda self: len(self.model.sessions) < SESSION_LIMIT)
    @rule(domain=st.sampled_from(DOMAINS))
    def open_session(self, domain: int) -> None:
        session = next(self.session_ids)
        self.core.open_session(session, domain=domain)
        self.model.sessions[session] = domain

    @precondition(lambda self: len(self.model.sessions) > 1)
    @rule(who=picks, joins=st.booleans())
    def end_session(self, who: int, *, joins: bool = False) -> None:
        """joins: its process lives, and another session of its domain takes over its mappings."""
        session, sessions = self.any_session(who), self.model.sessions
        others = [s for s, domain in sessions.items() if s != session and domain == sessions[session]]
        into = min(others) if joins and others else 0
        for lease_id in [i for i, lease in self.leases.items() if lease.session == session]:
            self.drop_lease(lease_id)
        plan = self.core.end_session(session, self.tick(), into=into)
        self.model.end_session(session, into)
        self.apply(plan)
        for number in [i for i, r in self.reservations.items() if r.session == session]:
            self.check_only_busy_left(self.reservations.pop(number))
        assert self.core.end_session(session, self.now).is_empty, "ending a session again does something"

    def attach(self, session: int, tier: int, segment: int) -> None:
        self.core.note_attached(session, tier=tier, segment=segment)
        mapped = self.model.descriptors.setdefault(segment, {})
        is_writer = self.model.writers[segment] == session
        mapped[session] = mapped.get(session, False) or is_writer
        if is_writer:
            self.model.lend(tier, segment)

    # -- gets

    @rule(who=picks, where=picks, which=chains)
    def lookup(self, who: int, where: int, which: int) -> None:
        asked = self.any_chain(self.any_session(who), where, which)
        found = self.core.lookup([asked.group()], self.now)
        tiers = [self.model.nearest((asked.namespace, h)) for h in asked.hashes]
        assert found.tier_of[0].tolist() == [tiers]
        held = next((i for i, t in enumerate(tiers) if t < 0), DEPTH)
        assert found.tokens == sum(asked.block_tokens(i) for i in range(held))
        assert sum(found.tier_tokens) == found.tokens

    @rule(who=picks, where=picks, which=chains, kind=kinds)
    def acquire(self, who: int, where: int, which: int, kind: TierKind) -> None:
        session = self.any_session(who)
        asked = self.any_chain(session, where, which)
        most = self.core.lookup([asked.group()], self.now).tokens
        answer = self.core.acquire(session, groups=[asked.group()], kind=self.kind_here(kind, who), now=self.tick())
        assert answer.tokens <= most
        assert answer.tokens == most or not answer.whole
        assert bool(answer.lease) == bool(answer.tokens)
        self.apply(answer.plan)
        if answer.lease:
            assert answer.lease not in self.leases
            self.leases[answer.lease] = Lease(session, [[asked]], answer.tokens)

    @precondition(lambda self: any(not lease.settled for lease in self.leases.values()))
    @rule(which=picks)
    def settle(self, which: int) -> None:
        lease_id = self.pick([i for i, lease in self.leases.items() if not lease.settled], which)
        lease = self.leases[lease_id]
        served = self.core.settle(lease_id, now=self.tick())
        assert served.tokens <= lease.tokens
        lease.settled = True
        if not served.tokens:
            self.apply(served.plan)
            del self.leases[lease_id]
            return
        for group, ranks in zip(served.groups, lease.asked, strict=True):
            assert group.first == 0
            whole = sum(ranks[0].block_tokens(i) for i in range(group.count))
            assert whole == served.tokens if len(lease.asked) == 1 else whole >= served.tokens
            for asked, extents, blocks in zip(ranks, group.extents, group.blocks.tolist(), strict=True):
                self.check_served(lease, asked, extents, blocks)
        self.model.pins.update(lease.generations)
        for group in served.groups:
            for tier, segment in np.unique(group.extents[["tier", "segment"]]).tolist():
                self.attach(lease.session, tier, segment)
        self.apply(served.plan)
        assert self.core.settle(lease_id, now=self.now).tokens == served.tokens

    def check_served(self, lease: Lease, asked: Chain, extents: StructArray, blocks: list[int]) -> None:
        for number, (extent, block) in enumerate(zip(extents, blocks, strict=True)):
            key = (asked.namespace, asked.hashes[number])
            lease.generations.append(self.model.check_holds(extent, key))
            if key[0] not in self.model.forgotten:
                assert self.core.find_block(*key) == block
            assert self.core.metas(np.array([block]))["digest"][0].tobytes() == self.digests[key]

    @precondition(lambda self: self.leases)
    @rule(which=picks)
    def release(self, which: int) -> None:
        lease_id = self.pick(list(self.leases), which)
        session = self.leases[lease_id].session
        self.drop_lease(lease_id)
        self.apply(self.core.release(session, leases=[lease_id], now=self.tick()))
        assert self.core.release(session, leases=[lease_id], now=self.now).is_empty

    def drop_lease(self, lease_id: int) -> None:
        self.model.pins.subtract(self.leases.pop(lease_id).generations)

    @rule(who=picks, where=picks, which=chains, kind=kinds)
    def prefetch(self, who: int, where: int, which: int, kind: TierKind) -> None:
        session = self.any_session(who)
        group = self.any_chain(session, where, which).group()
        self.apply(self.core.prefetch(session, groups=[group], kind=self.kind_here(kind, who), now=self.tick()))

    # -- puts

    @rule(who=picks, where=picks, which=chains, first=depths, more=depths, private=st.booleans(), kind=kinds)
    def reserve(self, who: int, where: int, which: int, first: int, more: int, private: bool, kind: TierKind) -> None:
        session = self.any_session(who)
        asked = self.any_chain(session, where, which)
        first = min(first, DEPTH - 1)
        numbers = list(range(first, min(DEPTH, first + 1 + more)))
        kind = self.kind_here(kind, who)
        query = asked.put(numbers[0], numbers[-1] + 1, private=private)
        answer = self.core.reserve(session, groups=[query], kind=kind, now=self.tick())
        self.apply(answer.plan)
        entries = [Entry(asked, number, asked.parent(number)) for number in numbers]
        self.take_reserved(session, [entries], answer, private=private, kind=kind)

    def take_reserved(
        self, session: int, groups: list[list[Entry]], answer: Reserved, *, private: bool, kind: TierKind
    ) -> None:
        """Checks a Reserve's answer to these groups, after its plan was applied."""
        made, index = Reservation(session, [entry for group in groups for entry in group], private), 0
        for group, statuses, extents in zip(groups, answer.statuses, answer.extents, strict=True):
            refused = False
            for entry, status, extent in zip(group, statuses.tolist(), extents, strict=True):
                if status == BlockStatus.RESERVED:
                    assert not refused, "pages behind a block that found no room"
                    made.pages[index] = self.check_reserved(session, extent, kind)
                elif status == BlockStatus.EXISTS:
                    assert not private
                    self.model.check_holds(extent, entry.key)
                else:
                    assert status == BlockStatus.NO_ROOM
                    assert extent["page"] == -1
                    refused = True
                index += 1
        assert bool(answer.reservation) == bool(made.pages)
        assert len(set(made.pages.values())) == len(made.pages), "one page for two blocks"
        self.take_sealed(answer.plan, [made])
        if answer.reservation:
            self.reservations[answer.reservation] = made

    def take_sealed(self, plan: Plan, new: list[Reservation]) -> None:
        """Checks that a plan reserved the sessions' pages, and a sealed page for each of those in a
        tier with sealed puts. Only the daemon may write to a sealed page."""
        reserved = set(plan.reserved["generation"].tolist()) - set(plan.transfers["target"]["generation"].tolist())
        given = {g for made in new for g in made.pages.values()}
        assert reserved >= given
        others = [self.model.pages[g].segment for g in reserved - given]
        assert len(others) == sum(map(self.is_staged, given)), "pages were set aside for nobody, or one for two blocks"
        assert all(self.model.writers[segment] == SEALED for segment in others)

    def is_staged(self, generation: int) -> bool:
        return self.specs[self.model.pages[generation].tier].sealed_puts

    def check_reserved(self, session: int, extent: StructArray, kind: TierKind) -> int:
        generation = int(extent["generation"])
        page = self.model.pages[generation]
        assert page.stage is Stage.WRITING
        spec = self.specs[page.tier]
        assert spec.kind is kind
        assignment = next(
            a for (t, _), a in self.model.segments.items() if t == page.tier and a.segment == page.segment
        )
        assert assignment.domain == self.model.sessions[session]
        assert self.model.writers[page.segment] == (session if spec.writer_owned else 0)
        return generation

    @precondition(lambda self: any(r.idle for r in self.reservations.values()))
    @rule(which=picks, some=st.integers(0, (1 << DEPTH) - 1))
    def begin_commit(self, which: int, some: int) -> None:
        open_ones = [i for i, r in self.reservations.items() if r.idle]
        number = self.pick(open_ones, which)
        made = self.reservations[number]
        chosen = [i for i in made.idle if some >> i & 1] or made.idle
        blocks = None
        if made.private or made.busy or chosen != made.idle or some & 1:
            blocks = self.named(made, chosen)
        committing = self.core.begin_commit(made.session, reservation=number, blocks=blocks, now=self.tick())
        assert committing.indices.tolist() == chosen
        generations = committing.extents["generation"].tolist()
        for index, own, staging in zip(chosen, generations, committing.staging, strict=True):
            assert own in self.model.pages
            assert self.is_staged(made.pages[index]) == (staging["page"] >= 0)
            assert made.pages[index] == (int(staging["generation"]) if staging["page"] >= 0 else own)
            if staging["page"] >= 0:
                self.model.check_sealed(own)
        made.busy |= set(chosen)
        made.ahead_bytes = 0
        keys = [made.entries[i].key for i in chosen]
        assert [(int(m["namespace"]), m["hash"].tobytes()) for m in committing.metas] == keys
        self.commits.append(Commit(committing, keys, generations))

    def named(self, made: Reservation, chosen: list[int]) -> StructArray:
        blocks: StructArray = np.zeros(len(chosen), COMMIT_BLOCK)
        for row, index in zip(blocks, chosen, strict=True):
            entry = made.entries[index]
            row["hash"] = np.frombuffer(entry.key[1], np.uint8)
            row["parent"] = np.frombuffer(entry.parent, np.uint8)
            row["index"], row["position"] = index, entry.number
            row["tokens"], row["length"] = entry.chain.block_tokens(entry.number), entry.chain.lengths[entry.number]
        return blocks

    @precondition(lambda self: self.commits)
    @rule(which=picks, good=st.sampled_from([True, True, True, False]), lease=st.booleans(), keep_open=st.booleans())
    def finish_commit(self, which: int, good: bool, lease: bool, keep_open: bool) -> None:
        commit = self.commits.pop(which % len(self.commits))
        committing, total = commit.committing, len(commit.keys)
        ok = np.ones(total, bool)
        ok[which % total] = good
        digests = np.frombuffer(b"".join(h[:15] + bytes([which % 7]) for _, h in commit.keys), np.uint8)
        answer = self.core.finish_commit(
            committing,
            digests=digests.reshape(total, 16),
            ok=ok,
            lease=lease,
            keep_open=keep_open,
            now=self.tick(),
        )
        self.take_published(commit, answer.statuses.tolist(), digests, good=good)
        for status, extent, key in zip(answer.statuses.tolist(), answer.extents, commit.keys, strict=True):
            if status == FAILED:
                assert extent["page"] == -1
            else:
                self.model.check_holds(extent, key)
        self.close_commit(commit, answer.statuses.tolist(), keep_open=keep_open)
        if answer.lease:
            assert lease
            assert committing.session in self.model.sessions
            held = [int(g) for g in answer.extents["generation"]]
            self.leases[answer.lease] = Lease(committing.session, [], 0, settled=True, generations=held)
            self.model.pins.update(held)
        self.apply(answer.plan)
        made = self.reservations.get(committing.reservation)
        if made is not None and not keep_open:
            self.check_only_busy_left(self.reservations.pop(committing.reservation))

    @precondition(lambda self: self.commits)
    @rule(which=picks)
    def withdraw_commit(self, which: int) -> None:
        """Returns its pages to the reservation, if that is open, for new writes and commits."""
        commit = self.commits.pop(which % len(self.commits))
        plan = self.core.withdraw_commit(commit.committing, now=self.tick())
        self.close_commit(commit, [FAILED] * len(commit.keys), keep_open=True)
        self.apply(plan)

    def take_published(self, commit: Commit, statuses: list[int], digests: np.ndarray, *, good: bool) -> None:
        if not good:
            assert set(statuses) == {FAILED}
        elif not {key[0] for key in commit.keys} & self.model.forgotten:
            assert FAILED not in statuses
        rows = zip(statuses, commit.keys, commit.generations, digests.reshape(-1, 16), strict=True)
        for status, key, generation, digest in rows:
            if status == READY:
                assert key[0] not in self.model.forgotten
                assert self.model.nearest(key) < 0, "a name was committed twice"
                same = self.digests.get(key) == digest.tobytes()
                self.model.supersede(key, self.model.pages[generation].tier, same=same)
                self.model.publish(generation, key)
                self.digests[key] = digest.tobytes()

    def close_commit(self, commit: Commit, statuses: list[int], *, keep_open: bool) -> None:
        made = self.reservations.get(commit.committing.reservation)
        if made is None:
            return
        for index, status in zip(commit.committing.indices.tolist(), statuses, strict=True):
            made.busy.discard(index)
            if status != FAILED or not keep_open:
                del made.pages[index]

    def check_only_busy_left(self, made: Reservation) -> None:
        left = {
            i for i, g in made.pages.items() if g in self.model.pages and self.model.pages[g].stage is Stage.WRITING
        }
        assert left == made.busy & made.pages.keys(), "a reservation ended and left pages behind, or lost busy ones"

    @precondition(lambda self: self.reservations)
    @rule(which=picks)
    def abort(self, which: int) -> None:
        number = self.pick(list(self.reservations), which)
        made = self.reservations.pop(number)
        self.apply(self.core.abort(made.session, reservation=number, now=self.tick()))
        self.check_only_busy_left(made)
        assert self.core.abort(made.session, reservation=number, now=self.now).is_empty
