"""A tier gets more places, or fewer, while it works.

A place that shall go is *closing*: its segment gives no page any more, and its blocks leave as the
caller decides. Once the segment is empty the place is *closed*: it begins no segment, and its
memory may be freed. Places keep their numbers. A tier that grows opens closed places first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierd.core.formats.model import DAEMON
from tierd.core.index.pages import Pages


def grow(pages: Pages, count: int) -> None:
    """Opens so many more places."""
    old = set(sorted(pages.closed)[:count])
    pages.closed -= old
    first, more = len(pages.segments), count - len(old)
    pages.segments += [None] * more
    pages.last_id += [None] * more
    pages.last_writer += [DAEMON] * more
    pages.last_domain += [0] * more
    pages.by_place.lengthen()
    pages.files.lengthen(more)
    pages.place_table = np.concatenate((pages.place_table, np.zeros((more, 3), np.int64)))
    pages.retiring = np.concatenate((pages.retiring, np.zeros(more, np.int64)))
    pages.bad = np.concatenate((pages.bad, np.zeros(more, np.int64)))
    pages.vacant |= old | set(range(first, first + more))


def shrink(pages: Pages, count: int, order: Sequence[int]) -> None:
    """Closes so many places: vacant ones first, then empty ones, then those in use in this order."""
    closed = [*sorted(pages.barred, reverse=True), *sorted(pages.vacant, reverse=True)][:count]
    pages.barred.difference_update(closed)
    pages.vacant.difference_update(closed)
    pages.closed.update(closed)
    count -= len(closed)
    empty = [place for place in pages.idle if place not in pages.failing]
    used = [place for place in order if pages.segments[place] is not None and place not in pages.idle]
    for place in (*empty, *used)[:count]:
        pages.closing.add(place)
        pages.failing.add(place)
        pages.vacate_idle(place)


def free_bad(pages: Pages) -> None:
    """Frees the quarantined pages of closing places: their memory goes."""
    bad = [page for page in pages.quarantine if int(pages.place[page]) in pages.closing]
    _acquit(pages, bad)


def bound_quarantine(pages: Pages) -> None:
    """Sets the bound of the quarantine by the tier's spec. Above it the oldest pages are freed."""
    pages.quarantine_bytes = int(pages.spec.quarantine_share * pages.spec.capacity_bytes)
    while pages.quarantined_bytes > pages.quarantine_bytes:
        _acquit(pages, [min(pages.quarantine, key=lambda page: pages.quarantine[page].since)])


def _acquit(pages: Pages, bad: list[int]) -> None:
    for page in bad:
        del pages.quarantine[page]
    pages.give_back(np.asarray(bad, np.int64))


def keep(pages: Pages) -> int:
    """The places that are still closing stay. Returns how many there are."""
    kept, pages.closing = pages.closing, set()
    pages.failing -= kept
    return len(kept)


def end_closed(pages: Pages) -> list[int]:
    """The segments that ended at closed places and were not returned yet: their memory may go."""
    ended = []
    for place in pages.closed:
        if (segment := pages.last_id[place]) is not None:
            ended.append(segment)
            pages.last_id[place] = None
            pages.holders.pop(segment, None)
            pages.spots.pop(place, None)
    return ended
