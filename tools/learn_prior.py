"""Writes what the reuse index believes before it has heard anything: `python -m tools.learn_prior TRACE...`.

Each trace gives one expert: the learner hears all of it, from nothing and without forgetting. One more knows no trace: what waits is the less
likely used the longer it has waited, which is LRU's order. Which expert is right for the traffic at hand, and where, the learner finds out itself
(`hazard.blend`). Made again whenever groups or ages change.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tierd.cli.trace import read_trace
from tierd.policies.reuse import features
from tierd.policies.reuse.hazard import AFRESH, EDGES_S, Floats, hazards
from tierd.policies.reuse.learner import REFIT_EVERY, Learner, Request
from tierd.policies.reuse.prior import TABLE, encode
from tierd.simulator import sequences


def know_nothing() -> Floats:
    """One expert who expects a use in a quarter of an hour, and of what has waited longer the less often the longer it has."""
    rate = np.minimum(1 / 1000, 0.5 / np.maximum(EDGES_S[:-1], 1.0))
    return np.tile(np.diff(EDGES_S) * rate, (1, features.GROUPS, 1))


def recency() -> Floats:
    """One expert, [groups, ages], for traffic unlike all traces: a rate that falls as one over the wait, the same for all groups."""
    middle_s = (EDGES_S[:-1] + EDGES_S[1:]) / 2
    return np.tile(np.diff(EDGES_S) * 0.3 / (middle_s + 60.0), (features.GROUPS, 1))


def hear(trace: list[sequences.Request], learner: Learner) -> None:
    """All requests of the trace, as a daemon without limits would tell them."""
    asked: dict[int, int] = {}
    parts: dict[int, int] = {}
    for number, request in enumerate(trace):
        if number % REFIT_EVERY == 0:
            learner.refit(request.time_ms / 1000)
        whole = request.blocks[: request.tokens // request.block_tokens]
        known = [block for block in whole if block in asked]
        sessions, last = (np.array([table[block] for block in known], dtype=np.int64) for table in (asked, parts))
        groups = learner.hear(Request(len(whole), sessions, last), request.time_ms / 1000)
        for block in whole[groups.start :]:
            asked[block] = asked.get(block, 0) + 1
        parts.update(zip(whole, groups.parts.tolist(), strict=True))
    learner.refit(trace[-1].time_ms / 1000)


def expert(path: Path) -> Floats:
    """Hazards [groups, ages] as one trace shows them."""
    nothing = know_nothing()
    learner = Learner(nothing, half_life=float("inf"))
    hear(list(read_trace(path)), learner)
    return hazards(learner.counts(), nothing[0], features.LEVELS, AFRESH)


def main() -> int:
    """Replaces the table."""
    TABLE.write_text(encode(np.stack([*(expert(Path(argument)) for argument in sys.argv[1:]), recency()])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
