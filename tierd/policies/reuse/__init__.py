"""The learning of `reuse-index`: past requests (traffic, ghosts) and what blocks are worth
(learner)."""

from tierd.policies.reuse.traffic import Traffic

__all__ = ["Traffic"]
