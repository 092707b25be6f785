"""The learning of `reuse-index`: past requests (traffic, key history) and blocks' worth (learner)."""

from tierd.policies.reuse.traffic import Traffic

__all__ = ["Traffic"]
