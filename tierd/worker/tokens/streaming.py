"""StreamingLLM: the first tokens and a window of the last ones (arXiv 2309.17453, section 3.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.worker.tokens.policy import TokenPolicy

SINKS = 4
"""Tokens that are always kept; the paper's number."""


class Streaming(TokenPolicy):
    """Keeps the sinks and the last tokens. Positions are those inside the cache."""

    sinks = SINKS
    least = SINKS + 1

    def keep(self, held: int, seen: int) -> NDArray[np.int64] | None:
        """Slots to keep, the same for each kv head."""
        count = self.budget.of(seen, prompt=self.place.prompt, least=self.least)
        if held <= count:
            return None
        kept = np.r_[:SINKS, held - (count - SINKS) : held]
        return np.tile(kept, (self.place.kv_heads, 1))
