"""Puts: reserve, begin_commit, finish_commit, abort.

Purpose: from named blocks to pages that one session may write, and from written pages to blocks that everybody finds. Non-purpose: room
(room.py); hashing, and copying from staging pages, which happen outside between begin_commit and finish_commit.

Invariants: nothing of a reservation can be found before its commit; the blocks of one commit become findable together or not at all; of
several reservations of one name the first commit wins; a busy page is freed by its finish_commit only. In a tier with sealed puts a reserved block has two pages:
the one that it will lie in, which the daemon alone may write, and a staging page, which the session writes and which is free again when the block is published or given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from tierd.core.blocks import Names, hash_rows, names_of, words
from tierd.core.columns import runs
from tierd.core.draft import Draft, no_ids
from tierd.core.gets import Gets
from tierd.core.leases import BUSY, GONE, OPEN, Commit, Reservation, Session, Sessions
from tierd.core.meta import new_meta, picked
from tierd.core.model import (
    COMMIT_BLOCK,
    EXTENT,
    NO_PAGE,
    ROOT,
    UNVERIFIED,
    BlockStatus,
    Reason,
    StructArray,
    Wanted,
)
from tierd.core.plan import (
    Bools,
    Bytes,
    Codes,
    Committed,
    Committing,
    Ids,
    Lengths,
    OpenPages,
    PutQuery,
    Reserved,
    ReservedAhead,
)
from tierd.core.planner import Planner, Where
from tierd.core.said import Said, keep_said
from tierd.core.segment import Key
from tierd.core.sets import among, distinct, every, in_order, kinds, some, true_rows
from tierd.core.wish import wish_of
from tierd.errors import InvalidArgument, NotFound

AHEAD_SHARE = 8
"""One part in so many of a kind of tier is at most reserved for puts that may come."""


class Puts:
    """See the module. dead: namespaces that were forgotten."""

    def __init__(self, planner: Planner, sessions: Sessions, gets: Gets) -> None:
        self._planner, self._index, self._sessions, self._gets = planner, planner.index, sessions, gets
        self.dead: set[int] = set()

    # -- reserve

    def reserve(self, session: int, *, groups: Sequence[PutQuery], kind: Wanted, now: float) -> Reserved:
        """Pages for what is not held yet."""
        holder, draft = self._sessions.get(session), Draft(now)
        wish = wish_of(groups, session=session, domain=holder.domain, time_s=self._index.blocks.unix_s + now)
        statuses = np.full(len(wish.lengths), BlockStatus.NO_ROOM, np.uint16)
        if self.dead:
            statuses[among(wish.namespaces, list(self.dead))] = BlockStatus.REJECTED
        ids = self._known(wish)
        where = self._nearest(ids)
        exists = where.pages >= 0
        statuses[exists] = BlockStatus.EXISTS
        self._say(np.where(exists, ids, -1), wish.said, now)
        query = np.repeat(np.arange(len(groups)), [len(group.blocks) for group in groups])
        guarded = self._planner.guard(in_order(np.concatenate((ids, self._parents(groups)))))
        self._give(wish, statuses=statuses, query=query, kind=kind, draft=draft)
        self._planner.unguard(guarded, draft)
        given = wish.pages >= 0
        statuses[given] = BlockStatus.RESERVED
        wish.state[given] = OPEN
        extents = self._extents(
            Where(np.where(given, wish.tiers, where.tiers), np.where(given, wish.written, where.pages))
        )
        number = self._keep(holder, wish) if some(given) else 0
        spans = _spans([len(group.blocks) for group in groups])
        return Reserved(number, [statuses[span] for span in spans], [extents[span] for span in spans], draft.plan())

    def reserve_ahead(self, session: int, *, group: PutQuery, puts: int, kind: Wanted, now: float) -> ReservedAhead:
        """A reservation of private pages for each of some puts that may come, as many as there is room for and all such pages stay a small part of the tiers."""
        holder, draft, numbers, count = self._sessions.get(session), Draft(now), list[int](), len(group.blocks)
        if np.count_nonzero(group.blocks["hash"]):
            raise InvalidArgument("groups[0].blocks: named; ask for private pages, the commit names them")
        each = self._page_bytes(group.blocks["length"], kind)
        puts = min(puts, self._ahead_bytes_left(kind) // each) if each and group.namespace not in self.dead else 0
        if puts <= 0:
            return ReservedAhead(numbers, np.zeros((0, count), EXTENT), draft.plan())
        wish = wish_of([group] * puts, session=session, domain=holder.domain, time_s=self._index.blocks.unix_s + now)
        statuses = np.full(puts * count, BlockStatus.NO_ROOM, np.uint16)
        self._give(wish, statuses=statuses, query=np.repeat(np.arange(puts), count), kind=kind, draft=draft)
        given = wish.pages >= 0
        wish.state[given] = OPEN
        whole = np.all(given.reshape(puts, count), axis=1)
        extents = self._extents(Where(wish.tiers, wish.written)).reshape(puts, count)[whole]
        put_bytes = self._put_bytes(wish).reshape(puts, count).sum(axis=1)
        for rows, is_whole, its_bytes in zip(_spans([count] * puts), whole.tolist(), put_bytes.tolist(), strict=True):
            part = wish.part(rows)
            number = self._keep(holder, part)
            if is_whole:
                self._sessions.set_ahead(part, its_bytes)
                numbers.append(number)
            else:
                self.abort(holder, number, reason=Reason.ABORTED, draft=draft)
        return ReservedAhead(numbers, extents, draft.plan())

    def take_ahead(self, session: int, reservation: int) -> None:
        """The put has come that a reservation was made ahead for."""
        held = self._sessions.get(session).reservations.get(reservation)
        if held is not None:
            self._sessions.set_ahead(held, 0)

    def _known(self, wish: Reservation) -> Ids:
        """The blocks that it names; -1: not known, or private."""
        if not np.count_nonzero(wish.hash):
            return np.full(len(wish.hash), -1, np.int64)
        return self._index.blocks.find(Names(wish.namespaces, words(wish.hash)))

    def _page_bytes(self, lengths: Lengths, kind: Wanted) -> int:
        """Of the pages that blocks of such lengths take while they are put, at most: in one tier or another of those where they may lie."""
        serving = self._index.writable(kind)
        return max((int(self._index.tiers[tier].put_bytes(lengths).sum(dtype=np.int64)) for tier in serving), default=0)

    def _put_bytes(self, wish: Reservation) -> Ids:
        """Of all pages that were set aside for each of its blocks, in whichever tiers; 0 for one that has none."""
        out = np.zeros(len(wish.lengths), np.int64)
        for tier in kinds(wish.tiers[wish.tiers >= 0]):
            rows = true_rows(wish.tiers == tier)
            out[rows] = self._index.tiers[tier].put_bytes(wish.lengths[rows])
        return out

    def _ahead_bytes_left(self, kind: Wanted) -> int:
        """How much more may be reserved ahead."""
        capacity = sum(self._index.tiers[tier].spec.capacity_bytes for tier in self._index.writable(kind))
        return max(0, capacity // AHEAD_SHARE - self._sessions.ahead_bytes)

    def _say(self, ids: Ids, said: Said, now: float) -> None:
        """What a put says of blocks that are held already (-1: are not), its first block first."""
        rows = true_rows((said.codes > 0) & (ids >= 0))[::-1]
        if len(rows):
            self._index.say(ids[rows], said.at(rows), now)

    def _give(self, wish: Reservation, *, statuses: Codes, query: Ids, kind: Wanted, draft: Draft) -> None:
        """Pages for what still has NO_ROOM, first of each query first; after the first that gets none, its query gets no more."""
        serving, holder = self._index.writable(kind), self._sessions.get(wish.session)
        if not serving:
            return
        tiers = _striped(wish, serving)
        classes = np.zeros(len(tiers), np.int64)
        free = statuses == BlockStatus.NO_ROOM
        fits = free.copy()
        for tier in kinds(tiers):
            rows = true_rows((tiers == tier) & free)
            classes[rows] = self._index.tiers[tier].class_of(wish.lengths[rows])
            fits[rows] = self._sessions.room_for_bytes(
                holder, tier, self._index.tiers[tier].put_bytes(wish.lengths[rows])
            )
        rows = true_rows(free & ~_after_first(free & ~fits, query))
        for part in runs(tiers[rows], classes[rows]):
            at = rows[part]
            wish.tiers[at] = tiers[at]
            self._set_aside(wish, at, int(classes[at[0]]), draft)
        self._take_back(wish, _after_first(free & (wish.pages < 0), query), Reason.ABORTED, draft)
        for tier in kinds(tiers):
            self._sessions.reserve(holder, tier, wish.pages_in(tier, true_rows(wish.pages >= 0)), step=1)

    def _set_aside(self, wish: Reservation, at: Ids, class_bytes: int, draft: Draft) -> None:
        """Pages for rows of one tier and class, as far as there is room."""
        tier = int(wish.tiers[at[0]])
        spec, key = self._index.tiers[tier].spec, Key(wish.domain, class_bytes, wish.session)
        if not spec.sealed_puts:
            key = key if spec.writer_owned else key._replace(writer=spec.own_writer)
            pages = self._reserved(tier, key, wish.lengths[at], draft)
            wish.pages[at[: len(pages)]] = pages
            return
        count = len(at)
        while count and len(at):
            given = self._set_aside_two(wish, at[:count], key, draft)
            at = at[given:]
            count = count if given == count else count // 2  # fewer staging pages may leave a segment for the others

    def _set_aside_two(self, wish: Reservation, at: Ids, key: Key, draft: Draft) -> int:
        """A staging page and its own for each row, as far as there is room; how many. Staging first, so that empty segments of the session are not given up for the others."""
        tier = int(wish.tiers[at[0]])
        staging = self._reserved(tier, key, wish.lengths[at], draft)
        wish.staging[at[: len(staging)]] = staging
        own = key._replace(writer=self._index.tiers[tier].spec.own_writer)
        pages = self._reserved(tier, own, wish.lengths[at[: len(staging)]], draft)
        wish.pages[at[: len(pages)]] = pages
        self._unstage(wish, at[len(pages) :], Reason.ABORTED, draft)
        return len(pages)

    def _reserved(self, tier: int, key: Key, lengths: Lengths, draft: Draft) -> Ids:
        """Pages of the key for blocks of such lengths, from the first one on, as far as there is room."""
        pages = self._planner.room.reserve(tier, key, len(lengths), draft=draft)
        self._index.tiers[tier].length[pages] = lengths[: len(pages)]
        draft.reserve(self._index.tiers[tier].extents(pages))
        return pages

    def _keep(self, holder: Session, wish: Reservation) -> int:
        wish.id = self._sessions.next_id()
        holder.reservations[wish.id] = wish
        return wish.id

    def _parents(self, groups: Sequence[PutQuery]) -> Ids:
        """Ids of the blocks that the queries continue."""
        groups = [group for group in groups if group.parent != ROOT]
        if not groups:
            return no_ids()
        names = Names(
            np.asarray([group.namespace for group in groups], np.uint32),
            np.concatenate([hash_rows(group.parent) for group in groups]),
        )
        return self._index.blocks.find(names)

    # -- commit

    def open_pages(self, session: int, *, reservation: int) -> OpenPages:
        """Which rows are still open and lie where the session writes them, where that is, and what is known of them."""
        held = self._held(session, reservation)
        rows = true_rows((held.state == OPEN) & (held.staging < 0))
        at = held.place(rows)
        extents = self._extents(Where(held.tiers[at], held.pages[at]))
        return OpenPages(rows, extents, _metas(held, at, extents))

    def begin_commit(self, session: int, *, reservation: int, blocks: StructArray | None) -> Committing:
        """Marks rows busy and names them."""
        held = self._held(session, reservation)
        rows = held.rows(OPEN) if blocks is None else _named_rows(held, blocks)
        at = held.place(rows)
        if blocks is None:
            if not every(held.hash[at].any(axis=1)):
                raise InvalidArgument(f"reservation {reservation}: it has private pages; commit must name its blocks")
        else:
            held.hash[at], held.parent[at] = blocks["hash"], blocks["parent"]
            held.positions[at], held.tokens[at] = blocks["position"], blocks["tokens"]
            self._shorten(held, rows, blocks["length"])
        held.state[at] = BUSY
        self._sessions.set_ahead(held, 0)
        extents = self._extents(Where(held.tiers[at], held.pages[at]))
        commit = Commit(self._sessions.next_id(), held, rows, _metas(held, at, extents))
        self._sessions.commits[commit.id] = commit
        return Committing(
            commit.id,
            session,
            reservation,
            extents,
            commit.metas,
            held.lengths[at].copy(),
            rows.astype(np.uint32),
            staging=self._extents(Where(held.tiers[at], held.staging[at])),
        )

    def _held(self, session: int, reservation: int) -> Reservation:
        held = self._sessions.get(session).reservations.get(reservation)
        if held is None:
            raise NotFound(f"reservation {reservation}: session {session} has none; reserve again")
        return held

    def finish_commit(
        self, committing: Committing, *, digests: Bytes, ok: Bools, lease: bool, keep_open: bool, now: float
    ) -> Committed:
        """Publishes all, or none."""
        commit = self._sessions.commits.get(committing.id)
        if commit is None:
            raise NotFound(f"commit {committing.id}: not under way; begin_commit gives one that is")
        count = len(commit.rows)
        if digests.shape != (count, 16) or ok.shape != (count,):
            raise InvalidArgument(
                f"commit {commit.id}: digests {digests.shape}, ok {ok.shape} for {count} blocks; give one each"
            )
        del self._sessions.commits[commit.id]
        draft, held = Draft(now), commit.reservation
        where = Where(held.tiers[commit.rows], held.pages[commit.rows])
        statuses = np.full(count, BlockStatus.FAILED, np.uint16)
        ids = np.full(count, -1, np.int64)
        if every(ok) and not (self.dead and self.dead & set(held.namespaces[commit.rows].tolist())):
            commit.metas["digest"] = digests
            ids = self._publish(commit, where, statuses, draft=draft)
        self._close(commit, failed=some(ids < 0), keep_open=keep_open, draft=draft)
        is_own = every(statuses == BlockStatus.READY)
        found = where if is_own else self._nearest(ids, besides=kinds(where.tiers))
        number = self._lease(held, found, ids, now) if lease and count else 0
        return Committed(statuses, self._extents(found), ids, commit.metas, number, draft.plan())

    def _publish(self, commit: Commit, where: Where, statuses: Codes, *, draft: Draft) -> Ids:
        """New names get their pages; the ids of all names.

        A commit uses the blocks before it too: they are touched after it, so that a chain which grows piece by piece still loses its tail first.
        """
        metas = commit.metas
        names = self._index.blocks.keyed(names_of(metas))
        known = self._index.blocks.find(names)
        new, is_known = names.firsts(), known >= 0
        if some(is_known):
            new &= self._nearest(known).pages < 0
        rows = true_rows(new)
        if some(is_known):
            self._make_way(known[rows], where.at(rows), metas["digest"][rows], draft)
            self._say(known, Said.of_metas(metas), draft.now)
            keep_said(self._index.blocks, known, metas, self._index.blocks.unix_s + draft.now)
        none = known[rows] if not some(is_known[rows]) else None
        added, its = picked(metas, rows), names if len(rows) == len(metas) else names.at(rows)
        known[rows] = ids = self._index.blocks.add(added, draft.now, known=none, names=its)
        self._index.link(ids, added["parent"], draft.now)
        self._index.say_before(ids, draft.now)
        if self._index.listener is not None:
            self._index.listener.stored(ids, draft.now)
        for part in runs(where.tiers[rows]):
            tier, pages = int(where.tiers[rows[part[0]]]), where.pages[rows[part]]
            if self._index.tiers[tier].spec.writer_owned and not self._index.tiers[tier].spec.sealed_puts:
                self._index.tiers[tier].flags[pages] = UNVERIFIED
            self._index.attach(tier, pages[::-1], ids[part][::-1], draft.now)
            self._index.publish(tier, pages)
        self._index.note_use(ids[::-1], draft.now)
        before = self._index.blocks.ancestors(ids)
        for tier in self._index.serving():
            self._index.touch(tier, before, draft.now)
        self._count_off(commit.reservation, commit.rows[rows])
        self._unstage(commit.reservation, commit.rows[rows], Reason.SEALED, draft)
        commit.reservation.state[commit.rows[rows]] = GONE
        statuses[:] = np.where(new, BlockStatus.READY, BlockStatus.EXISTS)
        if len(again := true_rows(~new)):  # names that came twice, of which what made way may have had another id
            known[again] = self._index.blocks.find(names.at(again))
        return known

    def _make_way(self, ids: Ids, where: Where, digests: Bytes, draft: Draft) -> None:
        """Pages of those blocks that nobody can read now (tier out of service, transfer under way) go if they are in the way or differ."""
        same = (self._index.blocks.digest[ids] == words(digests)).all(axis=1)
        for tier in range(len(self._index.tiers)):
            pages = self._index.attached(tier, ids)
            pages = pages[(pages >= 0) & (~same | (where.tiers == tier))]
            if len(pages):
                self._index.doom(tier, pages, Reason.DUPLICATE, draft)

    def _close(self, commit: Commit, *, failed: bool, keep_open: bool, draft: Draft) -> None:
        """What of the reservation is not published stays open, or is freed."""
        held = commit.reservation
        busy = np.zeros(len(held.state), bool)
        busy[commit.rows] = held.state[commit.rows] == BUSY
        if failed and keep_open and not held.closing:
            held.state[busy] = OPEN
        else:
            self._take_back(held, busy, Reason.FAILED if failed else Reason.DUPLICATE, draft)
        if not keep_open:
            held.closing = True
            self._take_back(held, held.state == OPEN, Reason.ABORTED, draft)
        holder = self._sessions.open.get(held.session)
        if holder is not None and (held.closing or every(held.state == GONE)):
            holder.reservations.pop(held.id, None)

    def _lease(self, held: Reservation, where: Where, ids: Ids, now: float) -> int:
        """A lease on what was committed, if its session lives and all of it can be held and mapped."""
        holder = self._sessions.open.get(held.session)
        if holder is None or (where.pages < 0).any():
            return 0
        tiers = kinds(where.tiers)
        if not all(self._index.tiers[tier].spec.writer_owned for tier in tiers):
            return 0  # a block existed on a store alone, which nobody can map
        kind = self._index.tiers[int(where.tiers[0])].spec.kind
        return self._gets.hold(holder, kind=kind, where=where, blocks=ids)

    # -- ends

    def abort(self, holder: Session, reservation: int, *, reason: Reason, draft: Draft) -> None:
        """The reservation ends; busy pages go on to their finish_commit."""
        held = holder.reservations.pop(reservation, None)
        if held is not None:
            self._sessions.set_ahead(held, 0)
            held.closing = True
            self._take_back(held, held.state == OPEN, reason, draft)

    # -- inside

    def _take_back(self, held: Reservation, rows: Bools, reason: Reason, draft: Draft) -> None:
        """reserved -> free for rows that have a page."""
        at = true_rows(rows & (held.pages >= 0))
        if len(at) == 0:
            return
        self._count_off(held, at)
        self._unstage(held, at, reason, draft)
        for part in runs(held.tiers[at]):
            self._index.discard(int(held.tiers[at[part[0]]]), held.pages[at[part]], reason, draft)
        held.state[at] = GONE
        held.pages[at] = NO_PAGE

    def _unstage(self, held: Reservation, rows: Ids, reason: Reason, draft: Draft) -> None:
        """reserved -> free for the staging pages of rows. SEALED: what was written to them is published, so their memory can be had, and stays the writer's."""
        at = rows[held.staging[rows] >= 0]
        for part in runs(held.tiers[at]):
            tier, pages = int(held.tiers[at[part[0]]]), held.staging[at[part]]
            if reason is Reason.SEALED:
                self._index.tiers[tier].prove(pages)
            self._index.discard(tier, pages, reason, draft)
        held.staging[at] = NO_PAGE

    def _count_off(self, held: Reservation, rows: Ids) -> None:
        holder = self._sessions.open.get(held.session)
        if holder is None or held.id == 0:
            return
        for tier in kinds(held.tiers[rows]):
            self._sessions.reserve(holder, tier, held.pages_in(tier, rows), step=-1)

    def _nearest(self, ids: Ids, *, besides: Sequence[int] = ()) -> Where:
        """The nearest readable page of each block in any tier in service; of what is in none, its page in the tiers besides."""
        serving = self._index.serving()
        tiers = self._index.nearest(ids, [*serving, *(t for t in besides if t not in serving)]).astype(np.int64)
        pages = np.full(len(ids), NO_PAGE, np.int64)
        for tier in kinds(tiers[tiers >= 0]):
            pages[tiers == tier] = self._index.attached(tier, ids[tiers == tier])
        return Where(tiers, pages)

    def _extents(self, where: Where) -> StructArray:
        tiers = kinds(where.tiers[where.pages >= 0])
        if len(tiers) == 1:
            return self._index.tiers[tiers[0]].extents(where.pages)
        out = np.zeros(len(where.pages), EXTENT)
        out["page"] = NO_PAGE
        for tier in tiers:
            here = (where.tiers == tier) & (where.pages >= 0)
            out[here] = self._index.tiers[tier].extents(where.pages[here])
        return out

    def _shorten(self, held: Reservation, rows: Ids, lengths: Lengths) -> None:
        if every(held.lengths[rows] == lengths):
            return
        held.lengths[rows] = lengths
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            self._index.tiers[held.tiers[row]].length[held.pages[row]] = length


