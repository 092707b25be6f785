"""What the policy `reuse-index` knows: what was asked for (ghosts, requests) and what that makes blocks worth (learner)."""
