"""What the policy `reuse-index` knows: what was asked for (traffic, ghosts) and what that makes blocks worth (learner)."""

from tierd.policies.reuse.traffic import Traffic

__all__ = ["Traffic"]
