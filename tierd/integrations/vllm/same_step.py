"""Loads in the step that computes with them, on the scheduler's side.

vLLM puts a request's blocks into its prefix cache when it allocates them. Here they are loaded
when the step begins, and the load may fail. Then vLLM computes the request again, but it leaves the
blocks in the cache, and other requests may hit them meanwhile. So the blocks leave the cache until
the step has reported. Blocks that the step completes are saved after it. Workers
of other ranks would not learn in time that a load has failed.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool

PARAMETERS = {"request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id"}
"""Of BlockPool.cache_full_blocks, as it is called here."""


@dataclass
class StepLoad:
    """A request whose blocks of one group are loaded in its step.

    entry: the scheduler's.
    ids: all its blocks. first: number of the first that is loaded.
    ready: tokens computed after the step.
    ended: its blocks and tokens, if it ended before the step had reported.
    """

    entry: Any
    ids: tuple[int, ...]
    first: int
    ready: int = 0
    ended: tuple[Sequence[Sequence[int]], int] | None = None

    def hide(self, pool: BlockPool) -> None:
        """Takes its unconfirmed blocks out of vLLM's prefix cache."""
        pool.evict_blocks(set(self.ids[self.first :]))

    def show(self, pool: BlockPool, block_tokens: int) -> None:
        """Puts its full blocks back, which are good."""
        full = min(len(self.ids), min(self.ready, self.entry.request.num_tokens) // block_tokens)
        self.hide(pool)
        pool.cache_full_blocks(
            request=self.entry.request,
            blocks=[pool.blocks[i] for i in self.ids],
            num_cached_blocks=self.first,
            num_full_blocks=full,
            block_size=block_tokens,
            kv_cache_group_id=0,
        )

    def has_failed(self, bad: Collection[int]) -> bool:
        """Whether one of its blocks is among the bad ones."""
        return not set(bad).isdisjoint(self.ids[self.first :])


def can_confirm_later() -> bool:
    """Whether this vLLM's block pool lets blocks leave its cache and return."""
    return (
        hasattr(BlockPool, "evict_blocks")
        and set(inspect.signature(BlockPool.cache_full_blocks).parameters) >= PARAMETERS
    )
