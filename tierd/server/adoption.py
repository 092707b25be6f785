"""What tiers found at start gets into the books.

Purpose: `adopt`, a few segments at a time. Non-purpose: reading what is stored (tiers), what the books make of it (core). Invariants: segments keep
their blocks, blocks their order, which says what leaves first; only blocks of current namespaces get in; of two contents of one name the newer stays, and a store
keeps no older one, which a later start would find first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import structlog

from tierd.core.core import Core
from tierd.core.model import SegmentAssignment, StructArray
from tierd.core.namespaces import NamespaceRegistry
from tierd.tiers.tier import Recovered

log = structlog.get_logger(__name__)

ADOPTED_BLOCKS = 1 << 16
"""Taken into the books at once, or a few more: the rest of the last segment."""


def adopt(core: Core, position: int, found: Recovered, *, registry: NamespaceRegistry, now: float) -> StructArray:
    """Puts what a tier found into the books, blocks of current namespaces only; EXTENT [n] of those that are older than what the books have of their names."""
    current = [i for namespace in registry.current() for i in namespace.ids]
    known = taken = 0
    older = [found.extents[:0]]
    for segments, rows in pieces_of(found):
        metas = found.metas[rows]
        mine = np.isin(metas["namespace"], current)
        extents = found.extents[rows]
        if not mine.all():
            extents, metas = extents[mine], metas[mine]
        known += len(metas)
        good = core.adopt(position, segments=segments, extents=extents, metas=metas, now=now)
        taken += int(good.sum())
        older += [extents[i : i + 1] for i in np.flatnonzero(~good) if _is_older(core, metas[i])]
    if len(found.metas) > taken:
        log.info("blocks not taken in", tier=position, found=len(found.metas), known=known, taken=taken)
    return np.concatenate(older)


def _is_older(core: Core, meta: np.void) -> bool:
    """Whether the books have a newer page of the name. Generations count through all tiers."""
    block = core.find_block(int(meta["namespace"]), meta["hash"].tobytes())
    return block is not None and bool((core.pages(block)["extent"]["generation"] > meta["generation"]).any())


def pieces_of(found: Recovered) -> Iterator[tuple[list[SegmentAssignment], slice]]:
    """What was found, some segments at a time with all blocks in them, in the order in which they stand; in one piece where segments take turns in it.

    The books take a piece in while it is in the processor's caches, and need memory for one beside what they keep.
    """
    ids = found.metas["segment"]
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1)).tolist()
    order = dict.fromkeys(ids[starts].tolist())
    if len(ids) <= ADOPTED_BLOCKS or len(order) < len(starts):
        yield found.segments, slice(0, len(ids))
        return
    by_id = {given.segment: given for given in found.segments}
    empty = [given for given in found.segments if given.segment not in order]
    segments, begun = empty, 0
    for segment, end in zip(order, [*starts[1:], len(ids)], strict=True):
        if segment in by_id:
            segments.append(by_id[segment])
        if end - begun >= ADOPTED_BLOCKS or end == len(ids):
            yield segments, slice(begun, end)
            segments, begun = [], end
