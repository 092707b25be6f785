"""A small core and a client of it, for the core's unit tests.

A test makes one line per call and sees every plan's transfers. The kit runs `check()` after every
call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tierd.core.core import Core
from tierd.core.formats.model import (
    COMMIT_BLOCK,
    PUT_BLOCK,
    ROOT,
    BlockStatus,
    Need,
    StructArray,
    TierKind,
    TierSpec,
    Wanted,
)
from tierd.core.forms import Forms, Plain
from tierd.core.plan import (
    Acquisition,
    Committed,
    GroupQuery,
    Ids,
    Plan,
    PutQuery,
    Reserved,
    ReservedAhead,
    Served,
    Start,
)
from tierd.policies.named import NamedPolicies

PAGE = 4096
TOKENS = 16
HOST, NVME, DEVICE = TierKind.HOST, TierKind.NVME, TierKind.DEVICE


def tier(kind: TierKind, pages: int, *, segment: int = 4, index: int = 0, **more: object) -> TierSpec:
    """A tier of `pages` 4 KiB pages in segments of `segment` pages, plus the slot overhead."""
    overhead = PAGE if kind is NVME else 0
    size = PAGE + overhead
    spec = TierSpec(
        kind,
        index,
        pages * size,
        segment * size,
        slot_overhead_bytes=overhead,
        writer_owned=kind is not NVME,
        high_watermark=1.0,
        low_watermark=1.0,
    )
    return replace(spec, **more)  # type: ignore[arg-type]


def chain(name: str, count: int) -> StructArray:
    """uint8 [count, 32]: the hashes of one sequence."""
    raw = b"".join(hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count))
    return np.frombuffer(raw, np.uint8).reshape(count, 32)


def group(
    hashes: StructArray, *, namespaces: tuple[int, ...] = (1,), tokens: int = 0, need: Need = Need.PREFIX, last: int = 0
):
    """The question for a whole chain."""
    return GroupQuery(namespaces, hashes, TOKENS, tokens or TOKENS * len(hashes), need, last)


class Kit:
    """A core with session 1 (domain 1) open. A call takes one second. flying: the unfinished transfers."""

    def __init__(
        self,
        *tiers: TierSpec,
        share: float = 1.0,
        start: Start = Start(),  # noqa: B008  # frozen
        forms: Forms = Plain(),  # noqa: B008  # it has no state
    ) -> None:
        self.core = Core(tiers, policies=NamedPolicies(), session_share=share, start=start, forms=forms)
        self.core.open_session(1, domain=1)
        self.now = 0.0
        self.flying: list[StructArray] = []

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def took(self, plan: Plan) -> Plan:
        """Keeps a plan's transfers and checks the core's books."""
        self.core.check()
        self.flying.extend(plan.transfers)
        return plan

    def forget(self, namespace: int = 1) -> Plan:
        """Ends the namespace's epoch and frees its blocks at once."""
        self.took(self.core.forget_namespaces([namespace], now=self.tick()).plan)
        (ids,) = self.core.pieces()
        return self.took(self.core.free_forgotten(ids, namespaces=[namespace], now=self.tick()))

    def reserve(
        self,
        hashes: StructArray,
        *,
        session: int = 1,
        namespace: int = 1,
        length: int = PAGE,
        kind: Wanted = HOST,
    ) -> Reserved:
        """Reserves a chain from its first block on."""
        blocks = np.zeros(len(hashes), PUT_BLOCK)
        blocks["hash"], blocks["tokens"], blocks["length"] = hashes, TOKENS, length
        query = PutQuery(namespace, ROOT, 0, blocks)
        answer = self.core.reserve(session, groups=[query], kind=kind, now=self.tick())
        self.took(answer.plan)
        return answer

    def reserve_ahead(self, puts: int, count: int, *, session: int = 1, length: int = PAGE) -> ReservedAhead:
        """Reserves private pages for `puts` puts of `count` blocks each."""
        blocks = np.zeros(count, PUT_BLOCK)
        blocks["tokens"], blocks["length"] = TOKENS, length
        query = PutQuery(1, ROOT, 0, blocks)
        answer = self.core.reserve_ahead(session, group=query, puts=puts, kind=HOST, now=self.tick())
        self.took(answer.plan)
        return answer

    def commit(
        self, reserved: Reserved, *, session: int = 1, good: bool = True, lease: bool = False, digest: int = 7
    ) -> Committed:
        """Commits a whole reservation under its reserved names."""
        begun = self.core.begin_commit(session, reservation=reserved.reservation, blocks=None, now=self.tick())
        self.core.check()
        return self.finish_commit(begun, good=good, lease=lease, digest=digest)

    def finish_commit(
        self, begun, *, good: bool = True, lease: bool = False, keep_open: bool = False, digest: int = 7
    ) -> Committed:
        count = len(begun.indices)
        answer = self.core.finish_commit(
            begun,
            digests=np.full((count, 16), digest, np.uint8),
            ok=np.full(count, good),
            lease=lease,
            keep_open=keep_open,
            now=self.tick(),
        )
        self.took(answer.plan)
        return answer

    def put(self, hashes: StructArray, **where: object) -> Committed | None:
        """Reserves and commits the missing blocks of a chain."""
        reserved = self.reserve(hashes, **where)  # type: ignore[arg-type]
        session = int(where.get("session", 1))  # type: ignore[call-overload]
        return self.commit(reserved, session=session) if reserved.reservation else None

    def acquire(self, *groups: GroupQuery, session: int = 1, kind: Wanted = HOST) -> Acquisition:
        answer = self.core.acquire(session, groups=groups, kind=kind, now=self.tick())
        self.took(answer.plan)
        return answer

    def settle(self, acquired: Acquisition) -> Served:
        answer = self.core.settle(acquired.lease, now=self.tick())
        self.took(answer.plan)
        return answer

    def get(self, *groups: GroupQuery, kind: Wanted = HOST) -> Served:
        """Acquires, lets every transfer succeed and settles."""
        acquired = self.acquire(*groups, kind=kind)
        self.land()
        return self.settle(acquired)

    def release(self, *leases: int, session: int = 1) -> Plan:
        return self.took(self.core.release(session, leases=leases, now=self.tick()))

    def land(self, status: int = BlockStatus.READY, *, only: Sequence[int] | None = None) -> Plan:
        """Ends all transfers in flight, or those at the positions `only` in `flying`."""
        chosen = list(range(len(self.flying))) if only is None else list(only)
        ids = np.asarray([self.flying[i]["id"] for i in chosen], np.uint64)
        self.flying = [flight for i, flight in enumerate(self.flying) if i not in chosen]
        plan = self.core.finish(ids, statuses=np.full(len(ids), status, np.uint16), now=self.tick())
        return self.took(plan)

    def demote(self, limit: int = 64) -> Plan:
        return self.took(self.core.demote(self.tick(), limit=limit))

    def ids(self, hashes: StructArray, namespace: int = 1) -> Ids:
        found = [self.core.find_block(namespace, h.tobytes()) for h in hashes]
        return np.asarray([-1 if b is None else b for b in found], np.int64)

    def tiers_of(self, hashes: StructArray, namespace: int = 1) -> list[int]:
        """Nearest tier per block, -1 for a miss."""
        found = self.core.lookup([group(hashes, namespaces=(namespace,))], self.now).tier_of[0][0]
        return [int(t) for t in found]


def commit_blocks(hashes: StructArray, indices: Sequence[int], *, length: int = PAGE) -> StructArray:
    """COMMIT_BLOCK for a chain's blocks."""
    blocks = np.zeros(len(indices), COMMIT_BLOCK)
    for row, (number, index) in zip(blocks, enumerate(indices), strict=True):
        row["hash"], row["index"], row["position"] = hashes[number], index, number
        row["parent"] = hashes[number - 1] if number else np.zeros(32, np.uint8)
        row["tokens"], row["length"] = TOKENS, length
    return blocks
