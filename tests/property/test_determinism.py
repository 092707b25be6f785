"""The same calls give the same answers, in whatever order transfers end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from core_clients import new_core
from core_world import WORLDS, Chain, World, chain
from hypothesis import example, given
from hypothesis import strategies as st

from tierd.core.core import Core
from tierd.core.formats.model import BlockStatus, TierKind
from tierd.core.plan import Plan

VERBS = ["put", "put", "put", "acquire", "prefetch", "demote", "persist", "land"]
programs = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(1, 2), st.integers(0, 3)), min_size=5, max_size=60)


@dataclass
class Daemon:
    """A core whose transfers all end on demand, in the order that `chooser` gives."""

    world: World
    chooser: random.Random | None
    told: list[bytes] = field(default_factory=list)
    flights: dict[int, int] = field(default_factory=dict)  # id -> the flight that it follows
    leases: list[int] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.core: Core = new_core(self.world.tiers)
        self.core.open_session(1, domain=1)

    def hear(self, plan: Plan) -> None:
        """Records the whole plan."""
        self.told += [plan.freed.tobytes(), plan.reserved.tobytes(), plan.transfers.tobytes(), plan.waits.tobytes()]
        self.told.append(repr(plan.segments).encode())
        self.flights |= dict(zip(plan.transfers["id"].tolist(), plan.transfers["after"].tolist(), strict=True))

    def do(self, verb: str, asked: Chain) -> None:
        self.now += 1.0
        if verb == "land":
            self.land()
        elif verb == "demote":
            self.hear(self.core.demote(self.now, limit=8))
        elif verb == "persist":
            self.hear(self.core.persist(self.core.blocks()[::3], now=self.now))
        elif verb == "prefetch":
            self.hear(self.core.prefetch(1, groups=[asked.group()], kind=TierKind.HOST, now=self.now))
        elif verb == "acquire":
            answer = self.core.acquire(1, groups=[asked.group()], kind=TierKind.HOST, now=self.now)
            self.told.append(repr((answer.lease, answer.tokens, answer.tier_tokens)).encode())
            self.leases.append(answer.lease)
            self.hear(answer.plan)
        else:
            self.put(asked)

    def put(self, asked: Chain) -> None:
        query = asked.put(0, len(asked.hashes), private=False)
        answer = self.core.reserve(1, groups=[query], kind=TierKind.HOST, now=self.now)
        self.told += [answer.statuses[0].tobytes(), answer.extents[0].tobytes()]
        self.hear(answer.plan)
        if not answer.reservation:
            return
        begun = self.core.begin_commit(1, reservation=answer.reservation, blocks=None, now=self.now)
        count = len(begun.extents)
        done = self.core.finish_commit(
            begun,
            digests=np.zeros((count, 16), np.uint8),
            ok=np.ones(count, bool),
            lease=False,
            keep_open=False,
            now=self.now,
        )
        self.told += [done.statuses.tobytes(), done.extents.tobytes(), done.blocks.tobytes()]
        self.hear(done.plan)

    def land(self) -> None:
        """Ends all transfers well, in order of ids or one by one at random; then releases
        leases."""
        if self.chooser is None:
            self.finish(sorted(self.flights))
        while self.flights:
            ready = [i for i, after in self.flights.items() if after not in self.flights]
            self.finish([self.chooser.choice(ready)] if self.chooser else ready)
        for lease in self.leases:
            if lease:
                self.told.append(repr(self.core.settle(lease, now=self.now).tokens).encode())
        self.core.release(1, leases=self.leases, now=self.now)
        self.leases = []
        self.told.append(repr(self.core.tier_stats()).encode())

    def finish(self, ids: list[int]) -> None:
        """Ends transfers. The plan of `finish` follows the order of ends, so it is not recorded."""
        for flight in ids:
            del self.flights[flight]
        statuses = np.full(len(ids), BlockStatus.READY, np.uint16)
        self.core.finish(np.array(ids, np.uint64), statuses=statuses, now=self.now)


@pytest.mark.parametrize("world", sorted(WORLDS))
@given(program=programs, seed=st.integers(0, 1 << 16))
@example(program=[("put", 1, 0), ("put", 1, 0), ("put", 1, 3), ("put", 2, 0), ("demote", 1, 0)], seed=0)
def test_the_order_of_ends_changes_no_later_decision(world, program, seed):
    """Two cores with the same calls, one with transfers that end at random, give the same
    answers."""
    pair = [Daemon(WORLDS[world], None), Daemon(WORLDS[world], random.Random(seed))]
    for verb, namespace, number in [*program, ("land", 1, 0), ("put", 1, 0), ("put", 2, 3), ("demote", 1, 0)]:
        for daemon in pair:
            daemon.do(verb, chain(daemon.world, namespace, number))
        assert pair[0].told == pair[1].told
