"""Quest: each query reads the pages that may matter most to it (arXiv 2406.10774, section 3.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.worker.tokens.policy import ReadingPolicy


class Quest(ReadingPolicy):
    """Reads the pages with the greatest bounds of their attention."""

    def scores_of(self, q: NDArray[np.floating], bounds: NDArray[np.float32]) -> NDArray[np.floating]:
        """Scores [kv_heads, pages].

        A part's bound for a query head sums, over channels, the greater of q * min and q * max.
        Query heads of one kv head share its pages, as kernels take them. So each query head's
        bounds become weights that sum to 1; weights of parts and of query heads are added.
        """
        heads = bounds.shape[2]
        grouped = q.reshape(heads, -1, 1, 1, q.shape[-1])  # [kv_heads, group, 1, 1, head_dim]
        least, most = bounds.transpose(3, 2, 0, 1, 4)[:, :, None]  # [kv_heads, 1, pages, parts, head_dim]
        bound = np.maximum(grouped * least, grouped * most).sum(axis=-1)
        weights = np.exp(bound - bound.max(axis=(-2, -1), keepdims=True)).sum(axis=-1)
        total: NDArray[np.floating] = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=1)
        return total
