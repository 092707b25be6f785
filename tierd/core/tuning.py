"""Tuning: what an operator changes while a core runs: specs, shares, policies, wear budgets.

A spec keeps its kind, index and segments. Another eviction policy gets the tier's blocks in pieces
(`index/handover.py`); another admission policy begins anew, with the budget's level of the old one.
"""

from __future__ import annotations

from tierd.core.admission import Balance
from tierd.core.eviction import Eviction, heeding
from tierd.core.formats.model import TierSpec
from tierd.core.index.handover import Handover
from tierd.core.index.index import Index
from tierd.core.index.policies import Policies
from tierd.core.plan import Ids
from tierd.core.requests.leases import Holders
from tierd.errors import InvalidArgument


class Tuning:
    """Of one core."""

    def __init__(self, index: Index, sessions: Holders, policies: Policies) -> None:
        self._index, self._sessions, self._policies = index, sessions, policies

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
