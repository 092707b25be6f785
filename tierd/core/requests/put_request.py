"""A put's blocks, before they have pages.

Queries are checked and become one reservation without pages; puts.py finds held blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierd.core.arrays.sets import every
from tierd.core.formats.model import HASH_BYTES, NO_PAGE, PUT_BLOCK
from tierd.core.index.priorities import Priorities, said_by
from tierd.core.plan import PutQuery
from tierd.core.requests.leases import GONE, Reservation
from tierd.errors import InvalidArgument


def wish_of(groups: Sequence[PutQuery], *, session: int, domain: int, time_s: float) -> Reservation:
    """The queries as one reservation without pages. time_s: Unix time."""
    if not groups:
        raise InvalidArgument("groups: none; reserve at least one")
    wish = _blank(sum(len(group.blocks) for group in groups), session=session, domain=domain)
    start = 0
    for number, group in enumerate(groups):
        _check_put(number, group)
        rows = slice(start, start + len(group.blocks))
        start = rows.stop
        wish.namespaces[rows] = group.namespace
        wish.hash[rows] = group.blocks["hash"]
        if len(group.blocks):
            wish.parent[rows] = np.concatenate((np.frombuffer(group.parent, np.uint8)[None], group.blocks["hash"][:-1]))
        wish.positions[rows] = np.arange(group.position, group.position + len(group.blocks))
        wish.tokens[rows], wish.lengths[rows] = group.blocks["tokens"], group.blocks["length"]
        if group.priorities is not None:
            wish.said.codes[rows], wish.said.until_s[rows] = said_by(group.priorities, group.retention_s, time_s=time_s)
    return wish


def wish_ahead(group: PutQuery, *, puts: int, session: int, domain: int, time_s: float) -> Reservation:
    """As `wish_of` for so many equal queries, which name no block."""
    _check_put(0, group)
    count = len(group.blocks)
    wish = _blank(puts * count, session=session, domain=domain)
    wish.namespaces[:] = group.namespace
    wish.parent[::count] = np.frombuffer(group.parent, np.uint8)
    wish.positions.reshape(puts, count)[:] = np.arange(group.position, group.position + count)
    wish.tokens.reshape(puts, count)[:] = group.blocks["tokens"]
    wish.lengths.reshape(puts, count)[:] = group.blocks["length"]
    if group.priorities is not None:
        said = said_by(group.priorities, group.retention_s, time_s=time_s)
        wish.said.codes.reshape(puts, count)[:], wish.said.until_s.reshape(puts, count)[:] = said
    return wish


def _blank(count: int, *, session: int, domain: int) -> Reservation:
    return Reservation(
        id=0,
        session=session,
        domain=domain,
        namespaces=np.zeros(count, np.uint32),
        hash=np.zeros((count, HASH_BYTES), np.uint8),
        parent=np.zeros((count, HASH_BYTES), np.uint8),
        positions=np.zeros(count, np.uint32),
        tokens=np.zeros(count, np.uint32),
        lengths=np.zeros(count, np.uint32),
        said=Priorities.nothing(count),
        tiers=np.full(count, -1, np.int64),
        pages=np.full(count, NO_PAGE, np.int64),
        staging=np.full(count, NO_PAGE, np.int64),
        state=np.full(count, GONE, np.uint8),
    )


def _check_put(number: int, group: PutQuery) -> None:
    if group.blocks.dtype != PUT_BLOCK:
        raise InvalidArgument(f"groups[{number}].blocks: dtype {group.blocks.dtype}; give PUT_BLOCK")
    if len(group.parent) != HASH_BYTES:
        raise InvalidArgument(
            f"groups[{number}].parent: {len(group.parent)} bytes instead of {HASH_BYTES}; send zeros at the start"
        )
    if not every(group.blocks["length"] > 0):
        raise InvalidArgument(f"groups[{number}].blocks: a length of 0 bytes; give at least 1")
