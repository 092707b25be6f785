"""Maps leases and reservations to their rows in the session table.

A row is written before the client learns of its handle, and erased after the core has taken it
back. The table itself is in tiers/arena/holds.py; the core decides what may be held. The session's
process may still access every page recorded here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tierd.core.formats.meta import joined
from tierd.core.formats.model import StructArray
from tierd.core.plan import Bools, Ids
from tierd.errors import Overloaded
from tierd.tiers.arena.holds import FormerHolder, Holder, HoldKind, HoldTable, Rows

HOLDS_LIMIT = 16_384
"""Limit of leases and reservations of one session at a time."""
HELD_PAGES_LIMIT = 1 << 22
"""Limit of their pages, counted for each of them. A page takes some 100 bytes of the daemon's
memory. 512 leases of 131,072 tokens have as many."""
STEP_PAGES = 1 << 16
"""Pages returned per step when a session ends: about 5 ms."""
Key = tuple[int, HoldKind, int]
"""Session, kind, number of the lease or reservation."""


class Holdings:
    """One per daemon."""

    def __init__(self, table: HoldTable) -> None:
        self._table = table
        self._rows: dict[Key, tuple[Ids, Rows]] = {}  # positions in the lease or reservation, and their rows
        self._held: Counter[int] = Counter()  # leases and reservations by session
        self._pages: Counter[int] = Counter()  # their pages by session

    def begin(self, holder: Holder) -> None:
        """Records a process before it holds anything. Raises Overloaded, InvalidArgument."""
        self._table.add_holder(holder)

    def end(self, session: int) -> None:
        """Forgets a session whose process is gone."""
        self._table.drop_holder(session)
        self._rows = {key: rows for key, rows in self._rows.items() if key[0] != session}
        del self._held[session], self._pages[session]

    def return_some(
        self,
        session: int,
        give_back: Callable[[int, Sequence[int]], None],
        abort: Callable[[int, int], None],
        *,
        beyond: int = 0,
    ) -> bool:
        """If the session holds more than `beyond` pages, ends leases and reservations of
        STEP_PAGES. True if it still holds more; the caller then runs another step."""
        keys, pages = list[Key](), 0
        for key, (at, _) in self._rows.items() if self._pages[session] > beyond else ():
            if key[0] == session and pages < STEP_PAGES:
                keys.append(key)
                pages += len(at)
        if leases := [number for _, kind, number in keys if kind is HoldKind.LEASE]:
            give_back(session, leases)
        for _, kind, number in keys:
            if kind is HoldKind.RESERVATION:
                abort(session, number)
        return self._pages[session] > beyond

    def keep(self, former: FormerHolder, *, leased: Bools, reserved: Bools) -> None:
        """Erases all rows of an earlier daemon's session but these, which stay until its end."""
        self._table.erase(former.leased_rows[~leased])
        self._table.erase(former.reserved_rows[~reserved])

    def is_full(self, session: int, *, more: int = 1, pages: int = 0) -> bool:
        """Whether so many more, with so many pages, exceed the session's limits. The first one
        always fits, whatever its pages. So a long prompt can always be served."""
        held = self._held[session]
        return held + more > HOLDS_LIMIT or (held > 0 and self._pages[session] + pages > HELD_PAGES_LIMIT)

    def add(self, session: int, kind: HoldKind, pages: Mapping[int, StructArray], *, at: Ids | None = None) -> None:
        """Records EXTENT [n] by lease or reservation before handles are sent: all or none. at:
        their positions, if not 0 to n - 1. Raises TierFailed, Overloaded."""
        count = sum(map(len, pages.values()))
        if self.is_full(session, more=len(pages), pages=count):
            raise Overloaded(
                f"session: it holds {self._held[session]} leases and reservations with {self._pages[session]} pages in"
                f" all; the limits are {HOLDS_LIMIT} and {HELD_PAGES_LIMIT} pages; release some of them"
            )
        rows, end = self._table.append(session, joined(list(pages.values())), kind=kind), 0
        for number, its in pages.items():
            begin, end = end, end + len(its)
            self._rows[session, kind, number] = (np.arange(len(its)) if at is None else at, rows[begin:end])
        self._held[session] += len(pages)
        self._pages[session] += count

    def drop(self, key: Key, *, only: Ids | None = None) -> None:
        """Forgets all of it, or these positions. A missing key is no error."""
        where, rows = self._rows.pop(key, (None, None))
        if where is None or rows is None:
            return
        self._held[key[0]] -= 1
        gone = np.ones(len(where), dtype=np.bool_) if only is None else np.isin(where, only)
        self._table.erase(rows[gone])
        self._pages[key[0]] -= int(np.count_nonzero(gone))
        if not gone.all():
            self._held[key[0]] += 1
            self._rows[key] = (where[~gone], rows[~gone])

    def drop_leases(self, session: int, leases: Sequence[int]) -> None:
        """Forgets these leases. A missing one is no error."""
        found = [self._rows.pop((session, HoldKind.LEASE, lease), None) for lease in dict.fromkeys(leases)]
        rows = [each[1] for each in found if each is not None]
        if rows:
            erased = rows[0] if len(rows) == 1 else np.concatenate(rows)
            self._held[session] -= len(rows)
            self._pages[session] -= len(erased)
            self._table.erase(erased)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows
