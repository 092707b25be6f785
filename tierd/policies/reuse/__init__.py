"""The learning of `reuse-index`: past requests (traffic, ghosts) and blocks' worth (learner)."""

from tierd.policies.reuse.traffic import Traffic

__all__ = ["Traffic"]
