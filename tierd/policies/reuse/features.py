"""Groups of a request's parts: features known at the request's arrival, cut into classes.

One number per (kind of part, session's first request or later, pace, turn, how much is new).
`learner.py` remembers sessions; `hazard.py` learns a group's worth. There are at most 512 groups.
Group 0 is worth nothing (partial last blocks). The numbers are part of the saved state.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from tierd.policies.reuse.hazard import Ids

NOTHING = 0
SHARED_LEVELS = 6  # 2, 4, 8 ... 64 sessions or more
_FIRST = 1 + SHARED_LEVELS
_NEW_BLOCKS = (3, 6, 12, 24, 64)  # lower edges of how much is new; a continuation does not tell the last two apart
_TURNS = (3, 4, 7)
_PACE_EDGES = (
    2.5,
    3.0,
    3.5,
    4.0,
    4.5,
    5.0,
    5.5,
    6.0,
    7.0,
    8.0,
)  # log2 of seconds: finer for agents than for people
_PACES = len(_PACE_EDGES) + 1
_SIZES_FIRST, _SIZES_LATER = len(_NEW_BLOCKS) + 1, len(_NEW_BLOCKS)
_LATER = _FIRST + _SIZES_FIRST
_TURN_CLASSES = len(_TURNS) + 1
_PER_PACE = 2 * _SIZES_LATER * _TURN_CLASSES
GROUPS = _LATER + _PACES * _PER_PACE

SHARED: Ids = np.arange(1, 1 + SHARED_LEVELS, dtype=np.int64)


def shared_level(sessions: Ids) -> Ids:
    """floor(log2) - 1, cut to the last level: 0 for two or three. sessions: each at least 2."""
    return np.minimum(np.log2(sessions).astype(np.int64), SHARED_LEVELS) - 1


def first_group(new_blocks: int) -> int:
    """The group of the blocks of a session's first request."""
    return _FIRST + bisect_right(_NEW_BLOCKS, new_blocks)


def later_group(turn: int, pace: float, new_blocks: int, *, old: bool) -> int:
    """The group of blocks of a session's later request: asked for again (old), or new. pace: mean
    log2(1 + seconds) between its requests."""
    step = bisect_right(_PACE_EDGES, pace)
    size = min(bisect_right(_NEW_BLOCKS, new_blocks), _SIZES_LATER - 1)
    turns = bisect_right(_TURNS, turn)
    return _LATER + step * _PER_PACE + ((int(old) * _SIZES_LATER + size) * _TURN_CLASSES) + turns


def _levels() -> tuple[Ids, ...]:
    groups = np.arange(GROUPS, dtype=np.int64)
    later, place = groups >= _LATER, groups - _LATER
    alone = GROUPS + groups  # the other groups share no pace, size and turn
    kind = np.where(groups == NOTHING, 0, np.where(groups < _FIRST, 1, 2))
    pace = np.where(later, place // _PER_PACE, alone)
    size = np.where(later, place % _PER_PACE // _TURN_CLASSES, alone)
    turn = np.where(later, place % _TURN_CLASSES, alone)
    size_and_turn = np.where(later, place % _PER_PACE, alone)
    return (
        kind,
        *(np.unique(nodes, return_inverse=True)[1].astype(np.int64) for nodes in (pace, size, turn, size_and_turn)),
        groups,
    )


LEVELS = _levels()
"""Per level the node of each group: kind, pace, size (new, and old or new), turn, both, all.

The levels need not be nested.
"""
