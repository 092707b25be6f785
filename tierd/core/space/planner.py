"""Transfers: bringing blocks near, writing them far, and ending them.

Blocks wanted in a kind of tier become transfers with a page at both ends. A finished transfer makes
its page ready, or frees it. Policies learn of a block when its transfer is decided, never when it
ends, so the order of ends changes no later decision.

A transfer's life: `bring` pins source and target and attaches the target; `finish` publishes or
dooms the target, and the source stays. If a page was condemned or forgotten meanwhile, its state
shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tierd.core.admission import Verdict
from tierd.core.arrays.columns import runs
from tierd.core.arrays.sets import among, distinct, every, kinds, some, true_rows
from tierd.core.formats.model import (
    CODED,
    NO_PAGE,
    TRANSFER,
    BlockStatus,
    Fault,
    Reason,
    StructArray,
    TierKind,
    Wanted,
    kind_of,
)
from tierd.core.index.blocks import words
from tierd.core.index.index import Index
from tierd.core.index.inflight_transfers import INFLIGHT, InflightTransfers
from tierd.core.index.segment import Key
from tierd.core.plan import Bools, Codes, Ids, TransferIds
from tierd.core.plan_builder import PlanBuilder, no_ids
from tierd.core.space.room import Room


class Where(NamedTuple):
    """A page per block: tiers and pages, int64 [n], both -1 for none."""

    tiers: Ids
    pages: Ids

    def at(self, rows: Ids | Bools) -> Where:
        """Some of them."""
        return Where(self.tiers[rows], self.pages[rows])


class Planner:
    """See the module. Blocks of one call are distinct, first of the sequence first."""

    def __init__(self, index: Index, room: Room) -> None:
        self.index, self.room, self.inflight = index, room, InflightTransfers()

    # -- pages of blocks

    def attached(self, blocks: Ids, tiers: Sequence[int]) -> Where:
        """The first of the tiers that has a page of each block, filled or being filled."""
        if len(tiers) == 1:
            pages = self.index.attached(tiers[0], blocks)
            return Where(np.where(pages >= 0, tiers[0], -1), pages)
        where = Where(np.full(len(blocks), -1, np.int64), np.full(len(blocks), NO_PAGE, np.int64))
        for tier in reversed(tiers):
            pages = self.index.attached(tier, blocks)
            here = pages >= 0
            where.tiers[here], where.pages[here] = tier, pages[here]
        return where

    def sources(self, blocks: Ids, wanted: Wanted) -> Where:
        """The readable page nearest to the wanted tier; an exact one, if there is one, else the finest.
        For stores, other stores come last."""
        kind, specs = kind_of(wanted), [tier.spec for tier in self.index.tiers]
        is_last = [kind is TierKind.NVME and spec.kind is kind for spec in specs]
        tiers = sorted(self.index.serving(), key=lambda t: (is_last[t], abs(specs[t].kind - kind), t))
        found = self.index.nearest(blocks, tiers, error_limit=0.0).astype(np.int64)
        if some(coarse := found < 0):
            found[coarse] = self.index.finest(blocks[coarse], tiers)
        where = Where(found, np.full(len(blocks), NO_PAGE, np.int64))
        for tier in tiers:
            here = found == tier
            where.pages[here] = self.index.attached(tier, blocks[here])
        return where

    def guard(self, blocks: Ids) -> list[tuple[int, Ids]]:
        """Pins every page of the blocks while room is made for others, until `unguard`."""
        guarded = list[tuple[int, Ids]]()
        self.room.coldest.guard(blocks)
        for tier in range(len(self.index.tiers)):
            pages = self.index.attached(tier, blocks)
            pages = pages[pages >= 0]
            if len(pages):
                self.index.pin(tier, pages)
                guarded.append((tier, pages))
        return guarded

    def unguard(self, guarded: list[tuple[int, Ids]], draft: PlanBuilder) -> None:
        """Ends a guard."""
        self.room.coldest.guard(no_ids())
        for tier, pages in guarded:
            self.index.unpin(tier, pages, draft)

    # -- transfers

    def bring(
        self, blocks: Ids, wanted: Wanted, *, reason: Reason, draft: PlanBuilder, targets: list[int] | None = None
    ) -> None:
        """Transfers for guarded, readable blocks without a page in the wanted tiers, as many as
        find room, in order. Between device and nvme (or archive), or two devices, data go through a
        host tier in service. A device that reads a store directly needs none. targets: some of the
        wanted tiers."""
        targets = self.index.writable(wanted) if targets is None else targets
        if not targets or len(blocks) == 0:
            return
        where, to = self.sources(blocks, wanted), self.index.targets(blocks, targets)
        staged = self._is_staged(where, kind_of(wanted)) & ~self._is_direct(where, to)
        if staged.any():
            where = self._stage(blocks, where, staged=staged, reason=reason, draft=draft)
        to[where.tiers < 0] = -1
        for rows in runs(to):
            target = int(to[rows[0]])
            if target >= 0:
                self.send(blocks[rows], where.at(rows), target=target, reason=reason, draft=draft)

    def send(self, blocks: Ids, where: Where, *, target: int, reason: Reason, draft: PlanBuilder) -> Bools:
        """Transfers from these pages to one tier; returns which blocks found room."""
        pages = self._pages_for(blocks, target, draft)
        sent = pages >= 0
        blocks, where, pages = blocks[sent], where.at(sent), pages[sent]
        if len(blocks) == 0:
            return sent
        transfers = np.zeros(len(blocks), INFLIGHT)
        transfers["block"], transfers["reason"] = blocks, reason
        transfers["source_tier"], transfers["source_page"] = where
        transfers["target_tier"], transfers["target_page"] = target, pages
        ids = self.inflight.begin(transfers)
        self.index.pin(target, pages)
        self.index.attach(target, pages[::-1], blocks[::-1], draft.now)
        self.index.note_write(target, blocks, draft.now)
        for rows in runs(where.tiers):
            source = int(where.tiers[rows[0]])
            self.index.pin(source, where.pages[rows])
            if self.index.tiers[source].has_coarse:
                self.index.set_errors(target, pages[rows], self.index.tiers[source].error[where.pages[rows]])
        draft.transfer(self._records(ids, transfers, draft))
        return sent

    def persist(self, blocks: Ids, *, draft: PlanBuilder) -> None:
        """Transfers to nvme for blocks without a page in a durable, writable store; waits for those in
        flight. A use for stores that have them."""
        stores = [t for t in self.index.writable(TierKind.NVME) if self.index.tiers[t].spec.is_durable]
        there = self.attached(blocks, stores)
        self.index.blocks.durable[blocks] = True
        for store in stores:
            self.index.touch(store, blocks[::-1], draft.now)
        self.wait_for(there, draft)
        blocks = blocks[(there.pages < 0) & (self.sources(blocks, TierKind.NVME).pages >= 0)]
        guarded = self.guard(blocks)
        self.bring(blocks, TierKind.NVME, reason=Reason.DURABLE, draft=draft, targets=self.index.first(stores))
        self.unguard(guarded, draft)

    def wait_for(self, where: Where, draft: PlanBuilder) -> None:
        """The plan waits for the transfers that fill these pages."""
        if len(self.inflight) == 0:
            return
        for tier in kinds(where.tiers[where.tiers >= 0]):
            fillers = self.inflight.fillers(tier, where.pages[where.tiers == tier])
            draft.wait(fillers[fillers > 0])

    # -- ends

    def finish(self, ids: TransferIds, statuses: Codes, metas: StructArray | None, *, draft: PlanBuilder) -> None:
        """Transfers ended. metas: of the copies."""
        transfers = self.inflight.end(ids)
        good = statuses == BlockStatus.READY
        for rows in runs(transfers["target_tier"]):
            self._note_plain(transfers[rows], statuses[rows])
            self._end_targets(transfers[rows], good[rows], None if metas is None else metas[rows], draft)
        for rows in runs(transfers["source_tier"]):
            self._end_sources(transfers[rows], statuses[rows], draft=draft)

    def _end_targets(self, transfers: StructArray, good: Bools, metas: StructArray | None, draft: PlanBuilder) -> None:
        tier, pages = int(transfers["target_tier"][0]), transfers["target_page"]
        attached = self.index.tiers[tier].doom[pages] == 0
        if metas is not None:
            good = good & self._note_forms(tier, transfers, metas, rows=true_rows(good & attached), draft=draft)
        self.index.publish(tier, pages[good & attached])
        if (~good & attached).any():
            self.index.doom(tier, pages[~good & attached], Reason.FAILED, draft)
        self.index.unpin(tier, pages, draft)

    def _note_plain(self, transfers: StructArray, statuses: Codes) -> None:
        """Blocks whose encoding did not fit: stores get them as they are."""
        tier, pages = int(transfers["target_tier"][0]), transfers["target_page"]
        is_its = (statuses == BlockStatus.NO_ROOM) & (self.index.tiers[tier].doom[pages] == 0)
        self.index.blocks.plain[transfers["block"][is_its]] = True

    def _note_forms(
        self, tier: int, transfers: StructArray, metas: StructArray, *, rows: Ids, draft: PlanBuilder
    ) -> Bools:
        """Length and error of copies that were encoded, digest of those that were decoded. Returns
        which transfers stand: not those whose block has a page with other bytes near. Such a block
        is not written again until its next use, and a get takes the other page from now on."""
        pages_of, pages, stand = self.index.tiers[tier], transfers["target_page"], np.ones(len(transfers), bool)
        encoded = rows[self.index.is_coded(tier, pages[rows])]
        pages_of.length[pages[encoded]] = metas["stored_length"][encoded]
        self.index.set_errors(tier, pages[encoded], metas["error"][encoded])
        for row in rows[~among(rows, encoded)].tolist():
            source, block = int(transfers["source_tier"][row]), transfers["block"][row : row + 1]
            if not self.index.is_coded(source, transfers["source_page"][row : row + 1])[0]:
                continue
            digest = words(metas["digest"][row : row + 1])
            if every(self.index.blocks.digest[block] == digest):
                continue
            is_known = some(self.index.blocks.digest[block])
            stand[row] = not (is_known and self._is_near(block, besides=(tier, source)))
            if stand[row]:
                self.index.blocks.digest[block] = digest
            elif pages_of.spec.kind is TierKind.NVME:
                self.index.blocks.declined[block] = Verdict.DISPLACED
            elif self.index.nearest(block, range(len(self.index.tiers)), error_limit=0.0)[0] < 0:
                page = transfers["source_page"][row : row + 1]
                self.index.doom(source, page[self.index.tiers[source].doom[page] == 0], Reason.DUPLICATE, draft)
        return stand

    def _is_near(self, block: Ids, *, besides: tuple[int, int]) -> bool:
        """Whether another tier than these has a page with the bytes of the block's digest: one that
        is not encoded, or exactly."""
        for tier in range(len(self.index.tiers)):
            page = self.index.readable(tier, block)
            is_exact = page[0] >= 0 and self.index.tiers[tier].error[page[0]] == 0
            if tier not in besides and page[0] >= 0 and (is_exact or not self.index.is_coded(tier, page)[0]):
                return True
        return False

    def _end_sources(self, transfers: StructArray, statuses: Codes, *, draft: PlanBuilder) -> None:
        tier, pages = int(transfers["source_tier"][0]), transfers["source_page"]
        pages_of = self.index.tiers[tier]
        corrupt = distinct(pages[(statuses == BlockStatus.CORRUPT) & (pages_of.doom[pages] == 0)])
        if len(corrupt):
            self.index.condemn(tier, corrupt, Fault.READ, draft)
        self.index.unpin(tier, pages, draft)

    # -- inside

    def _is_staged(self, where: Where, kind: TierKind) -> Bools:
        """Which sources are beyond the host tiers from the kind, or in another device."""
        kinds = np.asarray([t.spec.kind for t in self.index.tiers] + [kind])[where.tiers]
        beyond = (kinds != TierKind.HOST) if kind < TierKind.HOST else (kinds < TierKind.HOST)
        over = kind != TierKind.HOST and bool(self.index.serving(TierKind.HOST))
        return np.asarray(beyond & over & (where.tiers >= 0), bool)

    def _is_direct(self, where: Where, to: Ids) -> Bools:
        """Which sources their target tiers read directly. Encoded ones go through host memory."""
        direct = np.zeros(len(to), bool)
        for tier in kinds(to) if any(self.index.direct) else ():
            direct |= (to == tier) & among(where.tiers, sorted(self.index.direct[tier]))
        for tier in kinds(where.tiers[direct]) if some(direct) else ():
            rows = true_rows(direct & (where.tiers == tier))
            direct[rows] = ~self.index.is_coded(tier, where.pages[rows])
        return direct

    def _stage(self, blocks: Ids, where: Where, *, staged: Bools, reason: Reason, draft: PlanBuilder) -> Where:
        """The sources after staged blocks were sent to host tiers; none for those without room."""
        hosts = self.index.serving(TierKind.HOST)
        coming = self.attached(blocks, hosts)
        rest = staged & (coming.pages < 0)
        self.bring(blocks[rest], TierKind.HOST, reason=reason, draft=draft)
        coming = self.attached(blocks, hosts)
        return Where(np.where(staged, coming.tiers, where.tiers), np.where(staged, coming.pages, where.pages))

    def _pages_for(self, blocks: Ids, target: int, draft: PlanBuilder) -> Ids:
        """Reserved pages for blocks in a tier that the daemon writes; -1 without room."""
        pages_of = self.index.tiers[target]
        lengths = self.index.stored_lengths(target, blocks)
        is_coded = lengths != self.index.blocks.length[blocks]
        classes, domains = pages_of.class_of(lengths), self.index.blocks.domain[blocks]
        pages = np.full(len(blocks), NO_PAGE, np.int64)
        for rows in runs(domains, classes):
            key = Key(int(domains[rows[0]]), int(classes[rows[0]]), pages_of.spec.own_writer)
            got = self.room.reserve(target, key, len(rows), draft=draft)
            pages[rows[: len(got)]] = got
            pages_of.length[got] = lengths[rows[: len(got)]]
            pages_of.flags[got[is_coded[rows[: len(got)]]]] |= np.uint8(CODED)
            draft.reserve(pages_of.extents(got))
        return pages

    def _records(self, ids: TransferIds, transfers: StructArray, draft: PlanBuilder) -> StructArray:
        out = np.zeros(len(ids), TRANSFER)
        out["id"], out["block"], out["reason"] = ids, transfers["block"], transfers["reason"]
        out["target"] = self.index.tiers[int(transfers["target_tier"][0])].extents(transfers["target_page"])
        for rows in runs(transfers["source_tier"]):
            tier, pages = int(transfers["source_tier"][rows[0]]), transfers["source_page"][rows]
            out["source"][rows] = self.index.tiers[tier].extents(pages)
            out["after"][rows] = self.inflight.fillers(tier, pages)
            out["error"][rows] = self.index.tiers[tier].error[pages]
        draft.wait(out["after"][out["after"] > 0])
        return out
