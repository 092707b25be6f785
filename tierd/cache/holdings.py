"""Which rows of the session table speak of which lease or reservation.

Purpose: what a client holds is recorded before it learns of it, and forgotten after the core has taken it back. Non-purpose: the table
itself (tiers/holds.py), what may be held (core). Invariant: whatever is here, its session's process could still be touching.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tierd.core.model import StructArray
from tierd.core.plan import Bools, Ids
from tierd.errors import Overloaded
from tierd.tiers.holds import FormerHolder, Holder, HoldKind, HoldTable, Rows

HOLDS_LIMIT = 16_384
"""Leases and reservations of one session at one time."""
Key = tuple[int, HoldKind, int]
"""Session, kind, number of the lease or reservation."""


class Holdings:
    """One per daemon."""

    def __init__(self, table: HoldTable) -> None:
        self._table = table
        self._rows: dict[Key, tuple[Ids, Rows]] = {}  # positions in the lease or reservation, and their rows
        self._held: Counter[int] = Counter()  # of them, by session

    def begin(self, holder: Holder) -> None:
        """A process that is about to hold something. Raises Overloaded, InvalidArgument."""
        self._table.add_holder(holder)

    def end(self, session: int) -> None:
        """The session's process is gone."""
        self._table.drop_holder(session)
        self._rows = {key: rows for key, rows in self._rows.items() if key[0] != session}
        del self._held[session]

    def numbers(self, session: int, kind: HoldKind) -> list[int]:
        """Of the session's leases or reservations."""
        return [number for owner, of_kind, number in self._rows if (owner, of_kind) == (session, kind)]

    def keep(self, former: FormerHolder, *, leased: Bools, reserved: Bools) -> None:
        """Of a former daemon's session only these rows stand for something; they go with the session."""
        self._table.erase(former.leased_rows[~leased])
        self._table.erase(former.reserved_rows[~reserved])

    def is_full(self, session: int) -> bool:
        """Whether it holds as much as it may."""
        return self._held[session] >= HOLDS_LIMIT

    def add(self, key: Key, extents: StructArray, *, at: Ids | None = None) -> None:
        """Records EXTENT [n], before handles leave. at: their positions, where not 0 to n - 1. Raises TierFailed, Overloaded."""
        if self.is_full(key[0]):
            raise Overloaded(f"session: it holds {HOLDS_LIMIT} leases and reservations, the most; release some of them")
        where = np.arange(len(extents)) if at is None else at
        self._rows[key] = (where, self._table.append(key[0], extents, kind=key[1]))
        self._held[key[0]] += 1

    def drop(self, key: Key, *, only: Ids | None = None) -> None:
        """Forgets all of it, or these positions. What is not there is no fault."""
        where, rows = self._rows.pop(key, (None, None))
        if where is None or rows is None:
            return
        self._held[key[0]] -= 1
        gone = np.ones(len(where), dtype=np.bool_) if only is None else np.isin(where, only)
        self._table.erase(rows[gone])
        if not gone.all():
            self._held[key[0]] += 1
            self._rows[key] = (where[~gone], rows[~gone])

    def __contains__(self, key: Key) -> bool:
        return key in self._rows
