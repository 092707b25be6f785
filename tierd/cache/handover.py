"""Gives a tier's blocks to another eviction policy, in pieces between which calls run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from tierd.core.core import Core
from tierd.core.plan import Ids

PIECE_BLOCKS = 1024
"""Blocks handed over at a time: under 5 ms for every policy."""
SORTED_HERE = 1 << 15
"""So many blocks are sorted in 2 ms; more in a thread."""


async def hand_over(core: Core, tier: int, now: Callable[[], float]) -> None:
    """Carries out the handover that `core.tuning.set_spec` began.

    First come the blocks by their last use, of equal ones the last of its sequence. Then come the
    uses of the meantime.
    """
    blocks = await _by_last_use(core, tier)
    for begun in range(0, len(blocks), PIECE_BLOCKS):
        core.tuning.hand_over(tier, blocks[begun : begun + PIECE_BLOCKS], now())
        await asyncio.sleep(0)
    none = blocks[:0]
    while core.tuning.is_handing_over(tier):
        goal = core.tuning.hand_over(tier, none, now()) // 2
        while core.tuning.is_handing_over(tier) and core.tuning.hand_over(tier, none, now()) > goal:
            pass
        await asyncio.sleep(0)


async def _by_last_use(core: Core, tier: int) -> Ids:
    found = [(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.uint32))]
    for piece in core.pieces():
        blocks = core.tuning.tracked(tier, piece)
        found.append((blocks, core.column("last_used", blocks), core.column("position", blocks)))
        await asyncio.sleep(0)
    blocks, used, positions = (np.concatenate(columns) for columns in zip(*found, strict=True))
    keys = (-positions.astype(np.int64), used)
    order = np.lexsort(keys) if len(blocks) <= SORTED_HERE else await asyncio.to_thread(np.lexsort, keys)
    return np.asarray(blocks[order], np.int64)
