"""Sessions, their leases (pins for reading) and reservations (pages for writing), and their shares.

A session lives until its process is gone. Its pinned and reserved pages in a tier stay within a
share of the tier's bytes. A page that several of its leases pin counts once. Every lease and
reservation belongs to an open session. `pinned[t]` counts, per page of tier t, the session's leases
that pin it. The bytes beside it are the sum over its keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tierd.core.arrays.sets import every, tally, true_rows
from tierd.core.formats.model import StructArray, Wanted
from tierd.core.index.pages import Pages
from tierd.core.index.priorities import Priorities
from tierd.core.plan import ID_LIMIT, Bools, Bytes, GroupQuery, Ids, Lengths
from tierd.core.plan_builder import no_ids
from tierd.errors import InvalidArgument, NotFound

OPEN, BUSY, GONE = 0, 1, 2
"""States of a reserved page: written by the client; in a commit; no longer in the reservation."""


@dataclass(slots=True)
class Held:
    """Pages of one group that a lease pins, from its block `first` on; int64 [ranks, count]."""

    first: int
    tiers: Ids
    pages: Ids
    blocks: Ids


@dataclass(slots=True)
class Lease:
    """queries: the groups requested; none for a commit's lease. tokens: servable from the pins.

    settled: all pinned pages are readable. held: replaced with `hold`, never changed.
    """

    id: int
    session: int
    kind: Wanted
    queries: Sequence[GroupQuery]
    held: list[Held]
    tokens: int
    settled: bool = False
    _pages: dict[int, Ids] = field(default_factory=dict)

    def hold(self, held: list[Held], tokens: int) -> None:
        """Moves the lease to other pages."""
        self.held, self.tokens, self._pages = held, tokens, {}

    def pages_in(self, tier: int) -> Ids:
        """Every pin of the lease in a tier; pages repeat if blocks do."""
        if tier not in self._pages:
            parts = [held.pages[held.tiers == tier] for held in self.held]
            self._pages[tier] = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else no_ids()
        return self._pages[tier]


@dataclass(slots=True)
class Reservation:
    """Pages being written, by index over the whole reservation; a page is -1 if none was given.

    positions, tokens, lengths: uint32 [n]. hash, parent: uint8 [n, 32]; zeros if private.
    staging: with sealed puts, the page that the session writes instead of `pages`; else -1.
    state: OPEN, BUSY or GONE. ahead_bytes: of pages for a put that may come.
    closing: aborted, or its session ended; busy pages stay until finish_commit.
    """

    id: int
    session: int
    domain: int
    namespaces: Lengths
    hash: Bytes
    parent: Bytes
    positions: Lengths
    tokens: Lengths
    lengths: Lengths
    said: Priorities
    tiers: Ids
    pages: Ids
    staging: Ids
    state: Bytes
    closing: bool = False
    ahead_bytes: int = 0

    def rows(self, state: int) -> Ids:
        """Indices in that state."""
        return true_rows(self.state == state)

    def place(self, rows: Ids) -> Ids | slice:
        """Distinct rows; if all, and ascending, as a slice: numpy is three times as fast."""
        return slice(None) if len(rows) == len(self.state) and every(rows[1:] > rows[:-1]) else rows

    @property
    def written(self) -> Ids:
        """The pages that the session writes."""
        return np.where(self.staging >= 0, self.staging, self.pages)

    def pages_in(self, tier: int, rows: Ids) -> Ids:
        """Pages of those rows in a tier, staging pages too."""
        rows = rows[self.tiers[rows] == tier]
        staging = self.staging[rows]
        return np.concatenate((self.pages[rows], staging[staging >= 0]))

    def part(self, rows: slice) -> Reservation:
        """Those rows of an unregistered reservation, as a reservation of their own."""
        return Reservation(
            id=0,
            session=self.session,
            domain=self.domain,
            namespaces=self.namespaces[rows],
            hash=self.hash[rows],
            parent=self.parent[rows],
            positions=self.positions[rows],
            tokens=self.tokens[rows],
            lengths=self.lengths[rows],
            said=Priorities(self.said.codes[rows], self.said.until_s[rows]),
            tiers=self.tiers[rows],
            pages=self.pages[rows],
            staging=self.staging[rows],
            state=self.state[rows],
        )


@dataclass(slots=True)
class Commit:
    """A commit in progress: rows of its reservation, and their names (META)."""

    id: int
    reservation: Reservation
    rows: Ids
    metas: StructArray


@dataclass(slots=True)
class Holder:
    """One session's holdings, per tier. brought: blocks of its last commit, maybe evicted."""

    id: int
    domain: int
    pinned: list[Counter[int]]
    pinned_bytes: list[int]
    reserved_bytes: list[int]
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    brought: Ids = field(default_factory=no_ids)


