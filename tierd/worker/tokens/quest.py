"""Quest: each query reads the pages that may matter most to it (arXiv 2406.10774, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.worker.tokens.policy import TokenPolicy, top


class Quest(TokenPolicy):
    """Reads the top pages by the bound of their scores. Nothing is dropped."""

    reads_pages = True

    def read(self, q: NDArray[np.floating], bounds: NDArray[np.float32]) -> list[Sequence[int]] | None:
        """The pages of one query; the one with its own token is always among them."""
        count = self.budget.of(len(bounds))
        if count == len(bounds):
            return None
        return list(top(group_scores(q, bounds), count, last=1).tolist())


def group_scores(q: NDArray[np.floating], bounds: NDArray[np.float32]) -> NDArray[np.floating]:
    """Of each kv head and page: [kv_heads, pages]. Arguments as `TokenPolicy.read`.

    A page's bound for a query head is the sum over channels of the greater of q * min and q * max.
    A kv head's query heads share its pages: each head's bounds are made weights that sum to 1.
    """
    heads = bounds.shape[1]
    grouped = q.reshape(heads, -1, 1, q.shape[-1])  # [kv_heads, group, 1, head_dim]
    least, most = bounds.transpose(2, 1, 0, 3)[:, :, None]  # [kv_heads, 1, pages, head_dim] each
    bound = np.maximum(grouped * least, grouped * most).sum(axis=-1)
    weights = np.exp(bound - bound.max(axis=-1, keepdims=True))
    total: NDArray[np.floating] = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=1)
    return total
