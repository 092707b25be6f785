"""From counts of events to the worth of a group of blocks at each age.

The hazard of the next use by group and age, shrunk towards the parent group, and its Gittins index.
`features.py` defines groups; `learner.py` counts events. All functions are pure; hazards lie in [0,
CERTAIN]. Arrays are [groups, ages] unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

# Steps of 3 s at first (an agent's loop), then a fifth more each, to two hours.
EDGES_S: Floats = np.append(np.arange(0.0, 18.0, 3.0), 18.0 * 1.2 ** np.arange(34))
AGES = len(EDGES_S) - 1
_WIDTHS_S: Floats = np.diff(EDGES_S)
CERTAIN = 0.9  # a few surprises could not correct a higher hazard

_NEAR = 2.0  # ages, as the deviation of a bell: events at one age count for ages near it
_CAUTION = 4.0
_ELSEWHERE = 0.1
_steps = np.arange(AGES, dtype=np.int64)
_BELL: Floats = np.exp(-0.5 * ((_steps[:, None] - _steps[None, :]) / _NEAR) ** 2)


@dataclass(frozen=True)
class Counts:
    """Over groups and ages: parts used again at that age, and parts that reached it in view."""

    used: Floats
    seen: Floats


def age_of(idle_s: Floats) -> Ids:
    """The age bucket of so many seconds; beyond the last edge it is `AGES`."""
    return np.searchsorted(EDGES_S, idle_s, side="right").astype(np.int64) - 1


@dataclass(frozen=True)
class Trust:
    """Trust in the level above, in events: in how often overall, and in when."""

    overall: float
    by_age: float


ONLINE = Trust(32.0, 64.0)
"""For experts learnt elsewhere; cross-validated between halves of the developers' traces."""
AFRESH = Trust(8.0, 16.0)
"""If nothing was learnt before."""


def hazards(counts: Counts, prior: Floats, levels: Sequence[Ids], trust: Trust = ONLINE) -> Floats:
    """The chance that a part that reached an age is used in it, corrected by level from `prior`.

    levels: per level the node of each group. At each level the counts are compared with the
    expectation of the level before: first the sum, then by age. A gamma prior of some events around
    1 keeps rare groups near common ones (empirical Bayes).
    """
    hazard = prior
    for nodes in levels:
        used, expected = _by_node(counts.used, nodes), _by_node(counts.seen * hazard, nodes)
        overall = (used.sum(1, keepdims=True) + trust.overall) / (expected.sum(1, keepdims=True) + trust.overall)
        by_age = (used @ _BELL + trust.by_age) / (expected * overall @ _BELL + trust.by_age)
        hazard = np.minimum(hazard * (overall * by_age)[nodes], CERTAIN)
    return hazard


class Logs(NamedTuple):
    """Logarithms of hazards and of 1 - hazards, float64 [experts, groups, ages] each. They are kept
    since computing them is most of the work of a `blend`."""

    used: Floats
    spared: Floats

    @classmethod
    def of(cls, experts: Floats) -> Logs:
        """experts: hazards, float64 [experts, groups, ages]."""
        return cls(np.log(experts), np.log1p(-experts))


def blend(counts: Counts, experts: Logs, nodes: Ids) -> Floats:
    """One prior of several, by how well each expert predicted a node's counts, and all counts.

    It is the mean of logarithms, weighted by the likelihood of the counts (Bayesian model
    averaging). The likelihood is taken to the power 1 / _CAUTION, since a session's parts are
    dependent.
    """
    spared = counts.seen - counts.used
    each = np.sum(counts.used * experts.used + spared * experts.spared, axis=2)  # [experts, groups]
    scores = np.stack([np.bincount(nodes, one) for one in each]) + _ELSEWHERE * each.sum(axis=1, keepdims=True)
    weights = np.exp((scores - scores.max(axis=0)) / _CAUTION)
    weights /= weights.sum(axis=0)
    return np.asarray(np.exp(np.sum(weights[:, nodes, None] * experts.used, axis=0)), np.float64)


def _by_node(values: Floats, nodes: Ids) -> Floats:
    cells, count = _cells(nodes.tobytes())
    return np.bincount(cells, values.ravel(), count * AGES).astype(np.float64, copy=False).reshape(count, AGES)


@cache
def _cells(raw: bytes) -> tuple[Ids, int]:
    """For nodes int64 [groups], few per version: the cells of groups' ages, and the node count."""
    nodes = np.frombuffer(raw, np.int64)
    return np.repeat(nodes * AGES, AGES) + np.tile(_steps, len(nodes)), int(nodes.max()) + 1


def tallied(rows: Ids, columns: Ids, shape: tuple[int, int], weights: Floats | None = None) -> Floats:
    """Sums of weights (1 each if None) by row and column."""
    sums = np.bincount(rows * shape[1] + columns, weights, shape[0] * shape[1])
    return sums.astype(np.float64).reshape(shape)


def worth(hazard: Floats) -> NDArray[np.float32]:
    """Expected uses per second kept, at the best moment to give up, from the beginning of each age.

    The Gittins index (Gittins 1979) of a job that is served by keeping it. It is the sup over the
    horizon of P(used by then) / E(time kept until then). For hazards that rise and fall: Aalto,
    Ayesta, Righter 2009, "On the Gittins index in the M/G/1 queue". With the horizon at an object's
    whole life it is the hit density of Beckmann and Sanchez, "LHD", NSDI 2018.
    """
    used = np.ascontiguousarray(hazard.T)  # [ages, groups]: all horizons from an age on are contiguous
    gain, cost, ratio, best = (np.zeros_like(used) for _ in range(4))
    for age in reversed(range(AGES)):
        spared = 1 - used[age]
        gain[age:] *= spared
        gain[age:] += used[age]
        cost[age:] *= spared
        cost[age:] += (1 - used[age] / 2) * _WIDTHS_S[age]
        best[age] = np.divide(gain[age:], cost[age:], out=ratio[age:]).max(axis=0)
    return np.ascontiguousarray(best.T, dtype=np.float32)


def chances(hazard: Floats) -> Floats:
    """The chance of any use from the beginning of each age on."""
    return np.asarray(1 - np.cumprod((1 - hazard)[:, ::-1], axis=1)[:, ::-1], dtype=np.float64)
