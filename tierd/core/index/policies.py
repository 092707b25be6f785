"""Makes the policies of a core: the one seam for exchangeable parts.

Contracts are in eviction.py and admission.py, names in `tierd.policies.named`.
"""

from __future__ import annotations

from typing import Protocol

from tierd.core.admission import Admission
from tierd.core.eviction import Eviction, Listener
from tierd.core.formats.model import TierSpec
from tierd.core.index.blocks import Blocks


class Policies(Protocol):
    """Makes the policies of one core. They may read its blocks' columns anew in each call."""

    def eviction(self, spec: TierSpec, blocks: Blocks) -> Eviction:
        """The policy of a tier; called near to far."""
        ...

    def admission(self, spec: TierSpec, blocks: Blocks) -> Admission:
        """The policy of an nvme tier; called near to far, after `eviction`."""
        ...

    def listener(self, blocks: Blocks) -> Listener | None:
        """Learns of requests before the policies, if any uses it; called after the policies were made."""
        ...

    def retire(self, policy: Eviction | Admission) -> None:
        """The core uses this policy no longer."""
        ...
