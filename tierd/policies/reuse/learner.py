"""What blocks are worth, learnt from requests alone while they come.

Purpose: per group of blocks and age, the best expected uses per second kept (`worth`), and the chance of another use at all.
Non-purpose: blocks (the caller knows who asked for which), tiers, sizes: learning depends on none of them, nor on what was evicted.
Invariants: bounded memory (REQUESTS rows, GROUPS x AGES counts); nothing random, no clock: equal calls give equal answers;
`worth` changes in `refit` and `restore` alone; only what is known when a request comes is used.

How it learns. A request splits its whole blocks into parts: those that several sessions asked for, by how many (`shared`), those that its own
session asked for before (`old`), and `new` ones. A part has a group (`features.py`) and a moment. When a later request, whichever session it is
of, asks for at least half of it again, the time between is an event of that group; until then the part counts as seen at the ages that it went
through. Counts fade with the requests that come. `hazard.py` makes hazards of them, starting from `prior.txt`, learnt on the developers' traces.
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

ROWS = 1 << 27  # a request's number begins anew after so many
REQUESTS = 65_536  # remembered; a session that pauses for longer than that many requests begins anew
REFIT_EVERY = 128  # requests at least; what `refit` wants to be called after
HALF_LIFE = 20_000.0  # requests after which a count weighs half
KINDS = 2 + features.SHARED_LEVELS  # parts of a request: new, old, then shared by level
NEW, OLD, SHARED = 0, 1, 2

_LAST_PAUSE = 0.6  # its least share in a session's pace
_EDGES_S = EDGES_S.tolist()
_KIND_OF = np.append([NEW, NEW], SHARED + features.shared_level(np.arange(2, 2 << features.SHARED_LEVELS)))
"""Of a block that so many sessions have asked for; one's own may be OLD. More than there are is the last."""
_CLOSED = AGES + 1  # a part's next age to count, when it is not waiting (used again, given up, or never was)


@dataclass(frozen=True)
class Request:
    """What the caller knows of a request when it comes. Blocks are whole ones: a partial last block is in group 0 and no part of anything.

    blocks: how many. sessions, parts: int64 [known], of the leading blocks that the caller remembers: how many sessions asked for it so far
    (at least 1), and the part that it was last in (`Groups.parts`), -1 if none.
    """

    blocks: int
    sessions: Ids
    parts: Ids


@dataclass(frozen=True)
class Groups:
    """Where each block of a request is from now on: groups, parts are int64 [blocks]; one session more has asked for blocks[start:]."""

    start: int
    groups: Ids
    parts: Ids


@dataclass
class _Rows:
    """The remembered requests, by row number modulo their count; what `state` saves. stuck: times in a row that the session did not grow; size: blocks by part."""

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
    """What groups of blocks are worth. Bounded memory; fades."""

    def __init__(
        self,
        experts: Floats | None = None,
        *,
        trust: Trust = ONLINE,
        half_life: float = HALF_LIFE,
        requests: int = REQUESTS,
    ) -> None:
        """experts: float64 [experts, groups, ages], hazards in (0, 1) to start from; None: what was learnt on the developers' traces.

        half_life: requests after which a count weighs half. requests: how many are remembered.
        """
        self._experts = Logs.of(prior_hazards() if experts is None else experts)
        self._trust, self._half_life = trust, half_life
        self._used = np.zeros((features.GROUPS, AGES))
        self._seen = np.zeros((features.GROUPS, AGES))
        self._rows, self._requests = _Rows.empty(requests), requests
        self._heard = 0
        self._faded = 0
        self._fit()

    def hear(self, request: Request, now: float) -> Groups:
        """A request has come: its known parts were used again; what its blocks are now. now: seconds that go on over restarts."""
        before = self._continued(request)
        row, self._heard = self._heard % ROWS, self._heard + 1
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
        """Makes `worth` of what was heard; to be called after REFIT_EVERY requests, or more."""
        self._advance(now)
        fade = 0.5 ** ((self._heard - self._faded) / self._half_life)
        self._faded = self._heard
        self._used *= fade
        self._seen *= fade
        self._fit()

    def chance(self, groups: Ids, ages_s: Floats) -> Floats:
        """Probability of another use at all, given that there was none until that age. int64 [n], float64 [n] -> float64 [n]."""
        return self._chance[groups, np.minimum(age_of(ages_s), AGES - 1)]

    def counts(self) -> Counts:
        """What was seen up to the last `refit`, faded; not a copy."""
        return Counts(self._used, self._seen)

    def _fit(self) -> None:
        counts = self.counts()
        prior = blend(counts, self._experts, features.LEVELS[1])
        hazard = hazards(counts, prior, features.LEVELS, self._trust)
        hazard[features.NOTHING] = 0.0
        self.worth = worth(hazard)
        self._chance = chances(hazard)

    def _slot(self, row: int) -> int:
        """Where the row is remembered, or -1."""
        at = row % self._requests
        return at if row >= 0 and self._rows.number[at] == row else -1

    def _continued(self, request: Request) -> int:
        """The slot of the request that this one continues, or -1.

        It is the last that asked for the deepest known block, if one session alone asked for that block and either over half of that request's
        blocks come again, or all that it had itself asked for before (an answer or found documents were replaced: what it added is gone). A prefix
        that comes again and again without growing belongs to an application, not to a session.
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
        """A part is used again when at least half of its blocks are, whoever asks."""
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
        """Per block, which part of the request it is in; and where the session's own count begins."""
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
        """Waiting parts are seen at the ages that they have gone through since. Few have come to another age; of a clock that went back none."""
        rows, heard = self._rows, min(self._heard, self._requests)
        ages = np.clip(age_of(now - rows.at_s[:heard]), 0, AGES)
        at, kind = np.nonzero(rows.waiting[:heard] < ages.astype(np.int8)[:, None])
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
            "next": np.array([self._heard, self._faded]),
            **rows,
        }

    def restore(self, state: dict[str, NDArray[np.generic]]) -> None:
        """Goes on from a `state`. Raises ValueError if it is of other groups, ages or kinds: begin anew then."""
        fresh = self.state()
        odd = [name for name, column in fresh.items() if name not in state or state[name].shape != column.shape]
        if odd:
            raise ValueError(
                f"the saved state of the reuse index lacks {', '.join(odd)} in the shape of this version; delete it to learn anew"
            )
        self._used, self._seen = state["used"].astype(np.float64), state["seen"].astype(np.float64)
        self._heard, self._faded = (int(number) for number in state["next"])
        self._rows = _Rows(**{name: state[name].astype(column.dtype) for name, column in vars(self._rows).items()})
        self._fit()
