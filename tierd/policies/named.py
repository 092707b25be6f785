"""Policies by the names in the tiers' specs, over one Traffic for all that learn.

A daemon and a simulation make them alike. The dicts of the families define the names.
"""

from __future__ import annotations

from tierd.core.admission import Admission
from tierd.core.eviction import Eviction, Listener
from tierd.core.formats.model import TierSpec
from tierd.core.index.blocks import Blocks
from tierd.policies.admission import ADMISSION
from tierd.policies.admission.learned import Learned
from tierd.policies.eviction import EVICTION
from tierd.policies.eviction.duel import Duel
from tierd.policies.reuse import Traffic
from tierd.policies.reuse.learner import Learner


class NamedPolicies:
    """Keeps `tierd.core.index.policies.Policies`. One object serves one core."""

    def __init__(self, learner: Learner | None = None) -> None:
        """learner: the state of a previous run."""
        self._learner = learner
        self.traffic: Traffic | None = None

    def eviction(self, spec: TierSpec, blocks: Blocks) -> Eviction:
        """Makes the policy that `spec.eviction` names."""
        if spec.eviction == "reuse-index":
            return Duel(blocks, self._shared(blocks), spec.kind)
        return EVICTION[spec.eviction](blocks)

    def admission(self, spec: TierSpec, blocks: Blocks) -> Admission:
        """Makes the policy that `spec.admission` names."""
        if spec.admission != "learned":
            return ADMISSION[spec.admission](spec, blocks, None)
        traffic = self._shared(blocks)
        policy = Learned(spec, blocks, traffic.chance)
        if spec.wear_bytes_per_s > 0:
            traffic.thresholds.append(policy.price)
        return policy

    def listener(self, blocks: Blocks) -> Listener | None:
        """The Traffic, if a policy uses it."""
        return self.traffic

    def retire(self, policy: Eviction | Admission) -> None:
        """Takes a policy's observers out of the Traffic."""
        if isinstance(policy, Duel):
            policy.end()
        elif isinstance(policy, Learned) and self.traffic and policy.price in self.traffic.thresholds:
            self.traffic.thresholds.remove(policy.price)

    def _shared(self, blocks: Blocks) -> Traffic:
        if self.traffic is None:
            self.traffic = Traffic(blocks, self._learner)
        return self.traffic
