"""Tuning: what an operator changes while a core runs: specs, shares, policies, wear budgets.

A spec keeps its kind, index and size of segments. Another eviction policy gets the tier's blocks in
pieces (`space/handover.py`). Another admission policy begins anew, with the budget's level of the
old one. A tier is resized by whole segments (`index/resizing.py`):

    open_places --> set_spec                                        more capacity
    close_places --> save, evict, end_closed, until none is closing --> keep_places --> set_spec
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tierd.core.admission import Balance
from tierd.core.eviction import Eviction, heeding
from tierd.core.formats.model import PageState, TierSpec
from tierd.core.index import resizing
from tierd.core.index.index import Index
from tierd.core.index.policies import Policies
from tierd.core.plan import Ids, Plan
from tierd.core.plan_builder import PlanBuilder
from tierd.core.requests.leases import GONE, Holder, Holders
from tierd.core.space.demotion import Demotion
from tierd.core.space.handover import Handover
from tierd.errors import InvalidArgument


class Tuning:
    """Of one core."""

    def __init__(self, index: Index, sessions: Holders, demotion: Demotion, policies: Policies) -> None:
        self._index, self._sessions, self._demotion, self._policies = index, sessions, demotion, policies

    def set_session_share(self, share: float) -> None:
        """The share of a tier that one session may pin and reserve. It keeps its pages."""
        self._sessions.set_share(share)

    def set_spec(self, tier: int, spec: TierSpec, now: float) -> bool:
        """Gives a tier another spec. True: a handover to another eviction policy begins; call
        `hand_over` until it ends.

        Raises InvalidArgument while a handover of the tier is under way.
        """
        index, old = self._index, self._index.tiers[tier].spec
        if isinstance(index.policies[tier], Handover):
            raise InvalidArgument(f"{spec.name}.eviction: a change is under way; set it again when it has ended")
        index.tiers[tier].spec = spec
        resizing.bound_quarantine(index.tiers[tier])
        self._sessions.set_share(self._sessions.share)
        if tier in index.admissions and _admission_of(spec) != _admission_of(old):
            self._set_admission(tier, spec, now)
        if spec.eviction == old.eviction:
            return False
        self._set_policy(tier, Handover(index.policies[tier], self._policies.eviction(spec, index.blocks)))
        return True

    def tracked(self, tier: int, blocks: Ids) -> Ids:
        """Those of the blocks that have a page in the tier, in any state."""
        return blocks[self._index.attached(tier, blocks) >= 0]

    def hand_over(self, tier: int, blocks: Ids, now: float) -> int:
        """Gives the new policy these blocks, from cold to hot; without any, the next uses that came
        meanwhile. Returns how many uses are left. With none left, such a call ends the handover."""
        change = self._index.policies[tier]
        assert isinstance(change, Handover), f"tier {tier}: no handover is under way"
        if len(blocks):
            change.give(self.tracked(tier, blocks), now)
        elif change.uses_left:
            change.give(self.tracked(tier, change.take_uses()), now)
        else:
            assert len(change.new) == len(change.old), f"tier {tier}: a block was not handed over"
            self._policies.retire(change.old)
            self._set_policy(tier, change.new)
        return change.uses_left

    def is_handing_over(self, tier: int) -> bool:
        """Whether a handover of the tier is under way."""
        return isinstance(self._index.policies[tier], Handover)

    def open_places(self, tier: int, count: int) -> None:
        """Gives a tier room for so many more segments."""
        resizing.grow(self._index.tiers[tier], count)

    def used_places(self, tier: int) -> list[int]:
        """The places of a tier with a segment."""
        return [place for place, segment in enumerate(self._index.tiers[tier].segments) if segment is not None]

    def rank(self, tier: int, place: int) -> tuple[bool, float]:
        """Whether a place in use has pinned or reserved pages, and the last use of its blocks: the
        least rank is the best to close."""
        pages_of, blocks = self._index.tiers[tier], self._index.blocks
        if pages_of.segments[place] is None:
            return False, 0.0
        at = pages_of.pages_of(place)
        is_held = (pages_of.pins[at] > 0) | (pages_of.state[at] == PageState.RESERVED)
        held = pages_of.block[at]
        return bool(is_held.any()), float(blocks.last_used[held[held >= 0]].max(initial=0.0))

    def close_places(self, tier: int, count: int, order: Sequence[int]) -> None:
        """Takes so many places from a tier: vacant ones first, then those in use, in this order.
        They close when their segment is empty."""
        resizing.shrink(self._index.tiers[tier], count, order)

    def closing(self, tier: int) -> list[int]:
        """The places that are still closing. Quarantined pages there are freed."""
        pages_of = self._index.tiers[tier]
        resizing.free_bad(pages_of)
        return sorted(pages_of.closing)

    def blocks_at(self, tier: int, place: int) -> Ids:
        """The readable blocks of a place, from cold to hot."""
        pages_of, found = self._index.tiers[tier], self._index.blocks
        if pages_of.segments[place] is None:
            return np.zeros(0, np.int64)
        blocks = pages_of.block[pages_of.pages_of(place)].astype(np.int64)
        pages = self._index.readable(tier, blocks)
        blocks = blocks[(pages >= 0) & (pages_of.place[pages] == place)]
        return np.asarray(blocks[np.lexsort((-found.position[blocks].astype(np.int64), found.last_used[blocks]))])

    def save(self, tier: int, blocks: Ids, now: float) -> Plan:
        """Writes to the next tier what is in this one alone, as demotion does."""
        draft = PlanBuilder(now)
        self._demotion.save(tier, blocks, draft)
        return draft.plan()

    def keep_places(self, tier: int) -> int:
        """Gives up closing the places that are still in use. Returns how many there are."""
        return resizing.keep(self._index.tiers[tier])

    def holders(self, tier: int) -> list[int]:
        """The sessions with pinned or reserved pages in segments that are closing."""
        pages_of = self._index.tiers[tier]

        def pages_held(session: Holder) -> Iterator[int]:
            yield from session.pinned[tier]
            for held in session.reservations.values():
                here = (held.tiers == tier) & (held.state != GONE)
                yield from (page for page in (*held.pages[here].tolist(), *held.staging[here].tolist()) if page >= 0)

        sessions = self._sessions.open.values()
        return [s.id for s in sessions if any(int(pages_of.place[page]) in pages_of.closing for page in pages_held(s))]

    def end_closed(self, tier: int) -> list[int]:
        """Segments of closed places whose memory may be freed; each is returned once."""
        return resizing.end_closed(self._index.tiers[tier])

    def wear_balance(self, tier: int, now: float) -> Balance:
        """State of an nvme tier's wear budget."""
        return self._index.admissions[tier].balance(now)

    def resume_wear(self, tier: int, *, level_bytes: float, now: float) -> None:
        """Sets an nvme tier's wear budget to its level in the previous run, before any write."""
        self._index.admissions[tier].resume(level_bytes, now)

    def _set_policy(self, tier: int, policy: Eviction) -> None:
        index = self._index
        index.policies[tier] = policy
        index.heeding = heeding(index.policies)
        index.listener = self._policies.listener(index.blocks)

    def _set_admission(self, tier: int, spec: TierSpec, now: float) -> None:
        """Blocks that the old one declined are asked about again."""
        index, old = self._index, self._index.admissions[tier]
        new = index.admissions[tier] = self._policies.admission(spec, index.blocks)
        new.resume(old.balance(now).level_bytes, now)
        self._policies.retire(old)
        index.listener = self._policies.listener(index.blocks)
        index.blocks.declined[: index.blocks.top] = 0


def _admission_of(spec: TierSpec) -> tuple[str, float, float]:
    return spec.admission, spec.wear_bytes_per_s, spec.wear_burst_s
