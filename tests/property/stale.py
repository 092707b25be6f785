"""A core under churn, and every handle and number that it gave, to be refused after their end.

Purpose: `Churn.turn` makes a request and keeps its handles and numbers. `accepted` presents ended
ones in every way that the core offers. It returns the ways that accepted one. Plans alone tell that
a handle has ended: its page was in `freed`.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from tierd.core.core import Core
from tierd.core.formats.model import EXTENT, PUT_BLOCK, ROOT, BlockStatus, StructArray, TierKind, TierSpec
from tierd.core.plan import Committing, GroupQuery, Plan, PutQuery, Start
from tierd.errors import InvalidArgument, NotFound
from tierd.policies.named import NamedPolicies

PAGE = 4096
TOKENS = 16
LENGTHS = (PAGE, 2 * PAGE, 3 * PAGE)
SESSIONS = (1, 2)
TIERS = (
    TierSpec(TierKind.HOST, 0, 2048 * PAGE, 128 * PAGE, writer_owned=True, high_watermark=0.9, low_watermark=0.8),
    TierSpec(TierKind.NVME, 0, 1024 * 2 * PAGE, 128 * 2 * PAGE, slot_overhead_bytes=PAGE),
)
KEPT = 512
"""Number of older handles presented again each time, beside all that ended since."""
SLOTS = 128
"""Pages of a segment at most."""


def chain(number: int, count: int) -> np.ndarray:
    """uint8 [count, 32]."""
    first = hashlib.sha256(str(number).encode()).digest()
    hashes = np.tile(np.frombuffer(first, np.uint8), (count, 1))
    hashes[:, :4] = np.arange(count, dtype="<u4").view(np.uint8).reshape(count, 4)
    return hashes


class Churn:
    """See the module. reuses: given pages that were given before. words: as in the catalogues."""

    def __init__(self, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._now, self.turns = 0.0, 0
        self.reuses = 0
        self.presented: Counter[str] = Counter()
        self.words: dict[tuple[int, int], NDArray[np.uint64]] = {}
        self._given = [np.zeros(1 << 14, bool) for _ in TIERS]
        self._ended: list[StructArray] = []
        self._older = np.zeros(0, EXTENT)
        self._leases: deque[tuple[int, int]] = deque(maxlen=16)
        self._reservations: deque[tuple[int, int]] = deque(maxlen=16)
        self._commits: deque[Committing] = deque(maxlen=8)
        self._transfers: deque[int] = deque(maxlen=16)
        self._forgotten: deque[int] = deque(maxlen=8)
        self._namespace = 1
        self._highest = Start()
        self.core = self._begin()

    # -- life

    def _begin(self) -> Core:
        core = Core(TIERS, policies=NamedPolicies(), session_share=1.0, start=self._highest)
        for session in SESSIONS:
            core.open_session(session, domain=session)
        return core

    def turn(self) -> None:
        """Either session gets and puts one sequence; now and then a namespace is forgotten."""
        self.turns += 1
        session = SESSIONS[self.turns % 7 == 0]
        name = chain(self.turns - 3 * int(self._chance.random() < 0.25), int(self._chance.integers(128, 384)))
        length = LENGTHS[int(self._chance.integers(0, 3)) if self.turns % 5 == 0 else 0]
        self._get(session, name)
        self._put(session, name, length, is_kept=self.turns % 11 == 0)
        while not (plan := self.core.demote(self._tick())).is_empty:
            self._run(plan)
        if self.turns % 40 == 0:
            self._forgotten.append(self._namespace)
            self._run(self.core.forget_namespaces([self._namespace], now=self._tick()).plan)
            for ids in self.core.pieces():
                self._run(self.core.free_forgotten(ids, namespaces=[self._namespace], now=self._tick()))
            self._namespace += 1

    def restart(self) -> None:
        """A new core adopts the ready blocks of both tiers; its numbers are above the former
        core's."""
        old = self.core
        segments = [old.segments(tier) for tier in range(len(TIERS))]
        held = [old.blocks(tier=tier) for tier in range(len(TIERS))]
        extents = [old.extents(blocks, tier=tier) for tier, blocks in enumerate(held)]
        metas = [old.metas(blocks) for blocks in held]
        generations = [int(e["generation"].max(initial=0)) for e in extents]
        top = max([*generations, *(int(words.max()) for words in self.words.values())])
        highest = max([a.segment for part in segments for a in part] + [self._highest.segment])
        self._highest = Start(top + 1000, highest + 100, id=self._highest.id + (1 << 40))
        self.core = self._begin()
        for tier in range(len(TIERS)):
            taken = self.core.adopt(
                tier, segments=segments[tier], extents=extents[tier], metas=metas[tier], now=self._tick()
            )
            assert taken.all()
        for tier in range(len(TIERS)):
            self.core.close_empty(tier)

    # -- presenting again

    def accepted(self) -> list[str]:
        """Every way in which the core accepted a handle or number that has ended."""
        over = np.concatenate([self._older, *self._ended])
        self._ended.clear()
        self._older = self._chance.choice(over, min(len(over), KEPT), replace=False)
        wrong = [f"word: {len(rows)}" for rows in self._by_segment(over) if self._has_words(rows).any()]
        self.presented["handles"] += len(over)
        wrong += self._verdicts(over)
        for way, came in self._calls():
            self.presented[way] += 1
            wrong += [f"{way}: {came}"] if came else []
        return wrong

    def _verdicts(self, over: StructArray) -> list[str]:
        """Checks that a verdict about freed pages changes nothing."""
        before = [self.core.blocks(tier=tier).tolist() for tier in range(len(TIERS))]
        flags = self._unverified()
        self.core.verified(over)
        wrong = ["verified"] if self._unverified() != flags else []
        if not self.core.condemn(over, now=self._tick()).is_empty:
            wrong.append("condemned")
        after = [self.core.blocks(tier=tier).tolist() for tier in range(len(TIERS))]
        return wrong + (["blocks have gone"] if after != before else [])

    def _calls(self) -> Iterator[tuple[str, str]]:
        """Each way, and its effect if the core did not refuse."""
        core, now = self.core, self._tick()
        for session, lease in self._leases:
            for who in SESSIONS:
                yield "release", _changes(core.release(who, leases=[lease], now=now))
            yield "settle", str(core.settle(lease, now=now).tokens or "")
            mass = np.ones(1, np.float32)
            yield "attention", _refused(core.report_attention, session, lease=lease, group=0, mass=mass, now=0.0)
        for session, number in self._reservations:
            yield "abort", _changes(core.abort(session, reservation=number, now=now))
            yield "commit", _refused(core.begin_commit, session, reservation=number, blocks=None, now=now)
        for commit in self._commits:
            yield "publish", _refused(self._publish, commit)
        for transfer in self._transfers:
            ids, ready = np.asarray([transfer], np.uint64), np.asarray([BlockStatus.READY], np.uint16)
            yield "finish", _refused(core.finish, ids, statuses=ready, now=now)
        for namespace in self._forgotten:
            yield "namespace", str(len(core.blocks(namespace=namespace)) or "")

    # -- inside

    def _get(self, session: int, name: np.ndarray) -> None:
        query = GroupQuery((self._namespace,), name, TOKENS, TOKENS * len(name))
        got = self.core.acquire(session, groups=[query], kind=TierKind.HOST, now=self._tick())
        self._run(got.plan)
        if got.lease:
            self._run(self.core.settle(got.lease, now=self._tick()).plan)
            self._run(self.core.release(session, leases=[got.lease], now=self._tick()))
            self._leases.append((session, got.lease))

    def _put(self, session: int, name: np.ndarray, length: int, *, is_kept: bool) -> None:
        blocks = np.zeros(len(name), PUT_BLOCK)
        blocks["hash"], blocks["tokens"], blocks["length"] = name, TOKENS, length
        query = PutQuery(self._namespace, ROOT, 0, blocks)
        reserved = self.core.reserve(session, groups=[query], kind=TierKind.HOST, now=self._tick())
        self._run(reserved.plan)
        if not reserved.reservation:
            return
        self._reservations.append((session, reserved.reservation))
        if is_kept:  # aborted unwritten
            self._run(self.core.abort(session, reservation=reserved.reservation, now=self._tick()))
            return
        commit = self.core.begin_commit(session, reservation=reserved.reservation, blocks=None, now=self._tick())
        self._publish(commit)
        self._commits.append(commit)

    def _publish(self, commit: Committing) -> None:
        count = len(commit.extents)
        digests = np.ascontiguousarray(commit.metas["hash"][:, :16])
        done = self.core.finish_commit(
            commit, digests=digests, ok=np.ones(count, bool), lease=True, keep_open=False, now=self._tick()
        )
        self._run(done.plan)
        if done.lease:
            self._leases.append((commit.session, done.lease))
            self._run(self.core.release(commit.session, leases=[done.lease], now=self._tick()))

    def _run(self, plan: Plan) -> None:
        while True:
            self._apply(plan)
            if not len(plan.transfers):
                return
            self._transfers.extend(plan.transfers["id"][-2:].tolist())
            statuses = np.full(len(plan.transfers), BlockStatus.READY, np.uint16)
            plan = self.core.finish(plan.transfers["id"], statuses=statuses, now=self._tick())

    def _apply(self, plan: Plan) -> None:
        """Applies a plan as tiers do: retract, begin, stamp."""
        for rows in self._by_segment(plan.freed["extent"]):
            self.words[_segment(rows)][rows["slot"]] = 0
        self._ended.append(plan.freed["extent"])
        for begun in plan.segments:
            if begun.replaces is not None:
                self.words.pop((begun.tier, begun.replaces), None)
            self.words[begun.tier, begun.segment] = np.zeros(SLOTS, np.uint64)
        for rows in self._by_segment(plan.reserved):
            self.words[_segment(rows)][rows["slot"]] = rows["generation"]
        for tier, given in enumerate(self._given):
            pages = plan.reserved["page"][plan.reserved["tier"] == tier]
            self.reuses += int(given[pages].sum())
            given[pages] = True

    def _has_words(self, rows: StructArray) -> NDArray[np.bool_]:
        """The SDK's check after a copy."""
        words = self.words.get(_segment(rows))
        return np.zeros(len(rows), bool) if words is None else words[rows["slot"]] == rows["generation"]

    @staticmethod
    def _by_segment(rows: StructArray) -> list[StructArray]:
        keys = rows["tier"].astype(np.int64) << 32 | rows["segment"]
        return [rows[keys == key] for key in np.unique(keys)]

    def _unverified(self) -> int:
        blocks = self.core.blocks(tier=0)
        return int(self.core.extents(blocks, tier=0)["flags"].sum())

    def _tick(self) -> float:
        self._now += 1.0
        return self._now


def _segment(rows: StructArray) -> tuple[int, int]:
    return int(rows["tier"][0]), int(rows["segment"][0])


def _changes(plan: Plan) -> str:
    return "" if plan.is_empty else f"freed {len(plan.freed)}, moved {len(plan.transfers)}"


def _refused(call: Callable[..., object], *given: object, **named: object) -> str:
    try:
        call(*given, **named)
    except (NotFound, InvalidArgument):
        return ""
    return "taken"