def _spans(lengths: Sequence[int]) -> list[slice]:
    """Stretches of so many rows, one after another."""
    stops = list(accumulate(lengths))
    return [slice(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def _metas(held: Reservation, at: Ids | slice, extents: StructArray) -> StructArray:
    metas = new_meta(len(extents))
    metas["namespace"], metas["domain"] = held.namespaces[at], held.domain
    metas["hash"], metas["parent"] = held.hash[at], held.parent[at]
    metas["position"], metas["tokens"] = held.positions[at], held.tokens[at]
    metas["logical_length"] = metas["stored_length"] = held.lengths[at]
    metas["priority"], metas["until_s"] = held.said.at(at)
    for name in ("generation", "segment", "offset"):
        metas[name] = extents[name]
    return metas


def _after_first(wrong: Bools, query: Ids) -> Bools:
    """Rows that are wrong, or come after one that is in the same query."""
    if not some(wrong):
        return wrong
    count = np.cumsum(wrong)
    starts = np.searchsorted(query, query)
    return np.asarray(count - (count[starts] - wrong[starts]) > 0, bool)


def _striped(wish: Reservation, serving: Sequence[int]) -> Ids:
    """The tier for each row: by the first 8 bytes of the hash, private pages in turns."""
    if len(serving) == 1:
        return np.full(len(wish.hash), serving[0], np.int64)
    stripe = np.where(wish.hash.any(axis=1), words(wish.hash)[:, 0], wish.positions.astype(np.uint64))
    tiers: Ids = np.asarray(serving, np.int64)[(stripe % np.uint64(len(serving))).astype(np.int64)]
    return tiers


def _named_rows(held: Reservation, blocks: StructArray) -> Ids:
    """The rows that COMMIT_BLOCK records speak of."""
    if blocks.dtype != COMMIT_BLOCK:
        raise InvalidArgument(f"commit: dtype {blocks.dtype}; give COMMIT_BLOCK")
    rows = blocks["index"].astype(np.int64)
    if not every(rows < len(held.state)) or len(distinct(rows)) != len(rows):
        raise InvalidArgument(f"commit: an index twice or beyond the {len(held.state)} blocks of reservation {held.id}")
    if not every(held.state[rows] == OPEN):
        raise InvalidArgument(
            f"commit: a block of reservation {held.id} has no page, or is committed already; leave it out"
        )
    if some(blocks["length"] > held.lengths[rows]) or not every(blocks["length"] > 0):
        raise InvalidArgument(
            f"commit: a length is 0 or above what reservation {held.id} set aside; reserve the full length"
        )
    if not every(blocks["hash"].any(axis=1)):
        raise InvalidArgument("commit: a hash of zeros; name every block")
    return rows
