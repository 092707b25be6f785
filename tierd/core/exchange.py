"""Pages of blocks that leave, given at once to those for whom they leave.

Purpose: the common case of a full tier in fewer steps: what is given up is taken again in the same breath. Non-purpose: who leaves (room.py). Invariant: the books are
afterwards as if the pages had been given back and taken.
"""

from __future__ import annotations

import numpy as np

from tierd.core.model import PageState
from tierd.core.pages import PAGE_LIMIT, Pages
from tierd.core.plan import Ids
from tierd.core.sets import kinds

PAGE_BITS = PAGE_LIMIT.bit_length()


def order_given(pages_of: Pages, pages: Ids) -> Ids:
    """In which order the pages would be given: the lowest place, then the lowest slot."""
    order: Ids = ((pages_of.place[pages].astype(np.int64) << PAGE_BITS) | pages).argsort()
    return order


def is_exchangeable(pages_of: Pages, pages: Ids) -> bool:
    """Whether to give back ready pages of one key and to take as many of it would be to take the same: none of the key is free, none of them bad, and no segment ends with them."""
    if np.count_nonzero(pages_of.fault[pages]):
        return False
    places = pages_of.place[pages]
    for place in kinds(places):
        segment = pages_of.segments[place]
        assert segment is not None
        stays = segment.stays or pages_of.is_loading or np.count_nonzero(places == place) < segment.pages
        if segment.spare or not stays:
            return False
    return True


def exchange(pages_of: Pages, pages: Ids, generation: int) -> None:
    """ready -> reserved, with generations from `generation` on."""
    pages_of.move(pages, PageState.READY, PageState.RESERVED)
    pages_of.block[pages] = -1
    pages_of.length[pages] = 0
    pages_of.flags[pages] = 0
    pages_of.generation[pages] = np.arange(generation, generation + len(pages), dtype=np.uint64)
