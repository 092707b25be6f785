"""Loads the blocks that tiers found at start into the core.

Blocks in memory are loaded before the daemon serves, blocks of stores beside its work, in pieces.
Segments keep their blocks, and blocks their order, which gives the order of eviction. Only blocks
of current namespaces are loaded. Of two contents of one name the newer stays. A store drops the
older, which a later start would find first. Tiers read stored blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import structlog

from tierd.core.arrays.sets import among, every
from tierd.core.core import Core
from tierd.core.formats.model import SegmentAssignment, StructArray
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.tiers.tier import Recovered

log = structlog.get_logger(__name__)

ADOPTED_BLOCKS = 1 << 13
"""Blocks loaded at a time: their META are 2 MiB."""
PAGES = 1 << 17
"""Pages of segments loaded at a time: a millisecond's work."""


class Adoption:
    """Loads the blocks of one tier in pieces. position: the tier's."""

    def __init__(self, core: Core, position: int, found: Recovered, *, registry: NamespaceRegistry) -> None:
        self.position = position
        self._core, self._found, self._registry = core, found, registry
        self._expected = len(found.metas) + found.more_at_most
        self._seen = self._known = self._taken = 0
        self._older = [found.extents[:0]]

    def progress(self) -> str:
        """Text for operators."""
        return f"loading, {100 * self._seen // max(1, self._expected)} %"

    def begin(self, *, now: float) -> None:
        """Loads blocks in memory. For a tier whose blocks must still be read, only announces them.
        The segments of ten million blocks take a tenth of a second."""
        self._core.expect(self._expected)
        if self._found.more_at_most:
            assert not len(self._found.metas), "a tier has its blocks in memory, or to be read"
            self._core.begin_loading(self.position)
            return
        for segments, extents, metas in pieces_of(self._found):
            self._take(segments, extents, metas, now)

    async def finish(self, now: Callable[[], float]) -> StructArray:
        """Loads the segments, then the blocks still to be read. Each piece is read while the
        previous one is loaded.

        The loop runs between two pieces. Returns EXTENT [n] of blocks older than the core's blocks
        of the same names. Raises TierFailed.
        """
        for segments in _by_pages(self._found.segments):
            self._take(segments, self._found.extents[:0], self._found.metas[:0], now())
            await asyncio.sleep(0)
        more = iter(self._found.more)
        reading = asyncio.create_task(asyncio.to_thread(next, more, None))
        try:
            while (piece := await asyncio.shield(reading)) is not None:  # a thread cannot be cancelled
                reading = asyncio.create_task(asyncio.to_thread(next, more, None))
                self._take([], *piece(), now())
                await asyncio.sleep(0)
        finally:
            await asyncio.wait([reading])  # the read must end before the tier is closed
        if self._seen > self._taken:
            log.info("blocks not taken in", tier=self.position, found=self._seen, known=self._known, taken=self._taken)
        return np.concatenate(self._older)

    def _take(
        self, segments: Sequence[SegmentAssignment], extents: StructArray, metas: StructArray, now: float
    ) -> None:
        self._seen += len(metas)
        current = [i for namespace in self._registry.current() for i in namespace.ids]
        extents, metas = _of(current, extents, metas)
        self._known += len(metas)
        good = self._core.adopt(self.position, segments=segments, extents=extents, metas=metas, now=now)
        self._taken += int(np.count_nonzero(good))
        self._older += [extents[i : i + 1] for i in np.flatnonzero(~good) if _is_older(self._core, metas[i])]


def _of(namespaces: list[int], extents: StructArray, metas: StructArray) -> tuple[StructArray, StructArray]:
    """The blocks of these namespaces."""
    mine = among(metas["namespace"], namespaces)
    return (extents, metas) if every(mine) else (extents[mine], metas[mine])


def _by_pages(segments: list[SegmentAssignment]) -> Iterator[list[SegmentAssignment]]:
    """The segments in pieces of about PAGES, each of at least one segment."""
    step = max(1, PAGES // max((segment.pages for segment in segments), default=1))
    for begun in range(0, len(segments), step):
        yield segments[begun : begun + step]


def _is_older(core: Core, meta: np.void) -> bool:
    """Whether the core has a newer page of the name. Generations count through all tiers."""
    block = core.find_block(int(meta["namespace"]), meta["hash"].tobytes())
    return block is not None and bool((core.pages(block)["extent"]["generation"] > meta["generation"]).any())


def pieces_of(found: Recovered) -> Iterator[tuple[list[SegmentAssignment], StructArray, StructArray]]:
    """Blocks in memory: all segments first, then extents and metas in pieces, in their order. A
    piece fits the processor's caches, and only one piece needs memory beside the core's."""
    segments = found.segments
    for begun in range(0, max(1, len(found.metas)), ADOPTED_BLOCKS):
        rows = slice(begun, begun + ADOPTED_BLOCKS)
        yield segments, found.extents[rows], found.metas[rows]
        segments = []
