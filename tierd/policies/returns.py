"""When a session comes back, learnt from its like, and whether a prefetch for that moment pays.

`Returns` keeps a life table (Kaplan and Meier 1958) of the pauses of one kind of session. It counts
how many were still away at each age, and how many came back before the next age. Pauses that nobody
saw end count as away up to the age reached. The table gives the moment to bring a session's blocks
back, and the chance that they are used within the horizon.

`Guard` compares the bytes that predictions wasted with those used. It closes while more than half
of the last ones were wasted. Then it lets one in RETRY pass.

Pure: time is an argument, nothing is random.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

AGES_S = (0.0, 1.0, 2.0, 3.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1800.0)
"""Steps of the life table, seconds; sessions away for longer are given up."""
LEAST_SEEN = 20
"""Pauses that must have reached an age before anything is predicted from it."""
LEAST_CHANCE = 0.6
"""A prefetch starts only if its blocks are used within the horizon with this chance. Half would waste
half; the rest is for the error of the estimate."""
NEARLY = 0.9
"""Share of the best moment's sessions that a later moment may serve: the later, the less memory."""
HALVE_AT = 4096
"""Pauses after which all counts are halved, so that the table follows the traffic."""
WINDOW = 32
"""Predictions that a guard remembers."""
RETRY = 64
"""While it is closed, a guard lets one in so many pass."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """after_s: from the begin of the pause until the blocks are brought. horizon_s: time for a use.
    chance: of a use, if the session is still away then."""

    after_s: float
    horizon_s: float
    chance: float


@dataclass(slots=True)
class Returns:
    """The pauses of one kind of session. See the module."""

    away: list[float] = field(default_factory=lambda: [0.0] * len(AGES_S))
    """By step: pauses that reached its begin."""
    back: list[float] = field(default_factory=lambda: [0.0] * len(AGES_S))
    """By step: pauses that ended in it."""

    def ended(self, pause_s: float) -> None:
        """A session came back after so long."""
        self._count(pause_s, is_back=True)

    def given_up(self, away_s: float) -> None:
        """Nobody watches a session any more, which has been away for so long."""
        self._count(away_s, is_back=False)

    def chance(self, after_s: float, within_s: float) -> float:
        """That a session which is still away at `after_s` is back within `within_s` more. Steps that
        are reached in part count in part. 0.0 where too few pauses were seen."""
        return 1.0 - self._stays(after_s, after_s + within_s)

    def predict(self, horizon_s: float) -> Prediction | None:
        """The latest moment that serves NEARLY as many sessions as the best one. At each the blocks
        are used within the horizon with LEAST_CHANCE. None: there is no such moment."""
        found = [Prediction(after_s, horizon_s, self.chance(after_s, horizon_s)) for after_s in AGES_S]
        served = {p: self._stays(0.0, p.after_s) * p.chance for p in found if p.chance >= LEAST_CHANCE}
        most = max(served.values(), default=0.0)
        return max((p for p in served if served[p] >= NEARLY * most), key=lambda p: p.after_s, default=None)

    def _stays(self, begin_s: float, end_s: float) -> float:
        """Chance of staying away until `end_s`, for a session that is away at `begin_s`."""
        stays = 1.0
        for step, start in enumerate(AGES_S[:-1]):
            stop = AGES_S[step + 1]
            share = (min(stop, end_s) - max(start, begin_s)) / (stop - start)
            if share > 0 and self.away[step] >= LEAST_SEEN:
                stays *= (1.0 - min(1.0, self.back[step] / self.away[step])) ** share
        return stays

    def _count(self, age_s: float, *, is_back: bool) -> None:
        last = min(bisect_right(AGES_S, max(0.0, age_s)), len(AGES_S)) - 1
        for step in range(last + 1):
            self.away[step] += 1.0
        self.back[last] += is_back and last < len(AGES_S) - 1
        if self.away[0] >= HALVE_AT:
            self.away, self.back = ([each / 2 for each in those] for those in (self.away, self.back))


@dataclass(slots=True)
class Guard:
    """Whether predictions may be carried out. See the module."""

    _last: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _refused: int = 0
    _untold: int = 0

    @property
    def is_open(self) -> bool:
        """Whether at most half of the bytes of the last predictions were wasted."""
        used, wasted = (sum(each) for each in zip(*self._last, strict=True)) if self._last else (0, 0)
        return wasted <= used

    def allows(self) -> bool:
        """Whether this prediction may be carried out; `told` MUST follow. No more than WINDOW are
        untold at a time, so a guard that is wrong learns of it before it goes on."""
        if self._untold >= WINDOW:
            return False
        if not self.is_open:
            self._refused += 1
            if self._refused % RETRY:
                return False
        self._untold += 1
        return True

    def told(self, *, used: int, wasted: int) -> None:
        """The bytes of an allowed prediction were used or wasted; 0 and 0 if it brought nothing."""
        self._untold -= 1
        if used or wasted:
            self._last.append((used, wasted))
