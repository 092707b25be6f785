"""InstantDriver: runs whole requests on a Core; all transfers succeed at once.

The simulator runs on it. A daemon that replays the same trace in lockstep must have the same hit
ratios. One request is an engine's work on one sequence: acquire held blocks, put the rest, release
all, at one `now`. Between two requests nothing is leased, reserved or in flight, and no tier wants
to demote. So the hits of a request depend on the requests before it and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import kinds
from tierd.core.core import Core
from tierd.core.formats.model import EXTENT, PUT_BLOCK, ROOT, BlockStatus, StructArray, TierKind
from tierd.core.plan import GroupQuery, Plan, PutQuery

DIGEST_BYTES = 16
_SESSION = 1


@dataclass(frozen=True, slots=True)
class Sequence:
    """The sequence of one request: a plain model of one group and one rank.

    hashes: uint8 [blocks, 32]; the last block is short if tokens is no multiple of
    tokens_per_block.
    block_bytes: length of a full block; a short one is in proportion to its tokens.
    """

    namespace: int
    hashes: NDArray[np.uint8]
    tokens: int
    tokens_per_block: int
    block_bytes: int

    def block_tokens(self, first: int) -> NDArray[np.uint32]:
        """Tokens of each block from number `first` on."""
        sizes = np.full(len(self.hashes), self.tokens_per_block, dtype=np.uint32)
        if len(sizes):
            sizes[-1] = self.tokens - (len(sizes) - 1) * self.tokens_per_block
        return sizes[first:]

    def group(self) -> GroupQuery:
        """The question for the whole sequence."""
        return GroupQuery(
            namespaces=(self.namespace,),
            hashes=self.hashes,
            tokens_per_block=self.tokens_per_block,
            tokens=self.tokens,
        )

    def put(self, first: int) -> PutQuery:
        """The blocks from number `first` on, to be written."""
        tokens = self.block_tokens(first)
        blocks = np.zeros(len(tokens), dtype=PUT_BLOCK)
        blocks["hash"] = self.hashes[first:]
        blocks["tokens"] = tokens
        blocks["length"] = np.maximum(1, self.block_bytes * tokens.astype(np.uint64) // self.tokens_per_block)
        parent = self.hashes[first - 1].tobytes() if first else ROOT
        return PutQuery(namespace=self.namespace, parent=parent, position=first, blocks=blocks)


class InstantDriver:
    """One session that makes requests. copied_bytes: written by transfers so far, per tier."""

    def __init__(self, core: Core, *, kind: TierKind = TierKind.HOST, tier_count: int) -> None:
        """Opens the session. kind: of tiers for gets and puts. tier_count: tiers of the core."""
        self.core = core
        self.copied_bytes = [0] * tier_count
        self._kind = kind
        core.open_session(_SESSION, domain=1)

    def request(self, sequence: Sequence, *, now: float) -> list[int]:
        """Serves one sequence, stores missing blocks. Returns tokens of its held prefix per
        tier."""
        acquisition = self.core.acquire(_SESSION, groups=[sequence.group()], kind=self._kind, now=now)
        self._run(acquisition.plan, now)
        leases, served = [], 0
        if acquisition.lease:
            leases.append(acquisition.lease)
            answer = self.core.settle(acquisition.lease, now=now)
            self._run(answer.plan, now)
            served = answer.tokens
        leases.append(self._store(sequence, first=-(-served // sequence.tokens_per_block), now=now))
        self._run(self.core.release(_SESSION, leases=[lease for lease in leases if lease], now=now), now)
        self.background(now)
        return acquisition.tier_tokens

    def background(self, now: float) -> None:
        """Demotes until no tier wants to."""
        while not (plan := self.core.demote(now)).is_empty:
            self._run(plan, now)

    def _store(self, sequence: Sequence, *, first: int, now: float) -> int:
        """Puts the blocks from number `first` on, as room allows. Returns their lease; 0: none."""
        if first >= len(sequence.hashes):
            return 0
        query = sequence.put(first)
        reserved = self.core.reserve(_SESSION, groups=[query], kind=self._kind, now=now)
        self._run(reserved.plan, now)
        if not reserved.reservation:
            return 0
        committing = self.core.begin_commit(_SESSION, reservation=reserved.reservation, blocks=None, now=now)
        count = len(committing.extents)
        committed = self.core.finish_commit(
            committing,
            digests=np.zeros((count, DIGEST_BYTES), dtype=np.uint8),
            ok=np.ones(count, dtype=np.bool_),
            lease=True,
            keep_open=False,
            now=now,
        )
        self._run(committed.plan, now)
        return committed.lease

    def _run(self, plan: Plan, now: float) -> None:
        """Lets every transfer of the plan, and all that follow from it, succeed in order."""
        while len(plan.transfers):
            self._count(plan.transfers["target"])
            statuses = np.full(len(plan.transfers), BlockStatus.READY, dtype=np.uint16)
            plan = self.core.finish(plan.transfers["id"], statuses=statuses, now=now)

    def _count(self, targets: StructArray) -> None:
        assert targets.dtype == EXTENT, "a transfer's target is an extent"
        for tier in kinds(targets["tier"]):
            self.copied_bytes[tier] += int(targets["length"][targets["tier"] == tier].sum())