class Holders:
    """See the module. domains: by open session; others may read it. ahead_bytes: of all pages for
    puts that may come."""

    def __init__(self, tiers: Sequence[Pages], *, share: float, first_id: int = 1) -> None:
        if not 0 < first_id <= ID_LIMIT:
            raise InvalidArgument(f"start.id: {first_id} is outside 1 to {ID_LIMIT}; begin lower")
        self._tiers = tiers
        self.set_share(share)
        self.domains: dict[int, int] = {}
        self.open: dict[int, Holder] = {}
        self.leases: dict[int, Lease] = {}
        self.commits: dict[int, Commit] = {}
        self.ahead_bytes = 0
        self._next = first_id

    def set_share(self, share: float) -> None:
        """Sets the share of each tier that one session may pin and reserve."""
        self.share = share
        self.limits = [int(share * tier.spec.capacity_bytes) for tier in self._tiers]

    def next_id(self) -> int:
        """A new id for a lease, a reservation or a commit; never used twice (see ID_LIMIT)."""
        self._next += 1
        return self._next - 1

    def begin(self, session: int, domain: int) -> None:
        """A session opens."""
        none = [0] * len(self._tiers)
        self.open[session] = Holder(session, domain, [Counter() for _ in none], list(none), list(none))
        self.domains[session] = domain

    def get(self, session: int) -> Holder:
        """Raises NotFound."""
        found = self.open.get(session)
        if found is None:
            raise NotFound(f"session {session}: not open here; open a session again")
        return found

    def reservation(self, session: int, number: int) -> Reservation:
        """A reservation of the session. Raises NotFound."""
        held = self.get(session).reservations.get(number)
        if held is None:
            raise NotFound(f"reservation {number}: session {session} does not hold it; reserve again")
        return held

    def end(self, session: int) -> Holder | None:
        """Closes a session; the caller releases its holdings."""
        self.domains.pop(session, None)
        return self.open.pop(session, None)

    def room_for_pins(self, session: Holder, tier: int, pages: Ids) -> Bools:
        """Which of the pages, in order, the session may pin in the tier; pages that it has pinned
        cost nothing."""
        mine = session.pinned[tier]
        _, where = np.unique(pages, return_index=True)
        cost = np.zeros(len(pages), np.int64)
        cost[where] = self._tiers[tier].class_bytes(pages[where])
        if mine:
            cost[np.fromiter((page in mine for page in pages.tolist()), bool, len(pages))] = 0
        return self.room_for_bytes(session, tier, cost)

    def room_for_bytes(self, session: Holder, tier: int, cost: Ids) -> Bools:
        """Which of the costs, added in order, the session's share covers."""
        return np.asarray(np.cumsum(cost) <= self.room_bytes(session, tier), bool)

    def room_bytes(self, session: Holder, tier: int) -> int:
        """Bytes that it may still pin and reserve in the tier."""
        return self.limits[tier] - session.pinned_bytes[tier] - session.reserved_bytes[tier]

    def set_ahead(self, held: Reservation, count: int) -> None:
        """Sets its bytes that are for a put that may come."""
        self.ahead_bytes += count - held.ahead_bytes
        held.ahead_bytes = count

    def pin(self, session: Holder, tier: int, pages: Ids) -> None:
        """Counts pins of the session; pages may repeat."""
        mine, keys = session.pinned[tier], pages.tolist()
        before = len(mine)
        mine.update(keys)
        if len(mine) == before:
            return  # usual for a sequence that is held already
        if len(mine) - before < len(keys):
            pages = np.asarray([page for page, count in Counter(keys).items() if mine[page] == count], np.int64)
        session.pinned_bytes[tier] += int(self._tiers[tier].class_bytes(pages).sum())

    def unpin(self, session: Holder, tier: int, pages: Ids) -> None:
        """Subtracts pins; call before the pages are freed. Pages may repeat."""
        mine, (pages, counts) = session.pinned[tier], tally(pages)
        keys, off = pages.tolist(), counts.tolist()
        had = list(map(mine.pop, keys))
        if had != off:
            left = {key: before - less for key, before, less in zip(keys, had, off, strict=True) if before > less}
            dict.update(mine, left)
            pages = np.asarray([key for key in keys if key not in left], np.int64)
        session.pinned_bytes[tier] -= int(self._tiers[tier].class_bytes(pages).sum())

    def reserve(self, session: Holder, tier: int, pages: Ids, *, step: int) -> None:
        """Counts reserved pages: step 1 adds, -1 subtracts (before they are freed)."""
        session.reserved_bytes[tier] += step * int(self._tiers[tier].class_bytes(pages).sum())
