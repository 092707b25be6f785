"""The record of decisions: what each request got, and why tiers lost blocks.

Two rings of rows of a fixed size: the newest row replaces the oldest, so the memory has a limit. A
request costs one packed row, lost blocks one bulk copy. The search at the time of a question is a
scan of columns: 1 ms for 100,000 rows. Rows contain hashes and no tokens. server/operators/
explaining.py reads the record; the cache writes it.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np

from tierd.core.arrays.sets import true_rows
from tierd.core.formats.meta import picked
from tierd.core.formats.model import FREED, HASH_BYTES, Reason, StructArray
from tierd.core.plan import NONE_FREED, Acquisition, GroupQuery, Ids, LookupResult, Served
from tierd.decisions.causes import LOSSES

POLICIES = 100
"""Latest changes of eviction policies that are kept."""
REQUEST_BYTES = 64
"""Bytes of an engine's request id that are kept."""
NO_HASH = bytes(HASH_BYTES)

LOSS = np.dtype(
    [
        ("time", "<f8"),
        ("session", "<u8"),  # Whose request needed the room; 0: none's. With `need` and `wanted` of evictions.
        ("need", "u1"),  # Reason of the transfer that got the room; NONE: a put, or no one.
        ("wanted", "u1", (HASH_BYTES,)),  # The first block that got the room; zeros: unknown.
        ("freed", FREED),
    ]
)
"""A tier lost a block."""
_CAUSE = struct.Struct(f"<dQB{HASH_BYTES}s")
"""LOSS without the block."""


class Kind(enum.IntEnum):
    """The subject of a row of requests."""

    LOOKUP = 0
    GET = 1
    COMPUTED = 2
    """The engine decided to compute tokens that it had found."""


class Miss(enum.IntEnum):
    """Why a request got less than it asked for, as far as known at once."""

    NONE = 0
    ABSENT = 1
    NO_ROOM = 2
    BUSY = 3
    FAILED = 4
    SLOWER = 5


def request_dtype(tiers: int) -> np.dtype[np.void]:
    """The row of a request of a daemon with so many tiers."""
    return np.dtype(
        [
            ("time", "<f8"),
            ("waited_s", "<f8"),  # For transfers; of COMPUTED the expected time to load.
            ("compute_s", "<f8"),  # Of COMPUTED: the expected time to compute.
            ("error_limit", "<f4"),
            ("session", "<u8"),
            ("namespace", "<u4"),  # Of the first group's first rank; 0: unknown.
            ("times", "<u4"),
            ("kind", "u1"),
            ("miss", "u1"),
            ("asked", "<u8"),  # Tokens.
            ("served", "<u8"),
            ("request", f"S{REQUEST_BYTES}"),
            ("missing", "u1", (HASH_BYTES,)),  # The first block that was not served; zeros: none.
            ("tiers", "<u8", (tiers,)),  # Tokens served, by tier.
        ]
    )


Answer = tuple[Kind, Miss, int, Sequence[int], float, int]
"""Kind, miss, tokens served, tokens by tier, seconds waited, times."""


class Ring:
    """The latest `limit` rows of a dtype."""

    def __init__(self, dtype: np.dtype[np.void], limit: int) -> None:
        self.rows = np.zeros(limit, dtype)
        self._raw = self.rows.view(np.uint8).reshape(limit, dtype.itemsize)
        self.written = 0

    @property
    def held(self) -> StructArray:
        """The rows, in no order; a view."""
        return self.rows[: min(self.written, len(self.rows))]

    @property
    def is_whole(self) -> bool:
        """Whether no row has been replaced yet."""
        return self.written <= len(self.rows)

    def next(self) -> int:
        """The place of a new row."""
        at = self.written % len(self.rows)
        self.written += 1
        return at

    def extend(self, first: bytes, records: StructArray) -> None:
        """Adds rows that begin with the same bytes, each followed by a record; of more than fit the
        last."""
        kept = records[-len(self.rows) :]
        raw, size = np.ascontiguousarray(kept).view(np.uint8).reshape(len(kept), -1), len(first)
        at = (self.written + len(records) - len(kept)) % len(self.rows)
        until = min(len(kept), len(self.rows) - at)
        for place, part in ((at, raw[:until]), (0, raw[until:])):
            rows = self._raw[place : place + len(part)]
            rows[:, :size], rows[:, size:] = np.frombuffer(first, np.uint8), part
        self.written += len(records)

    def newest_first(self, rows: Ids) -> Ids:
        """These places, the newest row first."""
        age = (self.written - 1 - rows) % len(self.rows)
        return rows[np.argsort(age, kind="stable")]


