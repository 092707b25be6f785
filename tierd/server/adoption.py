"""What tiers found at start gets into the books.

Purpose: `adopt`, some blocks at a time. Non-purpose: reading what is stored (tiers), what the books make of it (core). Invariants: segments keep
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
from tierd.core.sets import among, every
from tierd.tiers.tier import Recovered

log = structlog.get_logger(__name__)

ADOPTED_BLOCKS = 1 << 13
"""Taken into the books at once: their META are 2 MiB."""


def adopt(core: Core, position: int, found: Recovered, *, registry: NamespaceRegistry, now: float) -> StructArray:
    """Puts what a tier found into the books, blocks of current namespaces only; EXTENT [n] of those that are older than what the books have of their names."""
    current = [i for namespace in registry.current() for i in namespace.ids]
    seen = known = taken = 0
    older = [found.extents[:0]]
    core.expect(len(found.metas) + found.more_at_most)
    for segments, *piece in pieces_of(found):
        seen += len(piece[1])
        extents, metas = _of(current, *piece)
        known += len(metas)
        good = core.adopt(position, segments=segments, extents=extents, metas=metas, now=now)
        taken += int(np.count_nonzero(good))
        older += [extents[i : i + 1] for i in np.flatnonzero(~good) if _is_older(core, metas[i])]
    if seen > taken:
        log.info("blocks not taken in", tier=position, found=seen, known=known, taken=taken)
    return np.concatenate(older)


def _of(namespaces: list[int], extents: StructArray, metas: StructArray) -> tuple[StructArray, StructArray]:
    """The blocks of these namespaces."""
    mine = among(metas["namespace"], namespaces)
    return (extents, metas) if every(mine) else (extents[mine], metas[mine])


def _is_older(core: Core, meta: np.void) -> bool:
    """Whether the books have a newer page of the name. Generations count through all tiers."""
    block = core.find_block(int(meta["namespace"]), meta["hash"].tobytes())
    return block is not None and bool((core.pages(block)["extent"]["generation"] > meta["generation"]).any())


def pieces_of(found: Recovered) -> Iterator[tuple[list[SegmentAssignment], StructArray, StructArray]]:
    """What was found: all segments first, then extents and metas of some blocks at a time, in the order in which they stand.

    The books take a piece in while it is in the processor's caches, and need memory for one beside what they keep.
    """
    segments = found.segments
    for begun in range(0, max(1, len(found.metas)), ADOPTED_BLOCKS):
        rows = slice(begun, begun + ADOPTED_BLOCKS)
        yield segments, found.extents[rows], found.metas[rows]
        segments = []
    for extents, metas in found.more:
        yield segments, extents, metas
