"""Listings and counts for operators and other parts; they change nothing.

A scan of all blocks takes time in proportion; so each can be limited to some ids.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.admission import Verdict
from tierd.core.arrays.sets import span, true_rows
from tierd.core.formats.model import HASH_BYTES, PageState, Reason, StructArray
from tierd.core.index.index import Index
from tierd.core.index.inflight_transfers import InflightTransfers
from tierd.core.index.pages import Pages
from tierd.core.index.segment import Key
from tierd.core.plan import (
    BLOCK_INFO,
    PAGE_INFO,
    QUARANTINED,
    ClassStats,
    CoreStats,
    Ids,
    PagesHeld,
    SessionStats,
    TierStats,
)
from tierd.core.plan_builder import no_ids
from tierd.core.requests.leases import Holder, Holders
from tierd.errors import InvalidArgument

LOOK_PAGES = 4096
"""Pages searched in one step for the next held ones."""


class Listing:
    """See the module."""

    def __init__(self, index: Index, sessions: Holders, inflight: InflightTransfers) -> None:
        self._index, self._sessions, self._inflight = index, sessions, inflight

    def with_prefix(self, prefix: str, of: Ids) -> Ids:
        """Of the ids, blocks whose hash begins with the hexadecimal digits."""
        digits = prefix.lower()
        if len(digits) > 2 * HASH_BYTES or any(c not in "0123456789abcdef" for c in digits):
            raise InvalidArgument(
                f"hash prefix {prefix!r}: not up to {2 * HASH_BYTES} hexadecimal digits; copy it from `tierctl blocks`"
            )
        raw = np.ascontiguousarray(self._index.blocks.hash[span(of)]).view(np.uint8).reshape(-1, HASH_BYTES)
        whole = np.frombuffer(bytes.fromhex(digits[: len(digits) // 2 * 2]), np.uint8)
        match = (raw[:, : len(whole)] == whole).all(axis=1)
        if len(digits) % 2:
            match &= raw[:, len(whole)] >> 4 == int(digits[-1], 16)
        return self.blocks(of[match], tier=None, namespace=None, pinned=False)

    def blocks(self, of: Ids, *, tier: int | None, namespace: int | None, pinned: bool) -> Ids:
        """Of the ids, in their order, those of blocks that can be found and have a readable page."""
        blocks, at = self._index.blocks, span(of)
        ids: Ids = of[blocks.named[at] & (blocks.places[at] > 0)]
        if namespace is not None:
            ids = ids[blocks.namespace[ids] == namespace]
        tiers = range(len(self._index.tiers)) if tier is None else [tier]
        ids = ids[self._index.nearest(ids, list(tiers)) >= 0]
        return ids[self._pins(ids) > 0] if pinned else ids

    def describe(self, ids: Ids) -> StructArray:
        """BLOCK_INFO of each."""
        blocks = self._index.blocks
        out = np.zeros(len(ids), BLOCK_INFO)
        metas = blocks.metas(ids)
        for name in ("hash", "parent", "namespace", "domain", "position", "tokens"):
            out[name] = metas[name]
        out["block"], out["length"], out["pins"] = ids, metas["stored_length"], self._pins(ids)
        out["hits"], out["last_used"] = blocks.hits[ids], blocks.last_used[ids]
        out["attention"], out["declined"] = blocks.attention[ids], blocks.declined[ids]
        out["priority"], out["until_s"] = blocks.priority[ids], blocks.until_s[ids]
        out["tiers"] = self.tier_bits(ids)
        return out

    def tier_bits(self, ids: Ids) -> NDArray[np.uint64]:
        """A bit for each tier that has a readable page of the block: BLOCK_INFO's `tiers`."""
        out = np.zeros(len(ids), np.uint64)
        for tier in range(len(self._index.tiers)):
            out |= self._index.is_readable(tier, ids).astype(np.uint64) << np.uint64(tier)
        return out

    def column(self, name: str, ids: Ids) -> NDArray[Any]:
        """A field of BLOCK_INFO that is a column under the same name."""
        column: NDArray[Any] = getattr(self._index.blocks, name)[ids]
        return column

    def pages(self, block: int) -> StructArray:
        """PAGE_INFO of the block's pages."""
        ids = np.asarray([block], np.int64)
        rows = []
        for tier, pages_of in enumerate(self._index.tiers):
            page = self._index.attached(tier, ids)
            if page[0] >= 0:
                row = np.zeros(1, PAGE_INFO)
                row["extent"], row["state"], row["pins"] = (
                    pages_of.extents(page),
                    pages_of.state[page],
                    pages_of.pins[page],
                )
                rows.append(row)
        return np.concatenate(rows) if rows else np.zeros(0, PAGE_INFO)

    def children(self, block: int) -> Ids:
        """Blocks that name it as their parent."""
        blocks = self._index.blocks
        return self.blocks(true_rows(blocks.parent[: blocks.top] == block), tier=None, namespace=None, pinned=False)

    def stats(self) -> CoreStats:
        """Counts over everything."""
        sessions, freed = self._sessions, self._index.freed_by_reason.tolist()
        return CoreStats(
            blocks=self._index.blocks.count,
            sessions=len(sessions.open),
            leases=len(sessions.leases),
            reservations=sum(len(session.reservations) for session in sessions.open.values()),
            transfers=len(self._inflight),
            freed={reason.name: freed[reason] for reason in Reason if freed[reason]},
        )

    def errors(self, extents: StructArray) -> NDArray[np.float32]:
        """The error bound of the block in each page: float32 [n], of EXTENT [n]."""
        out = np.zeros(len(extents), np.float32)
        for tier, pages_of in enumerate(self._index.tiers):
            if pages_of.has_coarse:
                here = extents["tier"] == tier
                out[here] = pages_of.error[extents["page"][here]]
        return out

    def pages_held(self, tier: int, *, after: int, limit_bytes: int) -> PagesHeld:
        """The next readable pages of a tier, by id."""
        pages_of, pages = self._index.tiers[tier], no_ids()
        for start in range(after + 1, pages_of.top, LOOK_PAGES):
            span = slice(start, min(start + LOOK_PAGES, pages_of.top))
            readable = np.isin(pages_of.state[span], (PageState.READY, PageState.RETIRING))
            pages = np.flatnonzero(readable & (pages_of.doom[span] == 0)) + start
            if len(pages):
                break
        fits = int(np.searchsorted(np.cumsum(pages_of.class_bytes(pages)), limit_bytes, side="right"))
        pages = pages[: max(1, fits)]
        blocks, places = pages_of.block[pages].astype(np.int64), pages_of.place[pages].astype(np.int64)
        places -= np.searchsorted(sorted(pages_of.closed), places)
        return PagesHeld(pages_of.extents(pages), blocks, pages_of.is_sealed(pages), places)

    def quarantined(self, tier: int) -> StructArray:
        """QUARANTINED [n], the oldest first."""
        pages_of = self._index.tiers[tier]
        out = np.zeros(len(pages_of.quarantine), QUARANTINED)
        out["extent"] = pages_of.extents(np.fromiter(pages_of.quarantine, np.int64, len(out)))
        out["fault"] = [found.fault for found in pages_of.quarantine.values()]
        out["since"] = [found.since for found in pages_of.quarantine.values()]
        return out

    def tiers(self) -> list[TierStats]:
        """Per tier."""
        return [self._tier(pages_of) for pages_of in self._index.tiers]

    def sessions(self) -> list[SessionStats]:
        """Per session."""
        return [self._session(session) for session in self._sessions.open.values()]

    def _pins(self, ids: Ids) -> Ids:
        """Over all tiers; an operator's pin counts as one."""
        pins: Ids = self._index.blocks.pinned[ids].astype(np.int64)
        for tier, pages_of in enumerate(self._index.tiers):
            pages = self._index.attached(tier, ids)
            pins[pages >= 0] += pages_of.pins[pages[pages >= 0]]
        return pins

    def _tier(self, pages_of: Pages) -> TierStats:
        spec, counts = pages_of.spec, pages_of.counts
        segments = [segment for segment in pages_of.segments if segment is not None]
        return TierStats(
            name=spec.name,
            kind=spec.kind,
            capacity_bytes=spec.capacity_bytes,
            used_bytes=pages_of.used_bytes,
            assigned_bytes=len(segments) * spec.segment_bytes,
            pages_free=counts[PageState.FREE],
            pages_reserved=counts[PageState.RESERVED],
            pages_ready=counts[PageState.READY],
            pages_retiring=counts[PageState.RETIRING],
            pages_pinned=int(np.count_nonzero(pages_of.pins[: pages_of.top])),
            evictions=self._index.evictions[pages_of.position],
            serving=pages_of.serving,
            classes=_classes(pages_of),
            writable=pages_of.writable,
            pages_quarantined=counts[PageState.QUARANTINED],
            quarantined_bytes=pages_of.quarantined_bytes,
            declined=self._declined(pages_of.position),
        )

    def _declined(self, tier: int) -> dict[str, int]:
        counts = self._index.declined.get(tier)
        return {} if counts is None else {v.name.lower(): int(counts[v]) for v in Verdict if v and counts[v]}

    def _session(self, session: Holder) -> SessionStats:
        return SessionStats(
            session.id,
            session.domain,
            len(session.leases),
            len(session.reservations),
            tuple(session.pinned_bytes),
            tuple(session.reserved_bytes),
        )


def _classes(pages_of: Pages) -> tuple[ClassStats, ...]:
    sums: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for segment in pages_of.segments:
        if segment is not None:
            key: Key = segment.key
            for place, count in enumerate((1, segment.pages, segment.spare)):
                sums[key.domain, key.class_bytes][place] += count
    return tuple(ClassStats(*key, *counts) for key, counts in sorted(sums.items()))
