"""Learns from requests alone, as they come, what blocks are worth.

It gives, per group of blocks and age, the best expected uses per second kept (`worth`), and the
chance of another use. It does not know blocks (the caller knows who asked for which), tiers or
sizes, and does not depend on evictions. Memory is bounded (REQUESTS rows, GROUPS x AGES counts).
There is no randomness and no clock: equal calls give equal answers. Only `refit` and `restore`
change `worth`, and only facts known at a request's arrival are used.

A request splits its whole blocks into parts. Several sessions asked for `shared` ones, a part per
level of how many. Its own session asked for `old` ones before; the others are `new`. A part has a
group (`features.py`) and a moment. When a later request of any session asks for at least half of
the part, the time between is an event of that group. Until then the part counts as seen at each age
it reaches. Counts fade with each request. `hazard.py` makes hazards of them, starting from
`prior.txt`, which was learnt on the developers' traces.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.policies.reuse import features
from tierd.policies.reuse.hazard import (
    AGES,
    EDGES_S,
    ONLINE,
    Counts,
    Floats,
    Ids,
    Logs,
    Trust,
    age_of,
    blend,
    chances,
    hazards,
    tallied,
    worth,
)
from tierd.policies.reuse.prior import prior_hazards

ROWS = 1 << 27  # Request numbers restart after so many.
REQUESTS = 65_536  # Remembered; a session that pauses for more requests begins anew.
REFIT_EVERY = 128  # Requests at least between calls of `refit`.
HALF_LIFE = 20_000.0  # Requests after which a count weighs half.
KINDS = 2 + features.SHARED_LEVELS  # Parts of a request: new, old, then shared by level
NEW, OLD, SHARED = 0, 1, 2

_LAST_PAUSE = 0.6  # its least share in a session's pace
_EDGES_S = EDGES_S.tolist()
_KIND_OF = np.append([NEW, NEW], SHARED + features.shared_level(np.arange(2, 2 << features.SHARED_LEVELS)))
"""Of a block that so many sessions asked for; the session's own may be OLD. Clipped to the last."""
_CLOSED = AGES + 1  # a part's next age to count, when it is not waiting (used again, given up, or never was)


@dataclass(frozen=True)
class Request:
    """A request at its arrival. A partial last block is in group 0 and in no part.

    blocks: the number of whole ones. sessions, parts: int64 [known], of the leading blocks that the
    caller remembers. These are how many sessions asked so far (at least 1), and the block's last
    part (`Groups.parts`, -1: none).
    """

    blocks: int
    sessions: Ids
    parts: Ids


@dataclass(frozen=True)
class Groups:
    """A request's blocks now: groups, parts int64 [blocks]; blocks[start:] got one more session."""

    start: int
    groups: Ids
    parts: Ids


@dataclass
class _Rows:
    """The remembered requests, by row number modulo their count; `state` saves them. The
    session did not grow `stuck` times in a row; size: blocks by part."""

    number: Ids
    at_s: Floats
    pace: Floats
    turn: Ids
    start: Ids
    blocks: Ids
    stuck: Ids
    group: NDArray[np.int16]
    waiting: NDArray[np.int8]
    size: NDArray[np.int32]

    @classmethod
    def empty(cls, count: int) -> _Rows:
        """None remembered."""
        none, zeros = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        parts = (
            np.zeros((count, KINDS), np.int16),
            np.full((count, KINDS), _CLOSED, np.int8),
            np.zeros((count, KINDS), np.int32),
        )
        return cls(none, np.zeros(count), np.zeros(count), zeros.copy(), zeros.copy(), zeros.copy(), zeros, *parts)