class Decisions:
    """The record of one daemon. limit: rows of each ring; 0: nothing is recorded.

    tiers: their number. now: the cache's clock. former: namespaces of which an earlier run may have
    held blocks.
    """

    def __init__(self, limit: int, *, tiers: int, now: Callable[[], float], former: Collection[int] = ()) -> None:
        self.requests, self.losses = Ring(request_dtype(tiers), limit), Ring(LOSS, limit)
        self.former, self._now, self._limit = frozenset(former), now, limit
        self._started = now()
        self._policies = deque[tuple[float, int, str]](maxlen=POLICIES)
        self._row = struct.Struct(f"<3dfQ2I2B2Q{REQUEST_BYTES}s{HASH_BYTES}s{tiers}Q")
        assert self._row.size == self.requests.rows.itemsize, "the struct is the dtype's"
        assert _CAUSE.size + FREED.itemsize == LOSS.itemsize, "the struct is the dtype's"
        self._place = self.requests.rows.view(np.uint8).data if limit else memoryview(b"")
        self._nothing = (0,) * tiers
        self._is_loss = np.zeros(max(Reason) + 1, bool)
        self._is_loss[list(LOSSES)] = True

    @property
    def nbytes(self) -> int:
        """Memory of all rows."""
        return self.requests.rows.nbytes + self.losses.rows.nbytes

    @property
    def age_s(self) -> float:
        """How far the record goes back: to the oldest row of the ring that has replaced some, else
        to the daemon's start."""
        oldest = [float(ring.rows["time"].min()) for ring in (self.requests, self.losses) if not ring.is_whole]
        return self._now() - max(oldest, default=self._started)

    @property
    def count(self) -> int:
        """Rows held."""
        return len(self.requests.held) + len(self.losses.held)

    # -- requests

    def looked_up(self, session: int, groups: Sequence[GroupQuery], found: LookupResult) -> None:
        """A lookup and its answer."""
        miss = Miss.ABSENT if found.tokens < groups[0].tokens else Miss.NONE
        self._note(session, groups[0], (Kind.LOOKUP, miss, found.tokens, found.tier_tokens, 0.0, 1))

    def used(self, session: int, groups: Sequence[GroupQuery], found: LookupResult | None, *, times: int) -> None:
        """Equal gets without a call, when they are reported. found: None for lookups."""
        kind, tiers = (Kind.LOOKUP, self._nothing) if found is None else (Kind.GET, found.tier_tokens)
        self._note(session, groups[0], (kind, Miss.NONE, groups[0].tokens, tiers, 0.0, times))

    def got(
        self, session: int, groups: Sequence[GroupQuery], got: Acquisition, served: Served, *, waited_s: float
    ) -> None:
        """A get and its answer. waited_s: for transfers."""
        group, miss = groups[0], Miss.NONE
        if served.tokens < got.tokens:
            miss = Miss.FAILED
        elif not got.whole:
            miss = Miss.BUSY if got.shut else Miss.NO_ROOM
        elif served.tokens < group.tokens:
            miss = Miss.ABSENT
        if not (len(got.plan.transfers) or len(got.plan.waits)):
            waited_s = 0.0
        tokens = got.tier_tokens if served.tokens else self._nothing
        self._note(session, group, (Kind.GET, miss, served.tokens, tokens, waited_s, 1))

    def computed(self, session: int, request: bytes, *, tokens: int, times: tuple[float, float]) -> None:
        """An engine computed tokens that a lookup had found. times: expected of loading and of
        computing them, in seconds."""
        if not self._limit:
            return
        row = (0, 1, Kind.COMPUTED, Miss.SLOWER, tokens, 0, request, NO_HASH, *self._nothing)
        self._write(self._now(), *times, 0.0, session, *row)

    def _note(self, session: int, group: GroupQuery, answer: Answer) -> None:
        if not self._limit:
            return
        kind, miss, tokens, tier_tokens, waited_s, times = answer
        namespace, missing = group.namespaces[0], NO_HASH
        if miss and (first := tokens // group.tokens_per_block) < len(group.hashes):
            missing = group.hashes[first].tobytes()
        row = (namespace, times, kind, miss, group.tokens, tokens, group.request, missing, *tier_tokens)
        self._write(self._now(), waited_s, 0.0, group.error_limit, session, *row)

    def _write(self, *row: object) -> None:
        self._row.pack_into(self._place, self.requests.next() * self._row.size, *row)

    # -- lost blocks

    def losses_of(self, freed: StructArray) -> StructArray:
        """Those of pages of blocks, FREED [n], that are recorded when they become free."""
        return picked(freed, true_rows(self._is_loss.take(freed["reason"]))) if self._limit else NONE_FREED

    def lost(self, losses: StructArray, *, session: int, wanted: bytes, need: Reason) -> None:
        """Records `losses_of`. session: whose request needed the room, 0: none's. wanted: the first
        block that got it. need: why it was transferred there."""
        self.losses.extend(_CAUSE.pack(self._now(), session, need, wanted), losses)

    def replaced(self, policy: str, *, tier: int) -> None:
        """A tier has got another eviction policy than this one."""
        self._policies.append((self._now(), tier, policy))

    def policy_at(self, time: float, *, tier: int) -> str:
        """The eviction policy of a tier at this time; empty: that of now."""
        return next((policy for until, its, policy in self._policies if its == tier and time <= until), "")
