"""Hashes made ahead: of pages whose writer says that they are written, while it writes the next ones.

    written ──▶ hashed by the hash process, which follows the writer ──▶ the commit takes what fits, and hashes the rest

Purpose: a commit that finds most of its work done. Non-purpose: what a commit is (cache.py), other hashing (mover.py). Invariants: sums are taken for
the very life of a page, length and layers that they were made of; each page of a reservation is hashed ahead once at most, and no more than
FOLLOWED_LIMIT reservations at one time, SESSION_LIMIT of one session, so that nobody keeps the process busy by talking; what it does not answer the commit hashes. Who writes to a page after he has
said that he is done has committed other bytes than those under the checksum: a miss at the first hit, as after a write that follows the commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tierd.core.block import slice_cut
from tierd.core.core import Core
from tierd.core.model import StructArray
from tierd.core.plan import Committing
from tierd.hashing.wire import PAGES_MAX, Page
from tierd.mover import Hashed, Mover
from tierd.tiers.checksum import table_digest
from tierd.tiers.tier import Descriptor, MappedTier, SliceTable, Tier, is_mapped

FOLLOWED_LIMIT = 64
"""Reservations that are being hashed; beyond it commits do the work."""
SESSION_LIMIT = FOLLOWED_LIMIT // 4
"""Of them, of one session."""
BEHIND_BYTES = 32 << 20
"""So much of one reservation the process is asked for at one time, and more when half is done: others get their turn, and what is given up is soon out of the way."""
BEHIND_LIMIT_BYTES = 8 * BEHIND_BYTES
"""Of all of them, ended ones too: no commit waits for more."""
Life = tuple[int, int, int, int]
"""Of a page: segment, generation, length of its block, layers."""


@dataclass
class Job:
    """One reservation. tiers: where its segments are; pages: index, life and place of those that nobody has spoken of, last first; left: of those that are written and still to be
    asked for; asked: what is still to be answered, so many bytes; made: sums and digest of what is."""

    tiers: dict[int, MappedTier]
    pages: list[tuple[int, Life, Page]]
    left: deque[tuple[Life, Page]] = field(default_factory=deque)
    asked: deque[Life] = field(default_factory=deque)
    asked_bytes: int = 0
    made: dict[Life, tuple[SliceTable, bytes]] = field(default_factory=dict)
    answered: asyncio.Future[None] | None = None

    def told(self, end: int) -> None:
        """The pages before this index are written."""
        while self.pages and self.pages[-1][0] < end:
            self.left.append(self.pages.pop()[1:])

    def named(self, indices: Sequence[int]) -> None:
        """These pages are written."""
        wanted = set(indices)
        self.left.extend(page[1:] for page in reversed(self.pages) if page[0] in wanted)
        self.pages = [page for page in self.pages if page[0] not in wanted]

    def drop(self) -> None:
        """Nothing more is asked for."""
        self.pages.clear()
        self.left.clear()

    def opened(self, segment: int) -> Descriptor:
        """A descriptor of one of its segments, for reading. Raises KeyError, TierFailed."""
        return self.tiers[segment].descriptor(segment, writable=False)

    def next(self) -> list[tuple[Life, Page]]:
        """What is to be asked for now, in one message: not all that may be at once, so that the process has work while an answer is on its way."""
        pages, end = list[tuple[Life, Page]](), min(BEHIND_BYTES, self.asked_bytes + BEHIND_BYTES // 2)
        while self.left and self.asked_bytes < end and len(pages) < PAGES_MAX:
            pages.append(self.left.popleft())
            self.asked_bytes += pages[-1][0][2]
        return pages

    def take(self, table: bytes | None) -> int:
        """The next answer; of how many bytes."""
        life = self.asked.popleft()
        self.asked_bytes -= life[2]
        if table is not None:
            sums = np.frombuffer(table, "<u8")
            self.made[life] = sums, table_digest(sums)
        return life[2]


class Ahead:
    """Jobs by session and reservation. layers_of: namespace ids to layers per block."""

    def __init__(
        self, core: Core, tiers: Sequence[Tier], *, mover: Mover, layers_of: Callable[[StructArray], StructArray]
    ) -> None:
        self._core, self._tiers, self._mover, self._layers_of = core, tiers, mover, layers_of
        self._jobs: dict[tuple[int, int], Job] = {}
        self._behind_bytes = 0

    def note(self, session: int, reservation: int, *, end: int) -> None:
        """The blocks of a reservation before this index are written. What cannot be hashed now is left to the commit. Raises NotFound."""
        job = self._jobs.get((session, reservation))
        if job is None:
            job = self._begun(session, reservation)
            if job is None:
                return
        job.told(end)
        self._ask(job)

    def note_named(self, committing: Committing) -> None:
        """A commit has begun, so what it names is written. Of a reservation that is not followed the commit itself hashes all."""
        if job := self._jobs.get((committing.session, committing.reservation)):
            job.named(committing.indices.tolist())
            self._ask(job)

    def _begun(self, session: int, reservation: int) -> Job | None:
        """With all that the reservation has still open; none where something of it is not mapped, or nobody would hash it."""
        if not self._mover.hashing.is_ready or self._is_full(session):
            return None
        there = self._core.open_pages(session, reservation=reservation)
        extents, metas = there.extents, there.metas
        tiers = [tier for tier in map(self._tiers.__getitem__, extents["tier"].tolist()) if is_mapped(tier)]
        if len(tiers) < len(extents) or not tiers:
            return None
        metas["layers"] = self._layers_of(metas["namespace"])
        lives = _lives(extents, metas)
        places = [
            Page(life[0], offset, *slice_cut(*life[2:]))
            for life, offset in zip(lives, extents["offset"].tolist(), strict=True)
        ]
        pages = list(zip(there.indices.tolist(), lives, places, strict=True))
        segments = dict(zip(extents["segment"].tolist(), tiers, strict=True))
        job = self._jobs[session, reservation] = Job(segments, pages[::-1])
        return job

    def _ask(self, job: Job) -> None:
        """For what is left of it, as far as the process may be behind with it; where that is behind with too much the commit does the rest."""
        while new := job.next():
            if self._behind_bytes >= BEHIND_LIMIT_BYTES or not self._mover.hashing.hash(
                [page for _, page in new], job.opened, partial(self._take, job)
            ):
                job.drop()
                return
            job.asked.extend(life for life, _ in new)
            self._behind_bytes += sum(life[2] for life, _ in new)

    def _take(self, job: Job, table: bytes | None) -> None:
        self._behind_bytes -= job.take(table)
        if job.asked_bytes <= BEHIND_BYTES // 2:
            self._ask(job)
        if not job.asked and job.answered is not None and not job.answered.done():
            job.answered.set_result(None)

    async def hash(self, committing: Committing) -> Hashed:
        """Sums and digests of a commit's pages, whose metas have their layers. Raises what hashing raises."""
        extents, metas = committing.extents, committing.metas
        job = self._jobs.pop((committing.session, committing.reservation), None)
        if job is None:
            return await self._mover.hash_pages(extents, metas)
        lives = _lives(extents, metas)
        if job.asked:
            job.answered = asyncio.get_running_loop().create_future()
            await job.answered
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
        if job := self._jobs.pop((session, reservation), None):
            job.drop()

    def forget(self, session: int) -> None:
        """The session has ended."""
        for key in [key for key in self._jobs if key[0] == session]:
            self.drop(*key)

    def _is_full(self, session: int) -> bool:
        """Whether all that may be are being hashed, or all of the session's."""
        return len(self._jobs) >= FOLLOWED_LIMIT or sum(its == session for its, _ in self._jobs) >= SESSION_LIMIT


def _lives(extents: StructArray, metas: StructArray) -> list[Life]:
    columns = (extents["segment"], extents["generation"], metas["stored_length"], metas["layers"])
    return list(zip(*(column.tolist() for column in columns), strict=True))