class Learner:
    """The worth of groups of blocks. Bounded memory; fades."""

    def __init__(
        self,
        experts: Floats | None = None,
        *,
        trust: Trust = ONLINE,
        half_life: float = HALF_LIFE,
        requests: int = REQUESTS,
    ) -> None:
        """experts: float64 [experts, groups, ages], hazards in (0, 1); None: those of `prior.txt`.
        half_life: requests after which a count weighs half. requests: how many are remembered."""
        self._experts = Logs.of(prior_hazards() if experts is None else experts)
        self._trust, self._half_life = trust, half_life
        self._used = np.zeros((features.GROUPS, AGES))
        self._seen = np.zeros((features.GROUPS, AGES))
        self._rows, self._requests = _Rows.empty(requests), requests
        self._observed = 0
        self._faded = 0
        self._fit()

    def observe(self, request: Request, now: float) -> Groups:
        """A request has come: its known parts count as used. Returns its blocks' groups. now:
        seconds that go on over restarts."""
        before = self._continued(request)
        row, self._observed = self._observed % ROWS, self._observed + 1
        self._close_used(request.parts, now)
        at = row % self._requests
        self._remember(at, before, request, now)
        self._rows.number[at] = row
        kinds, start = self._kinds(at, request)
        self._rows.group[at] = self._groups_of(at, request)
        self._rows.waiting[at, kinds] = 0
        self._rows.size[at] = np.bincount(kinds, minlength=KINDS)
        return Groups(start, self._rows.group[at].take(kinds).astype(np.int64), row * KINDS + kinds)

    def refit(self, now: float) -> None:
        """Recomputes `worth` from the counts; to be called after REFIT_EVERY requests, or more."""
        self._advance(now)
        fade = 0.5 ** ((self._observed - self._faded) / self._half_life)
        self._faded = self._observed
        self._used *= fade
        self._seen *= fade
        self._fit()

    def chance(self, groups: Ids, ages_s: Floats) -> Floats:
        """Probability, float64 [n], of any further use, given none until that age."""
        return self._chance[groups, np.minimum(age_of(ages_s), AGES - 1)]

    def counts(self) -> Counts:
        """The counts up to the last `refit`, faded; not a copy."""
        return Counts(self._used, self._seen)

    def _fit(self) -> None:
        counts = self.counts()
        prior = blend(counts, self._experts, features.LEVELS[1])
        hazard = hazards(counts, prior, features.LEVELS, self._trust)
        hazard[features.NOTHING] = 0.0
        self.worth = worth(hazard)
        self._chance = chances(hazard)

    def _slot(self, row: int) -> int:
        """The slot in which the row is remembered, or -1."""
        at = row % self._requests
        return at if row >= 0 and self._rows.number[at] == row else -1

    def _continued(self, request: Request) -> int:
        """The slot of the request that this one continues, or -1.

        It is the last that asked for the deepest known block, if only one session asked for that
        block. Also, over half of that request's blocks must come again, or all that it had itself
        asked for before. (In the second case an answer or found documents were replaced, so its
        additions are gone.) A prefix that comes again and again without growing belongs to an
        application, not to a session.
        """
        known = len(request.parts)
        if not known or request.sessions[-1] > 1:
            return -1
        at, rows = self._slot(int(request.parts[-1]) // KINDS), self._rows
        if at < 0:
            return -1
        grown = 2 * known > rows.blocks[at] or known >= rows.start[at] > 0
        return at if grown and self._stuck(at, known) <= 2 else -1

    def _stuck(self, before: int, known: int) -> int:
        rows = self._rows
        return int(rows.stuck[before]) + 1 if known <= rows.start[before] and known < rows.blocks[before] else 0

    def _close_used(self, parts: Ids, now: float) -> None:
        """A part is used again when any session asks for at least half of its blocks."""
        if not len(parts):
            return
        ends, begin = [*(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), len(parts)], 0
        for end in ends:
            row, kind = divmod(int(parts[begin]), KINDS)
            at = self._slot(row)
            if at >= 0 and 2 * (end - begin) >= int(self._rows.size[at, kind]):
                self._close(at, kind, now)
            begin = end

    def _close(self, at: int, kind: int, now: float) -> None:
        """Counts the ages since the last refit and the use; once."""
        counted = int(self._rows.waiting[at, kind])
        age = bisect_right(_EDGES_S, now - float(self._rows.at_s[at])) - 1
        self._rows.waiting[at, kind] = _CLOSED
        if counted >= AGES or age < 0:
            return
        group = int(self._rows.group[at, kind])
        self._seen[group, counted : age + 1] += 1
        if age < AGES:
            self._used[group, age] += 1

    def _remember(self, at: int, before: int, request: Request, now: float) -> None:
        rows = self._rows
        turn, pace, start, stuck = 1, 0.0, 0, 0
        if before >= 0:
            pauses = int(rows.turn[before])
            turn, start, stuck = pauses + 1, len(request.parts), self._stuck(before, len(request.parts))
            pause = math.log2(1.0 + max(now - float(rows.at_s[before]), 0.0))
            pace = float(rows.pace[before])
            pace += (pause - pace) * max(1.0 / pauses, _LAST_PAUSE)
        rows.at_s[at], rows.turn[at], rows.pace[at] = now, turn, pace
        rows.start[at], rows.blocks[at], rows.stuck[at] = start, request.blocks, stuck
        rows.waiting[at] = _CLOSED

    def _kinds(self, at: int, request: Request) -> tuple[Ids, int]:
        """Per block, its part of the request; and where the session's own count begins."""
        start = int(self._rows.start[at])
        asked = np.ones(request.blocks, dtype=np.int64)
        asked[: len(request.sessions)] = request.sessions
        asked[start : len(request.sessions)] += 1
        kinds = _KIND_OF.take(asked, mode="clip")
        own = kinds[:start]
        own[own == NEW] = OLD
        return kinds, start

    def _groups_of(self, at: int, request: Request) -> list[int]:
        """Per kind of part."""
        turn, pace, added = int(self._rows.turn[at]), float(self._rows.pace[at]), request.blocks - len(request.parts)
        if turn == 1:
            return [features.first_group(added)] * 2 + list(features.SHARED)
        private = [features.later_group(turn, pace, added, old=old) for old in (False, True)]
        return private + list(features.SHARED)

    def _advance(self, now: float) -> None:
        """Counts waiting parts as seen at the ages reached since; a backward clock counts none."""
        rows, filled = self._rows, min(self._observed, self._requests)
        ages = np.clip(age_of(now - rows.at_s[:filled]), 0, AGES)
        at, kind = np.nonzero(rows.waiting[:filled] < ages.astype(np.int8)[:, None])
        group, counted = rows.group[at, kind].astype(np.int64), rows.waiting[at, kind].astype(np.int64)
        shape = (features.GROUPS, AGES + 1)
        passing = tallied(group, counted, shape) - tallied(group, ages[at], shape)
        self._seen += np.cumsum(passing, axis=1)[:, :AGES]
        rows.waiting[at, kind] = ages[at]

    def state(self) -> dict[str, NDArray[np.generic]]:
        """All that was learnt and is remembered, as copies."""
        rows = {name: column.copy() for name, column in vars(self._rows).items()}
        return {
            "used": self._used.copy(),
            "seen": self._seen.copy(),
            "next": np.array([self._observed, self._faded]),
            **rows,
        }

    def restore(self, state: dict[str, NDArray[np.generic]]) -> None:
        """Goes on from a `state`. Raises ValueError if its groups, ages or kinds differ."""
        fresh = self.state()
        odd = [name for name, column in fresh.items() if name not in state or state[name].shape != column.shape]
        if odd:
            raise ValueError(
                f"the saved reuse index lacks {', '.join(odd)} in this version's shape; delete it to start again"
            )
        self._used, self._seen = state["used"].astype(np.float64), state["seen"].astype(np.float64)
        self._observed, self._faded = (int(number) for number in state["next"])
        self._rows = _Rows(**{name: state[name].astype(column.dtype) for name, column in vars(self._rows).items()})
        self._fit()
