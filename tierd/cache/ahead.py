"""Hashes made ahead: of pages whose writer says that they are written, while it writes the next ones.

    written ──▶ hashed by one thread, which follows the writer ──▶ the commit takes what fits, and hashes the rest

Purpose: a commit that finds most of its work done. Non-purpose: what a commit is (cache.py), other hashing (mover.py). Invariants: sums are taken for
the very life of a page, length and layers that they were made of; each page of a reservation is hashed ahead once at most, and no more than
FOLLOWED_LIMIT reservations at one time, SESSION_LIMIT of one session, so that nobody keeps the threads busy by talking. Who writes to a page after he has said that he is done has
committed other bytes than those under the checksum: a miss at the first hit, as after a write that follows the commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierd.core.block import slice_lengths
from tierd.core.core import Core
from tierd.core.model import StructArray
from tierd.core.plan import Committing
from tierd.errors import TierFailed
from tierd.mover import Hashed, Mover
from tierd.tiers.checksum import slice_sums, table_digest
from tierd.tiers.tier import MappedTier, SliceTable, Tier, is_mapped

FOLLOWED_LIMIT = 64
"""Reservations that are being hashed; beyond it commits do the work."""
SESSION_LIMIT = FOLLOWED_LIMIT // 4
"""Of them, of one session."""
Life = tuple[int, int, int, int]
"""Of a page: segment, generation, length of its block, layers."""


@dataclass
class Job:
    """One reservation. pages: index, life and bytes of those that nobody has spoken of, last first; left: what is still to be hashed; made: sums and digest of what is."""

    pages: list[tuple[int, Life, memoryview]]
    left: deque[tuple[Life, memoryview]] = field(default_factory=deque)
    made: dict[Life, tuple[SliceTable, bytes]] = field(default_factory=dict)
    thread: asyncio.Future[None] | None = None

    def told(self, end: int) -> None:
        """The pages before this index are written."""
        while self.pages and self.pages[-1][0] < end:
            self.left.append(self.pages.pop()[1:])

    def follow(self) -> None:
        """Runs in a thread until nothing is left."""
        while self.left:
            life, view = self.left.popleft()
            sums = slice_sums(view, slice_lengths(len(view), life[3]))
            self.made[life] = sums, table_digest(sums)


class Ahead:
    """Jobs by session and reservation. layers_of: namespace ids to layers per block."""

    def __init__(
        self, core: Core, tiers: Sequence[Tier], *, mover: Mover, layers_of: Callable[[StructArray], StructArray]
    ) -> None:
        self._core, self._tiers, self._mover, self._layers_of = core, tiers, mover, layers_of
        self._jobs: dict[tuple[int, int], Job] = {}

    def note(self, session: int, reservation: int, *, end: int) -> None:
        """The blocks of a reservation before this index are written. What cannot be hashed now is left to the commit. Raises NotFound."""
        job = self._jobs.get((session, reservation))
        if job is None:
            pages = [] if self._is_full(session) else self._pages(session, reservation)
            if not pages:
                return
            job = self._jobs[session, reservation] = Job(pages[::-1])
        job.told(end)
        if job.left and job.thread is None:
            self._follow(job)

    def _pages(self, session: int, reservation: int) -> list[tuple[int, Life, memoryview]]:
        """All that the reservation has still open; none where something of it is not mapped."""
        there = self._core.open_pages(session, reservation=reservation)
        extents, metas = there.extents, there.metas
        tiers = [tier for tier in map(self._tiers.__getitem__, extents["tier"].tolist()) if is_mapped(tier)]
        if len(tiers) < len(extents):
            return []
        metas["layers"] = self._layers_of(metas["namespace"])
        return list(zip(there.indices.tolist(), _lives(extents, metas), _views(tiers, extents, metas), strict=True))

    async def hash(self, committing: Committing) -> Hashed:
        """Sums and digests of a commit's pages, whose metas have their layers. Raises what hashing raises."""
        extents, metas = committing.extents, committing.metas
        job = self._jobs.pop((committing.session, committing.reservation), None)
        if job is None:
            return await self._mover.hash_pages(extents, metas)
        lives = _lives(extents, metas)
        while job.thread is not None:
            await asyncio.wait([job.thread])
        found = job.made
        rest = np.array([life not in found for life in lives], bool)
        if rest.any():
            last = await self._mover.hash_pages(extents[rest], metas[rest])
            new = zip(last.slices, map(bytes, last.digests), strict=True)
            found |= zip((life for life in lives if life not in found), new, strict=True)
        slices, digests = zip(*(found[life] for life in lives), strict=True)
        return Hashed(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16), list(slices))

    def drop(self, session: int, reservation: int) -> None:
        """The reservation has ended, and nobody wants its sums."""
        job = self._jobs.pop((session, reservation), None)
        if job is not None:
            job.left.clear()

    def forget(self, session: int) -> None:
        """The session has ended."""
        for key in [key for key in self._jobs if key[0] == session]:
            self.drop(*key)

    def _is_full(self, session: int) -> bool:
        """Whether all that may be are being hashed, or all of the session's."""
        return len(self._jobs) >= FOLLOWED_LIMIT or sum(its == session for its, _ in self._jobs) >= SESSION_LIMIT

    def _follow(self, job: Job) -> None:
        try:
            job.thread = self._mover.in_thread(job.follow)
        except TierFailed:  # no thread can be had: the commit will tell
            job.left.clear()
            return
        job.thread.add_done_callback(lambda done: self._followed(job, done))

    def _followed(self, job: Job, done: asyncio.Future[None]) -> None:
        """The thread has come to the end of what it knew of, or failed: then the commit hashes the rest."""
        job.thread = None
        if done.cancelled() or done.exception() is not None:
            job.left.clear()
        elif job.left:
            self._follow(job)


def _lives(extents: StructArray, metas: StructArray) -> list[Life]:
    columns = (extents["segment"], extents["generation"], metas["stored_length"], metas["layers"])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _views(tiers: Sequence[MappedTier], extents: StructArray, metas: StructArray) -> list[memoryview]:
    lengths = metas["stored_length"].tolist()
    return [tier.view(row)[:length] for tier, row, length in zip(tiers, extents, lengths, strict=True)]
