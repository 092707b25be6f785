"""Puts: reserve, begin_commit, abort.

A session gets pages that it may write for named blocks, and begins their commit. allocation.py
chooses pages; commits.py ends commits. Hashing, and copying from staging pages, happen outside
between. Before its commit no block of a reservation can be found. Only the end of its commit frees
a busy page.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from tierd.core.arrays.sets import among, distinct, every, firsts, in_order, kinds, some, true_rows
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import COMMIT_BLOCK, EXTENT, ROOT, BlockStatus, Reason, StructArray, Wanted
from tierd.core.index.blocks import Names, hash_rows, words
from tierd.core.plan import Committing, Ids, Lengths, PutQuery, Reserved, ReservedAhead
from tierd.core.plan_builder import PlanBuilder, no_ids
from tierd.core.requests.allocation import Allocation
from tierd.core.requests.leases import BUSY, OPEN, Commit, Holder, Holders, Reservation
from tierd.core.requests.put_request import wish_ahead, wish_of
from tierd.core.requests.reserved_pages import ReservedPages
from tierd.core.space.planner import Planner, Where
from tierd.errors import InvalidArgument

AHEAD_SHARE = 8
"""At most one part in so many of a kind of tier is reserved for puts that may come."""


class Puts:
    """See the module. dead: namespaces whose epoch has ended."""

    def __init__(self, planner: Planner, sessions: Holders, reserved_pages: ReservedPages) -> None:
        self._planner, self._index, self._sessions, self._reserved_pages = (
            planner,
            planner.index,
            sessions,
            reserved_pages,
        )
        self._allocation = Allocation(planner, sessions, reserved_pages)
        self._extents = reserved_pages.extents
        self.dead: set[int] = set()

    # -- reserve

    def reserve(self, session: int, *, groups: Sequence[PutQuery], kind: Wanted, now: float) -> Reserved:
        """Pages for blocks that are not held yet."""
        holder, draft = self._sessions.get(session), PlanBuilder(now)
        wish = wish_of(groups, session=session, domain=holder.domain, time_s=self._index.blocks.unix_s + now)
        statuses = np.full(len(wish.lengths), BlockStatus.NO_ROOM, np.uint16)
        if self.dead:
            statuses[among(wish.namespaces, list(self.dead))] = BlockStatus.REJECTED
        ids = self._known(wish)
        where = self._reserved_pages.nearest(ids)
        exists = where.pages >= 0
        statuses[exists] = BlockStatus.EXISTS
        self._reserved_pages.say(np.where(exists, ids, -1), wish.said, now)
        if some(exists):  # a put of a held block is a use of it
            self._index.use(firsts(ids[exists][::-1]), now)
        counts = [len(group.blocks) for group in groups]
        guarded = self._planner.guard(in_order(np.concatenate((ids, self._parents(groups)))))
        self._allocation.give(wish, statuses=statuses, counts=counts, kind=kind, draft=draft)
        self._planner.unguard(guarded, draft)
        given = wish.pages >= 0
        statuses[given] = BlockStatus.RESERVED
        wish.state[given] = OPEN
        extents = self._extents(
            Where(np.where(given, wish.tiers, where.tiers), np.where(given, wish.written, where.pages))
        )
        number = self._keep(holder, wish) if some(given) else 0
        spans = _spans(counts)
        return Reserved(number, [statuses[span] for span in spans], [extents[span] for span in spans], draft.plan())

    def reserve_ahead(self, session: int, *, group: PutQuery, puts: int, kind: Wanted, now: float) -> ReservedAhead:
        """Reserves private pages for each of some puts that may come, as many as there is room for.
        All such pages stay a small part of the tiers.

        Blocks of the session's last commit are not evicted for them: no client had time to get
        them, and the next put probably continues them.
        """
        holder, draft, numbers, count = self._sessions.get(session), PlanBuilder(now), list[int](), len(group.blocks)
        if np.count_nonzero(group.blocks["hash"]):
            raise InvalidArgument("groups[0].blocks: a hash is given; send zeros, the commit names the blocks")
        each = self._page_bytes(group.blocks["length"], kind)
        puts = min(puts, self._ahead_bytes_left(kind) // each) if each and group.namespace not in self.dead else 0
        if puts <= 0:
            return ReservedAhead(numbers, np.zeros((0, count), EXTENT), draft.plan())
        time_s = self._index.blocks.unix_s + now
        wish = wish_ahead(group, puts=puts, session=session, domain=holder.domain, time_s=time_s)
        statuses = np.full(puts * count, BlockStatus.NO_ROOM, np.uint16)
        guarded = self._planner.guard(in_order(holder.brought))
        self._allocation.give(wish, statuses=statuses, counts=[count] * puts, kind=kind, draft=draft)
        self._planner.unguard(guarded, draft)
        given = wish.pages >= 0
        wish.state[given] = OPEN
        extents = self._extents(Where(wish.tiers, wish.written)).reshape(puts, count)
        whole = np.asarray(given.reshape(puts, count).all(axis=1), bool)
        extents = extents if every(whole) else extents[whole]
        is_sure = len(self._index.writable(kind)) == 1  # whether their tier is known
        put_bytes = [each] * puts if is_sure else self._put_bytes(wish).reshape(puts, count).sum(axis=1).tolist()
        for rows, is_whole, its_bytes in zip(_spans([count] * puts), whole.tolist(), put_bytes, strict=True):
            part = wish.part(rows)
            number = self._keep(holder, part)
            if is_whole:
                self._sessions.set_ahead(part, its_bytes)
                numbers.append(number)
            else:
                self.abort(holder, number, reason=Reason.ABORTED, draft=draft)
        return ReservedAhead(numbers, extents, draft.plan())

    def _known(self, wish: Reservation) -> Ids:
        """The ids of the named blocks; -1: unknown, or private."""
        if not np.count_nonzero(wish.hash):
            return np.full(len(wish.hash), -1, np.int64)
        return self._index.blocks.find(Names(wish.namespaces, words(wish.hash)))

    def _page_bytes(self, lengths: Lengths, kind: Wanted) -> int:
        """Most bytes that puts of these lengths take, in any tier that may get them."""
        serving = self._index.writable(kind)
        return max((int(self._index.tiers[tier].put_bytes(lengths).sum(dtype=np.int64)) for tier in serving), default=0)

    def _put_bytes(self, wish: Reservation) -> Ids:
        """Bytes of all pages reserved for each of its blocks; 0 for none."""
        out = np.zeros(len(wish.lengths), np.int64)
        for tier in kinds(wish.tiers[wish.tiers >= 0]):
            rows = true_rows(wish.tiers == tier)
            out[rows] = self._index.tiers[tier].put_bytes(wish.lengths[rows])
        return out

    def _ahead_bytes_left(self, kind: Wanted) -> int:
        """How much more may be reserved ahead."""
        capacity = sum(self._index.tiers[tier].spec.capacity_bytes for tier in self._index.writable(kind))
        return max(0, capacity // AHEAD_SHARE - self._sessions.ahead_bytes)

    def _keep(self, holder: Holder, wish: Reservation) -> int:
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

    def begin_commit(self, session: int, *, reservation: int, blocks: StructArray | None) -> Committing:
        """Marks rows busy and names them."""
        held = self._sessions.reservation(session, reservation)
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

    # -- ends

    def abort(self, holder: Holder, reservation: int, *, reason: Reason, draft: PlanBuilder) -> None:
        """Ends the reservation; busy pages stay until their finish_commit."""
        held = holder.reservations.pop(reservation, None)
        if held is not None:
            self._sessions.set_ahead(held, 0)
            held.closing = True
            self._reserved_pages.take_back(held, held.state == OPEN, reason, draft)

    # -- inside

    def _shorten(self, held: Reservation, rows: Ids, lengths: Lengths) -> None:
        if every(held.lengths[rows] == lengths):
            return
        held.lengths[rows] = lengths
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            self._index.tiers[held.tiers[row]].length[held.pages[row]] = length


def _spans(lengths: Sequence[int]) -> list[slice]:
    """Consecutive slices of these lengths."""
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


def _named_rows(held: Reservation, blocks: StructArray) -> Ids:
    """The rows that COMMIT_BLOCK records name."""
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
            f"commit: a length is 0 or above its length in reservation {held.id}; reserve the full length"
        )
    if not every(blocks["hash"].any(axis=1)):
        raise InvalidArgument("commit: a hash of zeros; name every block")
    return rows
