"""Makes room for blocks that were guessed to be used: only blocks that are colder give way.

A guess may be wrong, so it must not cost more than it brings. The policy of the tier that holds the
guessed blocks ranks them and the candidates of the target tier. So the policy's own order decides,
whatever it is. A candidate that this tier does not hold stays.
"""

from __future__ import annotations

import numpy as np

from tierd.core.arrays.columns import runs
from tierd.core.arrays.sets import among
from tierd.core.formats.model import Wanted
from tierd.core.index.segment import Key
from tierd.core.plan import Ids
from tierd.core.plan_builder import PlanBuilder
from tierd.core.space.planner import Planner
from tierd.core.space.room import MANY_PAGES


def make_way(planner: Planner, blocks: Ids, wanted: Wanted, draft: PlanBuilder) -> bool:
    """Evicts blocks of the wanted tiers that are colder than all of these guarded ones. False:
    nothing was evicted."""
    targets = planner.index.writable(wanted)
    if len(blocks) == 0 or not targets:
        return False
    before = sum(planner.index.evictions)
    sources, to = planner.sources(blocks, wanted).tiers, planner.index.targets(blocks, targets)
    for rows in runs(sources, to):
        source, target = int(sources[rows[0]]), int(to[rows[0]])
        if source >= 0 and planner.index.tiers[source].top <= MANY_PAGES:
            _evict_colder(planner, blocks[rows], source, target, draft)
    return sum(planner.index.evictions) > before


def _evict_colder(planner: Planner, blocks: Ids, source: int, target: int, draft: PlanBuilder) -> None:
    index, room, pages_of = planner.index, planner.room, planner.index.tiers[target]
    size = int(pages_of.class_of(index.stored_lengths(target, blocks[:1]))[0])
    key = Key(int(index.blocks.domain[blocks[0]]), size, pages_of.spec.own_writer)
    candidates = room.coldest.find(target, len(blocks) + pages_of.spec.segment_bytes // size)
    candidates = candidates[index.readable(source, candidates) >= 0]
    is_other = np.ones(index.blocks.top, np.bool_)
    is_other[candidates] = is_other[blocks] = False
    ranked = index.policies[source].victims(len(candidates) + len(blocks), is_other)
    assert ranked is not None, "the policy lost count of what it tracks"
    colder = ranked[: int(np.argmax(among(ranked, blocks)))]
    colder = candidates[among(candidates, colder)]
    if len(colder):
        room.drop_only(target, room.coldest.tails_first(target, colder), key, len(blocks), draft)
