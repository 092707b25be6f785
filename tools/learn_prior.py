"""Writes the reuse index's initial table of beliefs: `python -m tools.learn_prior TRACE...`.

Each trace gives one expert: a learner reads all of it, from an empty state and without forgetting.
One more expert knows no trace: the longer a block waits, the less likely its use, as in LRU. The
learner determines which expert fits the traffic, per group (`hazard.blend`). Run it again when
groups or ages change.
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
    """One expert. It expects a use within 1,000 s; after 500 s its rate falls as 0.5 / wait."""
    rate = np.minimum(1 / 1000, 0.5 / np.maximum(EDGES_S[:-1], 1.0))
    return np.tile(np.diff(EDGES_S) * rate, (1, features.GROUPS, 1))


def recency() -> Floats:
    """One expert, [groups, ages], for traffic unlike all traces: every group's rate falls as one
    over the wait."""
    middle_s = (EDGES_S[:-1] + EDGES_S[1:]) / 2
    return np.tile(np.diff(EDGES_S) * 0.3 / (middle_s + 60.0), (features.GROUPS, 1))


def hear(trace: list[sequences.Request], learner: Learner) -> None:
    """Feeds all requests of the trace to the learner, as a daemon without limits would."""
    asked: dict[int, int] = {}
    parts: dict[int, int] = {}
    for number, request in enumerate(trace):
        if number % REFIT_EVERY == 0:
            learner.refit(request.time_ms / 1000)
        whole = request.blocks[: request.tokens // request.block_tokens]
        known = [block for block in whole if block in asked]
        sessions, last = (np.array([table[block] for block in known], dtype=np.int64) for table in (asked, parts))
        groups = learner.observe(Request(len(whole), sessions, last), request.time_ms / 1000)
        for block in whole[groups.start :]:
            asked[block] = asked.get(block, 0) + 1
        parts.update(zip(whole, groups.parts.tolist(), strict=True))
    learner.refit(trace[-1].time_ms / 1000)


def expert(path: Path) -> Floats:
    """Hazards [groups, ages] from one trace."""
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
