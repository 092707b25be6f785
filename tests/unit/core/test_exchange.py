"""The short ways of a put in a full tier, against the long ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.depth import count
from tests.unit.core.kit import HOST, NVME, PAGE, TOKENS, Kit, chain, commit_blocks, group, tier
from tierd.core import room
from tierd.core.exchange import is_exchangeable
from tierd.core.model import PUT_BLOCK
from tierd.core.plan import Plan, PutQuery
from tierd.core.puts import Puts
from tierd.core.wish import wish_ahead, wish_of

STEPS = 150
WORLDS: dict[str, dict[str, object]] = {
    "plain": {},
    "sealed": {"sealed_puts": True},
    "arc": {"eviction": "arc"},
    "s3-fifo": {"eviction": "s3-fifo"},
    "2q": {"eviction": "2q"},
}
"""The last ones remember in which order blocks left."""


class Life:
    """A seeded load of two sessions, and all that the core answered."""

    def __init__(self, seed: int, **more: object) -> None:
        self.kit = Kit(tier(HOST, 16, high_watermark=0.7, low_watermark=0.5, **more), tier(NVME, 20), share=0.8)
        self.kit.core.open_session(2, domain=1)
        self.random, self.answers = random.Random(seed), list[object]()
        self.ahead: list[tuple[int, int, int]] = []
        self.leases: list[tuple[int, int]] = []
        self.names = [chain(f"{seed}/{i}", 6) for i in range(9)]

    def run(self) -> list[object]:
        for _ in range(STEPS):
            step = self.random.choice(
                (self.put, self.put, self.put, self.put_ahead, self.end_ahead, self.hold, self.let_go, self.demote)
            )
            step()
        self.answers += [self.kit.tiers_of(name) for name in self.names]
        return self.answers

    def took(self, plan: Plan) -> None:
        freed = np.sort(plan.freed, order=["reason"])
        self.answers.append(
            sorted((r["extent"].tolist(), int(r["reason"]), bool(r["was_ready"]), r["hash"].tobytes()) for r in freed)
        )
        self.answers.append(plan.reserved.tolist())

    def put(self) -> None:
        name, session = self.random.choice(self.names)[: self.random.randint(1, 6)], self.random.choice((1, 1, 1, 2))
        length = self.random.choice((PAGE, PAGE, PAGE, PAGE // 2, 2 * PAGE))
        reserved = self.kit.reserve(name, session=session, length=length)
        self.took(reserved.plan)
        self.answers += [reserved.extents[0].tolist(), reserved.statuses[0].tolist()]
        if reserved.reservation:
            self.took(self.kit.commit(reserved, session=session, good=self.random.random() < 0.9).plan)

    def put_ahead(self) -> None:
        count, session = self.random.randint(1, 3), self.random.choice((1, 2))
        given = self.kit.reserve_ahead(self.random.randint(1, 2), count, session=session)
        self.took(given.plan)
        self.answers.append(given.extents.tolist())
        self.ahead += [(session, number, count) for number in given.reservations]

    def end_ahead(self) -> None:
        if not self.ahead:
            return
        session, number, count = self.ahead.pop(self.random.randrange(len(self.ahead)))
        if self.random.random() < 0.3:
            self.took(self.kit.took(self.kit.core.abort(session, reservation=number, now=self.kit.tick())))
            return
        blocks = commit_blocks(self.random.choice(self.names), range(count))
        begun = self.kit.core.begin_commit(session, reservation=number, blocks=blocks, now=self.kit.tick())
        done = self.kit.finish_commit(begun)
        self.took(done.plan)
        self.answers += [done.statuses.tolist(), done.extents.tolist()]

    def hold(self) -> None:
        got = self.kit.acquire(group(self.random.choice(self.names)))
        self.kit.land()
        if got.lease:
            self.answers.append(self.kit.settle(got).tokens)
            self.leases.append((1, got.lease))

    def let_go(self) -> None:
        if self.leases:
            session, lease = self.leases.pop(0)
            self.kit.release(lease, session=session)

    def demote(self) -> None:
        self.kit.demote()
        self.kit.land()


@pytest.mark.parametrize("more", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("seed", range(count(test=2, nightly=6, weekly=24)))
def test_the_short_ways_give_what_the_long_ones_give(
    seed: int, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a put is given, and what leaves for it, is the same whether pages are given back first and rows looked at one by one, or not."""
    taken = {"exchange": 0, "alike": 0}
    alike = Puts._give_alike

    def exchangeable(*args: object) -> bool:
        taken["exchange"] += (answer := is_exchangeable(*args))  # type: ignore[arg-type]
        return answer

    def give_alike(*args: object, **kwargs: object) -> bool:
        taken["alike"] += (answer := alike(*args, **kwargs))  # type: ignore[arg-type]
        return answer

    monkeypatch.setattr(room, "is_exchangeable", exchangeable)
    monkeypatch.setattr(Puts, "_give_alike", give_alike)
    short = Life(seed, **more).run()
    assert taken["exchange"] > 3 and taken["alike"] > 10
    monkeypatch.setattr(room, "is_exchangeable", lambda *_: False)
    monkeypatch.setattr(Puts, "_give_alike", lambda *_, **__: False)
    assert Life(seed, **more).run() == short


def test_pages_ahead_are_as_many_wishes_of_one() -> None:
    """A wish for several puts that may come is that of the same query as often."""
    blocks = np.zeros(3, PUT_BLOCK)
    blocks["tokens"], blocks["length"] = [16, 16, 5], [PAGE, PAGE, 100]
    said = np.asarray([1, 2, 3], np.uint8), np.asarray([0, 7, 9], np.uint32)
    query = PutQuery(4, bytes(range(32)), 2, blocks, *said)
    one = wish_ahead(query, puts=3, session=5, domain=6, time_s=1e9)
    other = wish_of([query] * 3, session=5, domain=6, time_s=1e9)
    for name in one.__slots__:
        assert np.array_equal(np.asarray(getattr(one, name)), np.asarray(getattr(other, name))), name


def test_a_segment_that_a_client_could_write_to_ends_when_it_empties() -> None:
    """Of a writer that has gone: what the daemon loads goes to a new life of the place, though its key is that of the segment that emptied for it."""
    kit, a, b = Kit(tier(HOST, 4), tier(NVME, 8)), chain("a", 4), chain("b", 4)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(a), tier=0, now=kit.tick()))
    kit.core.open_session(2, domain=1)
    kit.put(b, session=2)
    kit.took(kit.core.end_session(2, kit.tick()))
    got = kit.acquire(group(a))
    assert got.tokens == 4 * TOKENS
    assert [segment.replaces is not None for segment in got.plan.segments] == [True]


def test_a_head_waits_for_a_child_that_stays() -> None:
    """A block with two children of which one may go does not go right after it."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 3)
    kit.put(a[:2])
    kit.put(a[[0, 2]])
    head, one, other = kit.ids(a).tolist()
    tails_first = kit.core._planner.room.coldest.tails_first
    assert tails_first(0, np.asarray([one, head])).tolist() == [one]
    assert tails_first(0, np.asarray([one, other, head])).tolist() == [one, other, head]
