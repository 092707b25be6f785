"""The index: each block's page in each tier, and every transition between page states.

It keeps blocks, pages and eviction policies in step; it chooses nothing. Each transition is one
function:

    set_aside  free -> reserved      doom     ready (-> retiring) -> free
    discard    reserved -> free      vacate   ready -> free
    publish    reserved -> ready     condemn  ready, retiring -> quarantined

A page is *attached* while its block points to it. A reserved page is attached as the target of a
transfer, a ready one as a copy to read. A page is *doomed* if it is detached but still pinned: it
is retiring, no lookup finds it, and its last unpin frees it. A policy *tracks* a block while the
block has an attached page in its tier.

A block has at most one attached page per tier. A pinned page is never freed. In tier t,
`held[t][b]` is False exactly for blocks that may be evicted now: tracked, not pinned, no operator's
pin. Also True in `barred` are blocks whose children are tracked there. The False entries of the two
are counted by `going[t]` and `tips[t]`, tracked children by `children[t][b]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.admission import Verdict
from tierd.core.arrays.sets import distinct, every, some, span, tally, true_rows
from tierd.core.eviction import heeding
from tierd.core.formats.model import (
    CODED,
    FREED,
    NO_PAGE,
    PAGE_ALIGN_BYTES,
    Fault,
    PageState,
    Reason,
    StructArray,
    TierKind,
    TierSpec,
    Wanted,
)
from tierd.core.forms import BLOCK_SHAPE, Forms
from tierd.core.index.blocks import Blocks
from tierd.core.index.pages import GENERATION_LIMIT, Pages
from tierd.core.index.policies import Policies
from tierd.core.index.priorities import Priorities, raise_before, raise_said
from tierd.core.index.segment import Key
from tierd.core.plan import Bools, Bytes, Ids, Lengths, Start
from tierd.core.plan_builder import PlanBuilder

Column = NDArray[Any]


class Index:
    """See the module. Ids given to one call are distinct unless said otherwise."""

    def __init__(self, tiers: Sequence[TierSpec], *, policies: Policies, start: Start, forms: Forms) -> None:
        self.tiers = [Pages(spec, position) for position, spec in enumerate(tiers)]
        most = sum(spec.capacity_bytes for spec in tiers) // PAGE_ALIGN_BYTES
        self.blocks = Blocks(seed=start.seed, most=most, unix_s=start.unix_s)
        self.policies = [policies.eviction(spec, self.blocks) for spec in tiers]
        self.heeding = heeding(self.policies)
        stores = [tier.position for tier in self.tiers if tier.spec.kind is TierKind.NVME]
        self.admissions = {store: policies.admission(tiers[store], self.blocks) for store in stores}
        self.listener = policies.listener(self.blocks)
        self.forms = forms
        self.page = [self.blocks.column(np.int32, fill=NO_PAGE) for _ in tiers]
        self.held = [self.blocks.column(np.bool_, fill=1) for _ in tiers]
        self.barred = [self.blocks.column(np.bool_, fill=1) for _ in tiers]
        self.children = [self.blocks.column(np.int32) for _ in tiers]
        self._in_service: dict[tuple[Wanted, ...], list[int]] = {}
        self.direct: list[frozenset[int]] = [frozenset() for _ in tiers]
        """Per tier: stores that it is read into from without a stay in host memory."""
        self.came = [0 for _ in tiers]
        self.left = [0 for _ in tiers]
        """Per tier: blocks that ever got a page in it, and that lost it."""
        self.going = [0 for _ in tiers]
        self.tips = [0 for _ in tiers]
        self.generation = start.generation
        self.freed_by_reason = np.zeros(len(Reason), np.int64)
        self.evictions = [0 for _ in tiers]
        self.declined = {store: np.zeros(len(Verdict), np.int64) for store in stores}

    # -- questions

    def serving(self, *wanted: Wanted) -> list[int]:
        """Tiers in service, near to far: those wanted, or all. Read-only for the caller."""
        found = self._in_service.get(wanted)
        if found is None:
            names = [each.name if isinstance(each, TierSpec) else each for each in wanted]  # a spec may be of yesterday
            here = (t for t in self.tiers if not wanted or t.spec.kind in names or t.spec.name in names)
            found = self._in_service[wanted] = [t.position for t in here if t.serving]
        return found

    def farther(self, tier: int) -> list[int]:
        """Tiers in service of farther kinds or levels, near to far."""
        distance = self.tiers[tier].spec.distance
        return [t for t in self.serving() if self.tiers[t].spec.distance > distance]

    def next(self, tier: int) -> list[int]:
        """Of the farther tiers that take new blocks, the nearest kind and level."""
        return self.first([t for t in self.farther(tier) if self.tiers[t].writable])

    def first(self, tiers: list[int]) -> list[int]:
        """Those of the nearest kind and level. tiers: near to far."""
        return [t for t in tiers if self.tiers[t].spec.distance == self.tiers[tiers[0]].spec.distance]

    def set_serving(self, tier: int, *, serving: bool) -> None:
        """In service, or not: see `Core.set_serving`."""
        self.tiers[tier].serving = serving
        self._in_service.clear()

    def writable(self, *wanted: Wanted) -> list[int]:
        """Those of the tiers in service that take new blocks."""
        return [t for t in self.serving(*wanted) if self.tiers[t].writable]

    def attached(self, tier: int, blocks: Ids) -> Ids:
        """The block's page in any state, else -1."""
        pages: Ids = self.page[tier].take(blocks).astype(np.int64)
        if some(unknown := blocks < 0):
            pages[unknown] = NO_PAGE
        return pages

    def readable(self, tier: int, blocks: Ids) -> Ids:
        """The block's page if it can be read, else -1."""
        return np.where(self.is_readable(tier, blocks), self.attached(tier, blocks), NO_PAGE)

    def is_readable(self, tier: int, blocks: Ids) -> Bools:
        """Which blocks have a page that can be read; not block -1."""
        pages, state = self.page[tier].take(blocks), self.tiers[tier].state
        if len(state) == 0:
            return np.zeros(len(blocks), bool)
        return np.asarray((pages >= 0) & (blocks >= 0) & (state.take(pages) >= PageState.READY), bool)

    def nearest(self, blocks: Ids, tiers: Sequence[int], *, error_limit: float | Column = np.inf) -> NDArray[np.int8]:
        """The first of these tiers that can read each block within the error limit; -1 for none."""
        out = np.full(len(blocks), -1, np.int8)
        for tier in reversed(tiers):
            here = self.is_readable(tier, blocks)
            if self.tiers[tier].has_coarse:
                here &= self.tiers[tier].error[self.page[tier].take(blocks)] <= error_limit
            out[here] = tier
        return out

    def finest(self, blocks: Ids, tiers: Sequence[int]) -> NDArray[np.int8]:
        """The tier that can read each block with the least error, the first of them; -1 for none."""
        out, least = np.full(len(blocks), -1, np.int8), np.full(len(blocks), np.inf, np.float32)
        for tier in tiers:
            rows = true_rows(self.is_readable(tier, blocks))
            errors = self.tiers[tier].error[self.attached(tier, blocks[rows])]
            rows, errors = rows[errors < least[rows]], errors[errors < least[rows]]
            out[rows], least[rows] = tier, errors
        return out

    def nearest_error(self, blocks: Ids) -> Column:
        """The error bound of each block's nearest page that is not encoded: float32 [n]; 0: none."""
        out = np.zeros(len(blocks), np.float32)
        for tier in reversed(range(len(self.tiers))):
            if self.tiers[tier].has_coarse:
                pages = self.readable(tier, blocks)
                here = (pages >= 0) & ~self.is_coded(tier, pages)
                out[here] = self.tiers[tier].error[pages[here]]
        return out

    def stored_lengths(self, tier: int, blocks: Ids) -> Lengths:
        """Bytes of a page of the tier for each block: uint32 [n]. Fewer than `Blocks.length` for
        blocks that the tier stores encoded. A block that a farther store has as decoded is stored
        so too: encoded again it would have other bytes."""
        lengths = self.blocks.length[blocks]
        if self.tiers[tier].spec.kind < TierKind.NVME:
            return lengths
        shapes = np.empty(len(blocks), BLOCK_SHAPE)
        for name in ("namespace", "position", "tokens"):
            shapes[name] = getattr(self.blocks, name)[blocks]
        shapes["length"] = lengths
        as_is = self.blocks.plain[blocks]
        for other in self.tiers[tier + 1 :]:
            if other.has_coarse:
                pages = self.readable(other.position, blocks)
                as_is |= (pages >= 0) & (other.error[pages] > 0) & ~self.is_coded(other.position, pages)
        return np.where(as_is, lengths, self.forms.lengths(tier, shapes))

    def error_limits(self, blocks: Ids) -> Column:
        """The greatest error bound that counts as held, for each block: float32 [n]."""
        if not any(tier.has_coarse for tier in self.tiers):
            return np.zeros(len(blocks), np.float32)
        return self.forms.error_limits(self.blocks.namespace.take(blocks).astype(np.int64))

    def set_errors(self, tier: int, pages: Ids, errors: Column) -> None:
        """Sets the error bounds of pages, float32 [n]."""
        self.tiers[tier].has_coarse |= some(errors > 0)
        self.tiers[tier].error[pages] = errors

    def is_coded(self, tier: int, pages: Ids) -> Bools:
        """Which pages hold their block encoded, or are reserved for that."""
        return np.asarray(self.tiers[tier].flags[pages] & CODED > 0, bool)

    def is_farther(self, tier: int, blocks: Ids) -> Bools:
        """Which named blocks a farther tier can read."""
        farther = self.farther(tier)
        if not farther:
            return np.zeros(len(blocks), bool)
        return np.asarray((self.nearest(blocks, farther) >= 0) & self.blocks.named[blocks], bool)

    def targets(self, blocks: Ids, tiers: Sequence[int]) -> Ids:
        """The tier for a new page of each block: striped by the first 8 bytes of the hash."""
        stripe = (self.blocks.hash[blocks, 0] % np.uint64(len(tiers))).astype(np.int64)
        chosen: Ids = np.asarray(tiers, np.int64)[stripe]
        return chosen

    # -- transitions

    @property
    def generations_left(self) -> int:
        """How many pages can still get a generation."""
        return max(0, GENERATION_LIMIT - self.generation)

    def set_aside(self, tier: int, key: Key, count: int) -> Ids:
        """free -> reserved: up to `count` pages of segments in use; at most generations_left."""
        pages = self.tiers[tier].take(key, count, self.generation)
        self.generation += len(pages)
        return pages

    def publish(self, tier: int, pages: Ids) -> None:
        """reserved -> ready: attached pages have been filled."""
        self.tiers[tier].move(pages, PageState.RESERVED, PageState.READY)

    def discard(self, tier: int, pages: Ids, reason: Reason, draft: PlanBuilder) -> None:
        """reserved -> free: pages that were never attached."""
        assert every(self.tiers[tier].block[pages] < 0), "a page with a block is doomed, not discarded"
        self._free(tier, pages, np.full(len(pages), int(reason)), draft)

    def vacate(self, tier: int, pages: Ids, reason: Reason, draft: PlanBuilder) -> None:
        """ready -> free: attached pages without pins."""
        assert not self.tiers[tier].pins[pages].any(), "a pinned page is never freed"
        self.doom(tier, pages, reason, draft)

    def condemn(self, tier: int, pages: Ids, fault: Fault, draft: PlanBuilder) -> None:
        """ready, retiring -> quarantined: pages with wrong bytes; pinned ones at last unpin."""
        pages_of = self.tiers[tier]
        pages_of.fault[pages] = fault
        is_attached = pages_of.doom[pages] == 0
        pages_of.doom[pages[~is_attached]] = Reason.CORRUPTED
        self.doom(tier, pages[is_attached], Reason.CORRUPTED, draft)

    # -- attach, doom, pin

    def attach(self, tier: int, pages: Ids, blocks: Ids, now: float) -> None:
        """Attaches reserved pages to blocks and tracks these, in this order (cold to hot)."""
        pages_of, table = self.tiers[tier], self.page[tier]
        at = span(blocks)
        assert every(table[at] == NO_PAGE), "a block has one page per tier"
        pages_of.block[span(pages)] = blocks
        table[at] = pages
        self.blocks.places[at] += 1
        self.came[tier] += len(blocks)
        self._note_kept(tier, blocks)
        self._enter(tier, blocks, now)

    def doom(self, tier: int, pages: Ids, reason: Reason, draft: PlanBuilder) -> None:
        """Detaches attached pages in any state; frees them now, or at their last unpin."""
        pages_of = self.tiers[tier]
        self._detach(tier, pages)
        pages_of.doom[pages] = int(reason)
        stays = (pages_of.pins[pages] > 0) | (pages_of.fault[pages] > 0)
        if some(stays):
            stay = pages[stays]
            retiring = stay[pages_of.state[stay] == PageState.READY]
            pages_of.move(retiring, PageState.READY, PageState.RETIRING)
            if some(is_held := pages_of.pins[retiring] > 0):
                draft.retire(pages_of.extents(retiring[is_held]))
        self._sweep(tier, pages, draft)

    def pin(self, tier: int, pages: Ids) -> None:
        """Adds a pin to each; pages may repeat."""
        each, pins = distinct(pages), self.tiers[tier].pins
        before = pins.take(each)
        if len(each) == len(pages):
            pins[each] = before + np.uint32(1)
        else:
            np.add.at(pins, pages, 1)
        self._hold(tier, self._attached_to(tier, each[before == 0]))

    def pin_attached(self, tier: int, pages: Ids, blocks: Ids) -> None:
        """As `pin`, for distinct pages attached to these blocks."""
        pins = self.tiers[tier].pins
        before = pins.take(pages)
        pins[pages] = before + np.uint32(1)
        self._hold(tier, blocks[before == 0] if some(before) else blocks)

    def unpin(self, tier: int, pages: Ids, draft: PlanBuilder) -> None:
        """Takes a pin off each; pages may repeat. Frees doomed pages without pins."""
        pages_of = self.tiers[tier]
        (each, counts), pins = tally(pages), pages_of.pins
        before = pins.take(each)
        assert every(before >= counts), "a page is unpinned more often than pinned"
        pins[each] = before - counts
        if not every(is_last := before == counts):
            each = each[is_last]
        if len(each) == 0:
            return
        self._let(tier, each)
        doomed = pages_of.doom.take(each) > 0
        if some(doomed):
            self._sweep(tier, each[doomed], draft)

    def link(self, blocks: Ids, parents: Bytes, now: float) -> None:
        """Gives blocks their parents: uint8 [n, 32]."""
        linked = self.blocks.link(blocks, parents, now)
        for tier in range(len(self.tiers)) if len(linked) else ():
            if some(tracked := self._tracked(tier, linked)):
                self._count_children(tier, linked[tracked], 1)

    def touch(self, tier: int, blocks: Ids, now: float) -> None:
        """Counts a use of the blocks in this tier; ignores blocks that it does not track."""
        tracked = self._tracked(tier, blocks)
        self.policies[tier].touch(blocks if every(tracked) else blocks[tracked], now)

    def use(self, blocks: Ids, now: float) -> None:
        """Counts a repeated put, last block first: a use in every tier, but no hit."""
        self.blocks.last_used[blocks] = now
        for tier in self.serving():
            self.touch(tier, blocks, now)
        self.note_use(blocks, now)

    def note_use(self, blocks: Ids, now: float) -> None:
        """Tells the admissions of all stores of a use or a new block, last block first."""
        for admission in self.admissions.values():
            admission.touch(blocks, now)

    def note_write(self, tier: int, blocks: Ids, now: float) -> None:
        """The blocks are being written to the tier."""
        if tier in self.admissions:
            self.admissions[tier].wrote(int(self.stored_lengths(tier, blocks).sum(dtype=np.int64)), now)

    def admitted(self, tier: int, blocks: Ids, now: float) -> Bools:
        """Which blocks deserve a write to the tier. Others stay declined until their next use."""
        if tier not in self.admissions:
            return np.ones(len(blocks), bool)
        verdicts = self.admissions[tier].admit(blocks, self.stored_lengths(tier, blocks).astype(np.int64), now)
        self.blocks.declined[blocks] = verdicts
        self.declined[tier] += np.bincount(verdicts, minlength=len(Verdict))
        return np.asarray(verdicts == Verdict.WRITE, bool)

    def say(self, blocks: Ids, said: Priorities, now: float) -> None:
        """Gives blocks the priorities of a put; they may repeat, last of the sequence first. A
        greater one stays."""
        self.say_before(raise_said(self.blocks, blocks, said, self.blocks.unix_s + now), now)

    def say_before(self, blocks: Ids, now: float) -> None:
        """Raises the ancestors of blocks with a new priority, and tells policies that use it."""
        lifted = raise_before(self.blocks, blocks, self.blocks.unix_s + now)
        for tier, policy in self.heeding if len(blocks) else ():
            for those in (blocks, lifted):
                policy.said(those[self._tracked(tier, those)], now)

    def pass_time(self, now: float) -> None:
        """Sets the time. Called before room is made."""
        for _, policy in self.heeding:
            policy.pass_time(now)
        for pages in self.tiers:
            pages.now = now

    def weigh(self, blocks: Ids) -> None:
        """Updates blocks whose operator's pin or laxness changed."""
        for tier in range(len(self.tiers)):
            self._weigh(tier, blocks)

    # -- inside

    def _detach(self, tier: int, pages: Ids) -> Ids:
        """Detaches attached pages from their blocks; returns the blocks."""
        blocks = self.tiers[tier].block[pages].astype(np.int64)
        self._leave(tier, blocks)
        self.page[tier][blocks] = NO_PAGE
        self._note_kept(tier, blocks)
        self.left[tier] += len(blocks)
        return blocks

    def _tracked(self, tier: int, blocks: Ids) -> Bools:
        return np.asarray(self.page[tier].take(blocks) >= 0, bool)

    def _note_kept(self, tier: int, blocks: Ids) -> None:
        """After attaching or detaching in a store that wears: updates `Blocks.kept`."""
        if tier not in self.admissions or len(blocks) == 0:
            return
        at = span(blocks)
        self.blocks.kept[at] = np.any([self.page[store][at] >= 0 for store in self.admissions], axis=0)
        if self.listener is not None:
            self.listener.kept(blocks)

    def _enter(self, tier: int, blocks: Ids, now: float) -> None:
        if len(blocks) == 0:
            return
        self.policies[tier].track(blocks, now)
        self._count_children(tier, blocks, 1)
        self._weigh(tier, blocks)

    def _leave(self, tier: int, blocks: Ids) -> None:
        """Call before the page's state or attachment changes."""
        if len(blocks) == 0:
            return
        self.policies[tier].forget(blocks)
        held, barred = self.held[tier], self.barred[tier]
        self.going[tier] -= len(blocks) - int(np.count_nonzero(held[blocks]))
        held[blocks] = True
        self._count_children(tier, blocks, -1)
        self.tips[tier] -= len(blocks) - int(np.count_nonzero(barred[blocks]))
        barred[blocks] = True

    def _count_children(self, tier: int, blocks: Ids, step: int) -> None:
        parents = self.blocks.parent[blocks]
        parents = parents[parents >= 0].astype(np.int64)
        if len(parents):
            np.add.at(self.children[tier], parents, step)
            self._bar(tier, distinct(parents))

    def _bar(self, tier: int, blocks: Ids) -> None:
        barred, at = self.barred[tier], span(blocks)
        lead = (self.children[tier][at] > 0) & ~self.blocks.lax[at]
        now = self.held[tier][at] | lead
        self.tips[tier] += int(np.count_nonzero(barred[at])) - int(np.count_nonzero(now))
        barred[at] = now

    def _weigh(self, tier: int, blocks: Ids) -> None:
        """Writes held, barred and going for distinct blocks."""
        pins = self.tiers[tier].pins
        if len(blocks) == 0 or len(pins) == 0:
            return
        at = span(blocks)
        free = (self.page[tier][at] >= 0) & (pins[self.page[tier][at]] == 0) & ~self.blocks.pinned[at]
        held = self.held[tier]
        self.going[tier] += int(np.count_nonzero(free)) - int(np.count_nonzero(~held[at]))
        held[at] = ~free
        self._bar(tier, blocks)

    def _attached_to(self, tier: int, pages: Ids) -> Ids:
        """The blocks attached to these pages."""
        blocks: Ids = self.tiers[tier].block.take(pages)
        attached = (blocks >= 0) & (self.page[tier].take(blocks) == pages)
        return blocks if every(attached) else blocks[attached]

    def _hold(self, tier: int, blocks: Ids) -> None:
        """The pages of these blocks got their first pin: bars them from eviction."""
        held, barred = self.held[tier], self.barred[tier]
        self.going[tier] -= len(blocks) - int(np.count_nonzero(held.take(blocks)))
        self.tips[tier] -= len(blocks) - int(np.count_nonzero(barred.take(blocks)))
        held[blocks] = barred[blocks] = True

    def _let(self, tier: int, pages: Ids) -> None:
        """Distinct pages lost their last pin: their blocks may go, unless an operator pins them."""
        blocks = self._attached_to(tier, pages)
        held, barred = self.held[tier], self.barred[tier]
        kept = self.blocks.pinned.take(blocks)
        lead = (self.children[tier].take(blocks) > 0) & ~self.blocks.lax.take(blocks) | kept
        self.going[tier] += int(np.count_nonzero(held.take(blocks))) - int(np.count_nonzero(kept))
        self.tips[tier] += int(np.count_nonzero(barred.take(blocks))) - int(np.count_nonzero(lead))
        held[blocks], barred[blocks] = kept, lead

    def _sweep(self, tier: int, pages: Ids, draft: PlanBuilder) -> None:
        """Frees those doomed pages that have no pins."""
        pages = pages[self.tiers[tier].pins[pages] == 0]
        if len(pages):
            self._free(tier, pages, self.tiers[tier].doom[pages], draft)

    def _free(self, tier: int, pages: Ids, reasons: Column, draft: PlanBuilder) -> None:
        pages_of = self.tiers[tier]
        blocks = pages_of.block[pages].astype(np.int64)
        draft.free(self._freed(tier, pages, blocks, reasons))
        bad = pages_of.fault[pages] > 0
        if some(bad):
            pages_of.withhold(pages[bad], draft.now)
            pages = pages[~bad]
        pages_of.give_back(pages)
        blocks = blocks[blocks >= 0]
        if len(blocks):
            np.subtract.at(self.blocks.places, blocks, 1)
            blocks = distinct(blocks)
            self.blocks.fade(blocks[self.blocks.places[blocks] == 0])

    def _freed(self, tier: int, pages: Ids, blocks: Ids, reasons: Column) -> StructArray:
        """FREED, counted. blocks: of the pages."""
        pages_of = self.tiers[tier]
        self.freed_by_reason += np.bincount(reasons, minlength=len(Reason))
        out = np.zeros(len(pages), FREED)
        pages_of.extents(pages, out["extent"])
        out["reason"] = reasons
        is_known = blocks >= 0
        out["was_ready"] = (pages_of.state[pages] >= PageState.READY) & is_known
        if some(is_known):
            at = slice(None) if every(is_known) else true_rows(is_known)
            for name in ("namespace", "last_used", "declined"):
                out[name][at] = getattr(self.blocks, name)[blocks[at]]
            out["hash"][at] = self.blocks.hash.take(blocks[at], axis=0).view(np.uint8)
        return out
