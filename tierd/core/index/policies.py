"""Where a core gets its policies from.

Purpose: one seam for all that can be exchanged. Non-purpose: the policies' own contracts (eviction.py, admission.py), and names (`tierd.policies.named`).
"""

from __future__ import annotations

from typing import Protocol

from tierd.core.admission import Admission
from tierd.core.eviction import Eviction, Listener
from tierd.core.formats.model import TierSpec
from tierd.core.index.blocks import Blocks


class Policies(Protocol):
    """Makes the policies of one core, all over its blocks, whose columns they may read anew in each call; what they share is made once."""

    def eviction(self, spec: TierSpec, blocks: Blocks) -> Eviction:
        """Of a tier; called near to far."""
        ...

    def admission(self, spec: TierSpec, blocks: Blocks) -> Admission:
        """Of an nvme tier; called near to far, after `eviction`."""
        ...

    def listener(self, blocks: Blocks) -> Listener | None:
        """What hears of requests before policies do, if any of them goes by that; called once, last."""
        ...
