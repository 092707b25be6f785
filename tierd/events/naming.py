"""Reads an engine's names of blocks from the message of a put.

The functions are pure and do not check whether the blocks are stored. Invalid fields raise
InvalidArgument. Valid names fit together: one for each block, all of one length, and as many tokens
as the blocks cover.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.core.formats.block import Namespace
from tierd.core.formats.model import HASH_BYTES, PUT_BLOCK, ROOT
from tierd.errors import InvalidArgument
from tierd.events.payloads import NAME_BYTES_MAX
from tierd.events.router_view import Names, Space


def names_of(group: pb.PutGroup, namespace: Namespace) -> Names:
    """Names of a group of valid blocks: the engine's, else tierd's. Raises InvalidArgument."""
    space, blocks = space_of(namespace), np.frombuffer(group.blocks, dtype=PUT_BLOCK)
    if not blocks["hash"].any():
        return Names(space, b"", 0)  # private pages: their blocks are not known yet
    covered, per_block = int(blocks["tokens"].sum()), group.engine_per_block or 1
    width = _width(group, count=len(blocks) * per_block)
    if per_block > 1 and (not group.engine_hashes or space.size % per_block):
        raise InvalidArgument(
            f"group.engine_per_block: {per_block} for blocks of {space.size} tokens; send engine_hashes, and a divisor"
        )
    if len(group.token_ids) not in (0, 4 * covered):
        raise InvalidArgument(
            f"group.token_ids: {len(group.token_ids)} bytes for {covered} tokens; send a u32 for each, or none"
        )
    parent = group.engine_parent if group.engine_hashes else group.parent if group.parent != ROOT else b""
    hashes = np.ascontiguousarray(blocks["hash"]).tobytes()
    return Names(space, hashes, covered, group.engine_hashes, width, per_block, parent, group.token_ids)


@lru_cache(maxsize=1024)
def space_of(namespace: Namespace) -> Space:
    """A namespace as routers see it."""
    spec = namespace.spec
    group = int(spec.group) if spec.group.isdecimal() else None
    return Space(namespace.id, spec.tokens_per_block, spec.rank_count, spec.adapter or None, group)


def _width(group: pb.PutGroup, *, count: int) -> int:
    if not group.engine_hashes:
        return HASH_BYTES
    width, rest = divmod(len(group.engine_hashes), count)
    if rest or not 1 <= width <= NAME_BYTES_MAX or len(group.engine_parent) > NAME_BYTES_MAX:
        raise InvalidArgument(
            f"group.engine_hashes: {len(group.engine_hashes)} bytes for {count} blocks of the engine, parent {len(group.engine_parent)};"
            f" send hashes of equal length, 1 to {NAME_BYTES_MAX} bytes"
        )
    return width
