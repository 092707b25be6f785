"""Chains of up to 65,536 blocks: every invariant holds, and a step costs no more than its
blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.depth import count
from tests.unit.core.kit import HOST, NVME, PAGE, TOKENS, group, tier
from tierd.core.core import Core
from tierd.core.formats.model import PUT_BLOCK, ROOT, BlockStatus, StructArray
from tierd.core.index.blocks import ABOVE_LIMIT
from tierd.core.plan import Ids, Plan, PutQuery
from tierd.core.space.coldest import MOST_REACH
from tierd.core.space.room import FAR_REACH
from tierd.policies.eviction import EVICTION
from tierd.policies.named import NamedPolicies

LENGTHS = (1, 64, 1024, 8192, 65_536)
PIECE = 4096
"""Blocks of a call."""
FLYING = 1024
TURNS = count(test=8, nightly=150, weekly=600)


class Long:
    """A core over host memory and perhaps NVMe, smaller than its chains; transfers end late."""

    def __init__(self, policy: str, *, far: bool, seed: int) -> None:
        marks = {"high_watermark": 0.8, "low_watermark": 0.7}
        tiers = [tier(HOST, 12_288, segment=1024, eviction=policy, **marks)]
        tiers += [tier(NVME, 24_576, segment=1024, eviction=policy)] if far else []
        self.core = Core(tiers, policies=NamedPolicies(), session_share=1.0)
        self.core.open_session(1, domain=1)
        self.dice, self.now = np.random.default_rng(seed), 0.0
        self.flying: deque[int] = deque()
        self.chains: list[StructArray] = []
        self.leases: list[int] = []
        self.asked = 0
        for policy_of in self.core._index.policies:
            policy_of.victims = self._counting(policy_of.victims)  # type: ignore[method-assign]

    def _counting(self, victims):
        def counted(count: int, pinned: Ids) -> Ids | None:
            self.asked += count
            return victims(count, pinned)

        return counted

    @contextmanager
    def step(self, blocks: int) -> Iterator[None]:
        """One step of the daemon's loop; checks the number of victims that it asks for."""
        self.asked = 0
        yield
        assert self.asked <= 16 * blocks + 2 * FAR_REACH + 8 * MOST_REACH

    def took(self, plan: Plan) -> None:
        self.flying.extend(plan.transfers["id"].tolist())

    def turn(self) -> None:
        """Carries out a random action of a client, an operator or a disk."""
        self.now += 1.0
        verbs = (self.put, self.put, self.grow, self.get, self.get, self.release, self.pin, self.land, self.evict)
        verbs[self.dice.integers(len(verbs))]()
        with self.step(512):
            self.took(self.core.demote(self.now))
        while len(self.flying) > FLYING:
            self.land()

    def put(self) -> None:
        """Puts a new sequence, or one that branches off another."""
        new = self.dice.bytes(32 * int(self.dice.choice(LENGTHS)))
        hashes = np.frombuffer(new, np.uint8).reshape(-1, 32)
        shared = self.chains[self.dice.integers(len(self.chains))] if self.chains and self.dice.random() < 0.3 else ()
        if len(shared):
            hashes = np.concatenate((shared[: self.dice.integers(1, len(shared) + 1)], hashes))
        self.chains.append(hashes)
        self._write(hashes, 0)

    def grow(self) -> None:
        """Adds a block to a sequence, as token generation does."""
        if self.chains:
            at = int(self.dice.integers(len(self.chains)))
            longer = np.concatenate((self.chains[at], np.frombuffer(self.dice.bytes(32), np.uint8)[None]))
            self.chains[at] = longer
            self._write(longer, len(longer) - 1)

    def _write(self, hashes: StructArray, first: int) -> None:
        for start in range(first, len(hashes), PIECE):
            part = hashes[start : start + PIECE]
            blocks = np.zeros(len(part), PUT_BLOCK)
            blocks["hash"], blocks["tokens"], blocks["length"] = part, TOKENS, PAGE
            query = PutQuery(1, hashes[start - 1].tobytes() if start else ROOT, start, blocks)
            with self.step(len(part)):
                reserved = self.core.reserve(1, groups=[query], kind=HOST, now=self.now)
            self.took(reserved.plan)
            if reserved.reservation:
                begun = self.core.begin_commit(1, reservation=reserved.reservation, blocks=None, now=self.now)
                count = len(begun.indices)
                with self.step(count + ABOVE_LIMIT):
                    done = self.core.finish_commit(
                        begun,
                        digests=np.zeros((count, 16), np.uint8),
                        ok=np.ones(count, bool),
                        lease=False,
                        keep_open=False,
                        now=self.now,
                    )
                self.took(done.plan)
            with self.step(512):
                self.took(self.core.demote(self.now))

    def get(self) -> None:
        """Acquires the beginning of a sequence and holds it for a while."""
        if self.chains:
            hashes = self.chains[self.dice.integers(len(self.chains))]
            hashes = hashes[: min(PIECE, self.dice.integers(1, len(hashes) + 1))]
            with self.step(len(hashes)):
                got = self.core.acquire(1, groups=[group(hashes)], kind=HOST, now=self.now)
            self.took(got.plan)
            if got.lease:
                self.land(len(self.flying))
                self.took(self.core.settle(got.lease, now=self.now).plan)
                self.leases.append(got.lease)

    def release(self) -> None:
        leases, self.leases = self.leases[:2], self.leases[2:]
        if leases:
            self.took(self.core.release(1, leases=leases, now=self.now))

    def pin(self) -> None:
        """Pins or unpins the last block of a sequence; a pin keeps all of the sequence."""
        for hashes in self.chains[-2:]:
            if (found := self.core.find_block(1, hashes[-1].tobytes())) is not None:
                verb = self.core.pin_blocks if self.dice.random() < 0.5 else self.core.unpin_blocks
                verb(np.array([found]))

    def land(self, most: int = 512) -> None:
        """Ends transfers, the oldest first; one in fifty fails."""
        ids = np.array([self.flying.popleft() for _ in range(min(most, len(self.flying)))], np.uint64)
        if len(ids):
            fails = self.dice.random(len(ids)) < 0.02
            statuses = np.where(fails, BlockStatus.FAILED, BlockStatus.READY).astype(np.uint16)
            with self.step(len(ids)):
                self.took(self.core.finish(ids, statuses=statuses, now=self.now))

    def evict(self) -> None:
        """An operator evicts some blocks of a sequence."""
        if self.chains:
            hashes = self.chains[self.dice.integers(len(self.chains))]
            few = [self.core.find_block(1, hashes[at].tobytes()) for at in self.dice.integers(0, len(hashes), 4)]
            self.core.evict(np.array([b for b in few if b is not None], np.int64), tier=None, now=self.now)


@pytest.mark.parametrize("far", [True, False], ids=["two tiers", "host alone"])
@pytest.mark.parametrize("policy", sorted(EVICTION))
def test_the_books_are_right_and_no_step_is_long(policy: str, far: bool) -> None:
    """In any order of actions the audit passes, and a step's victims follow from its call alone."""
    long = Long(policy, far=far, seed=len(policy) + far)
    for turn in range(TURNS):
        long.turn()
        if turn % 5 == 4:
            long.core.check()
    long.land(len(long.flying))
    long.core.check()
