"""Hashes made ahead: of pages that their client still writes, while it does.

    Commit comes ──▶ its client copies, and says on its board how far ──▶ the hash process follows ──▶ all is hashed ──▶ the commit takes the sums

A commit may come before its pages are written, and waits here until its session has said that all of them are: on its board, which the hash process has read then, or over its socket. A little one of which
the board says so when it comes is hashed at once.

Purpose: a commit that finds most of its work done. Non-purpose: what a commit is (cache.py), other hashing (mover.py). Invariants: a commit goes on when all of it was hashed behind its writer, or its session has said over its socket that all is written; no more than
FOLLOWED_LIMIT commits are followed at one time, SESSION_LIMIT of one session; what the process does not answer the commit hashes. Who writes to a page after he has
said that it is written has committed other bytes than those under the checksum: a miss at the first hit, as after a write that follows the commit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from tierd.cache.at_once import done_at_once
from tierd.cache.boards import WORDS, Boards, board_of
from tierd.core.block import slice_cut
from tierd.core.core import Core
from tierd.core.model import StructArray
from tierd.core.plan import Committing
from tierd.core.sets import every, some, true_rows
from tierd.errors import NotFound, Unavailable
from tierd.hashing.process import PAGE
from tierd.hashing.wire import NOWHERE, PAGES_MAX, TAG_MASK, Word
from tierd.mover import AT_ONCE_BYTES, Hashed, Mover
from tierd.tiers.checksum import raw_tables, table_digests
from tierd.tiers.tier import Descriptor, MappedTier, Tier, is_mapped

FOLLOWED_LIMIT = 64
"""Commits that are followed; those beyond it do the work themselves."""
SESSION_LIMIT = FOLLOWED_LIMIT // 4
"""Of them, of one session."""
AT_ONCE_BLOCKS = 64
"""Of a commit that is hashed on the loop, and AT_ONCE_BYTES: each block takes some microseconds beside its bytes."""
BEHIND_BYTES = 32 << 20
"""So much of one commit the process is asked for at one time, and more when half is done: others get their turn, and what is given up is soon out of the way."""
BEHIND_LIMIT_BYTES = 8 * BEHIND_BYTES
"""Of all of them, ended ones too: no commit waits for more. No session has more of it than it leaves to the others, however long it does not write."""


@dataclass
class Job:
    """One commit. tiers: where its segments are; board: gives a descriptor of its session's; pages: PAGE [n], of so many bytes each; at: the first that is still to be asked for; where:
    it is said how far they are written; numbers: by which some were asked for; asked: how many are still to be answered, of so many bytes; tables: sums as they came, by row."""

    session: int
    reservation: int
    tiers: dict[int, MappedTier]
    board: Callable[[int], Descriptor]
    pages: StructArray
    lengths: list[int]
    where: Word
    at: int = 0
    numbers: list[int] = field(default_factory=list)
    asked: int = 0
    asked_bytes: int = 0
    tables: dict[int, bytes] = field(default_factory=dict)
    answered: asyncio.Future[None] | None = None

    def opened(self, memory: int) -> Descriptor:
        """A descriptor of its board, or of one of its segments for reading. Raises KeyError, OSError, TierFailed."""
        if memory == self.where.board:
            return self.board(memory)
        return self.tiers[memory].descriptor(memory, writable=False)

    def next(self) -> range:
        """The rows that are to be asked for now, in one message: of a long commit not all that may be at once, so that the process has work while an answer is on its way."""
        is_short = self.asked_bytes + sum(self.lengths[self.at :]) <= BEHIND_BYTES
        end_bytes = BEHIND_BYTES if is_short else min(BEHIND_BYTES, self.asked_bytes + BEHIND_BYTES // 2)
        at, count_bytes = self.at, self.asked_bytes
        while at < len(self.lengths) and count_bytes < end_bytes and at - self.at < PAGES_MAX:
            count_bytes += self.lengths[at]
            at += 1
        return range(self.at, at)

    @property
    def is_hashed(self) -> bool:
        """Whether all of it is."""
        return len(self.tables) == len(self.lengths)

    def give_up(self) -> None:
        """Nothing more is asked for."""
        self.at = len(self.lengths)


@dataclass
class Awaited:
    """How far a reservation must be written for the first of those who wait to go on."""

    end: int
    event: asyncio.Event = field(default_factory=asyncio.Event)


class Ahead:
    """Jobs by commit. layers_of: namespace ids to layers per block. is_open: whether a session can say anything."""

    def __init__(
        self,
        core: Core,
        tiers: Sequence[Tier],
        *,
        mover: Mover,
        layers_of: Callable[[StructArray], StructArray],
        is_open: Callable[[int], bool],
    ) -> None:
        self._core, self._tiers, self._mover, self._layers_of, self._is_open = core, tiers, mover, layers_of, is_open
        self.boards = Boards()
        self._jobs: dict[int, Job] = {}
        self._awaited: dict[tuple[int, int], Awaited] = {}
        self._behind = Counter[int]()  # bytes, by session
        self._is_ended = False

    def note(self, session: int, reservation: int, *, end: int) -> None:
        """The blocks of a reservation before this index are written. Raises NotFound."""
        end = self._core.note_written(session, reservation=reservation, end=end)
        awaited = self._awaited.get((session, reservation))
        if awaited is not None and end >= awaited.end:
            self._ring((session, reservation))

    def end(self, *, after_s: float) -> None:
        """The daemon ends: after so long no commit waits any more for its pages to be written."""
        asyncio.get_running_loop().call_later(after_s, self._end)

    def follow(self, committing: Committing, *, word: int = 0) -> bool:
        """Has a commit's pages hashed behind their writer, as far as its board tells; whether it does. word: of the board, from 1; 0: none. Who follows is to call `await_written` or
        `give_up` next. What is little, and written by now, is hashed here: the process takes longer to hear of it."""
        job = self._begun(committing, word)
        if job is None or job.where == NOWHERE:
            return False
        if len(job.lengths) <= AT_ONCE_BLOCKS and sum(job.lengths) <= AT_ONCE_BYTES:
            with suppress(Exception):  # whatever it is, who hashes next says it
                if self.boards.read_written(job.where) >= _end_of(committing):
                    self._hash_at_once(job, committing)
                    return True
        self._ask(job)
        return bool(job.asked)

    def _hash_at_once(self, job: Job, committing: Committing) -> None:
        hashed = done_at_once(self._mover.hash_pages(committing.extents, committing.metas)).result()
        job.tables = dict(enumerate(raw_tables(hashed.slices)))
        job.give_up()

    async def await_written(self, committing: Committing) -> None:
        """Waits until the writer of a commit's pages has said that they are written. Raises NotFound where their reservation ends before, Unavailable where the daemon does."""
        await self._all_written(committing)
        if (job := self._jobs.get(committing.id)) is not None:
            job.where = NOWHERE
            for number in job.numbers:
                self._mover.hashing.tell_written(number)
            self._ask(job)

    async def _all_written(self, committing: Committing) -> None:
        key = session, reservation = committing.session, committing.reservation
        end = _end_of(committing)
        job = self._jobs.get(committing.id)
        while self._core.note_written(session, reservation=reservation) < end and not (job and job.is_hashed):
            if self._is_ended:
                raise Unavailable("daemon: it ends, and the pages are not written; put again later, or to another one")
            if not self._is_open(session):
                raise NotFound(
                    f"session {session}: it has ended, and the pages of its commit are not written; put again with a new one"
                )
            awaited = self._awaited.setdefault(key, Awaited(end))
            awaited.end = min(awaited.end, end)
            try:
                await awaited.event.wait()
            except BaseException:
                self._ring(key)  # who else waits puts it up again
                raise

    def _begun(self, committing: Committing, word: int) -> Job | None:
        """Of a commit; none where something of it is staged or not mapped, or nobody would hash it."""
        extents, metas, session = committing.extents, committing.metas, committing.session
        if not self._mover.hashing.is_ready or self._is_full(session) or some(committing.staging["page"] >= 0):
            return None
        places = dict(zip(extents["segment"].tolist(), extents["tier"].tolist(), strict=True))
        tiers = {segment: tier for segment, at in places.items() if is_mapped(tier := self._tiers[at])}
        if len(tiers) < len(places) or not tiers:
            return None
        metas["layers"] = self._layers_of(metas["namespace"])
        board = board_of(session)
        tag = committing.reservation & TAG_MASK
        where = Word(board, word - 1, tag) if 0 < word <= WORDS and board in self.boards else NOWHERE
        pages, lengths = _pages(committing), metas["stored_length"].tolist()
        job = Job(session, committing.reservation, tiers, self.boards.opened, pages, lengths, where)
        self._jobs[committing.id] = job
        return job

    def _ask(self, job: Job) -> None:
        """For what is left of it, as far as the process may be behind with it; where that is behind with too much the commit does the rest."""
        while rows := job.next():
            number, size = 0, sum(job.lengths[rows.start : rows.stop])
            if self._behind[job.session] < BEHIND_LIMIT_BYTES - self._behind.total():
                took = partial(self._take, job, iter(rows))
                number = self._mover.hashing.hash(job.pages[rows.start : rows.stop], job.opened, took, where=job.where)
            if not number:
                job.give_up()
                return
            job.at = rows.stop
            job.numbers.append(number)
            job.asked += len(rows)
            job.asked_bytes += size
            self._behind[job.session] += size

    def _take(self, job: Job, rows: Iterator[int], tables: Sequence[bytes | None]) -> None:
        """The answer for the next of the rows, which one message asked for; the answers to another may come between."""
        its = list(islice(rows, len(tables)))
        count_bytes = sum([job.lengths[row] for row in its])
        job.asked -= len(its)
        job.asked_bytes -= count_bytes
        self._behind[job.session] -= count_bytes
        if not self._behind[job.session]:
            del self._behind[job.session]
        job.tables |= {row: table for row, table in zip(its, tables, strict=True) if table is not None}
        if job.asked_bytes <= BEHIND_BYTES // 2:
            self._ask(job)
        if job.is_hashed:
            self._ring((job.session, job.reservation))
        if not job.asked and job.answered is not None and not job.answered.done():
            job.answered.set_result(None)

    def give_up(self, committing: Committing) -> None:
        """Nobody wants its sums."""
        if job := self._jobs.pop(committing.id, None):
            job.give_up()
            for number in job.numbers:
                self._mover.hashing.drop(number)

    def has_hashed(self, committing: Committing) -> bool:
        """Whether all of a commit is hashed, so that `hash` does not wait."""
        job = self._jobs.get(committing.id)
        return job is not None and job.is_hashed

    async def hash(self, committing: Committing) -> Hashed:
        """Sums and digests of a commit's pages, whose metas have their layers. Raises what hashing raises."""
        extents, metas = committing.extents, committing.metas
        job = self._jobs.pop(committing.id, None)
        if job is None:
            return await self._mover.hash_pages(extents, metas)
        if job.asked:
            job.answered = asyncio.get_running_loop().create_future()
            await job.answered
        if len(job.tables) < len(extents):
            rest = np.array([row not in job.tables for row in range(len(extents))], bool)
            last = await self._mover.hash_pages(extents[rest], metas[rest])
            job.tables |= zip(true_rows(rest).tolist(), (table.tobytes() for table in last.slices), strict=True)
        tables = [job.tables[row] for row in range(len(extents))]
        return Hashed(table_digests(tables), [np.frombuffer(table, "<u8") for table in tables])

    def drop(self, session: int, reservation: int) -> None:
        """The reservation has ended: commits that wait for its pages end."""
        self._ring((session, reservation))

    def forget(self, session: int) -> None:
        """The session has ended: commits that wait for its word end, but those all of which is hashed."""
        for key in [key for key in self._awaited if key[0] == session]:
            self._ring(key)
        self._mover.hashing.detach(board_of(session))
        self.boards.end(session)

    def _end(self) -> None:
        self._is_ended = True
        for key in list(self._awaited):
            self._ring(key)

    def _ring(self, key: tuple[int, int]) -> None:
        """Those who wait look again."""
        if awaited := self._awaited.pop(key, None):
            awaited.event.set()

    def _is_full(self, session: int) -> bool:
        """Whether all that may be are being hashed, or all of the session's."""
        return (
            len(self._jobs) >= FOLLOWED_LIMIT
            or sum(job.session == session for job in self._jobs.values()) >= SESSION_LIMIT
        )


def _end_of(committing: Committing) -> int:
    """Before which index of its reservation all blocks of a commit are."""
    return int(committing.indices.max()) + 1 if len(committing.indices) else 0


def _pages(committing: Committing) -> StructArray:
    """PAGE [n] of a commit whose metas have their layers."""
    extents, metas = committing.extents, committing.metas
    pages = np.zeros(len(extents), PAGE)
    pages["segment"], pages["offset"], pages["block"] = extents["segment"], extents["offset"], committing.indices
    lengths, layers = metas["stored_length"], metas["layers"]
    if every(lengths == lengths[0]) and every(layers == layers[0]):
        cuts: tuple[Any, ...] = slice_cut(int(lengths[0]), int(layers[0]))
    else:
        cuts = tuple(zip(*map(slice_cut, lengths.tolist(), layers.tolist()), strict=True))
    pages["piece"], pages["pieces"], pages["last"], pages["layers"] = cuts
    return pages
