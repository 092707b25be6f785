"""How many tokens of a sequence can be served, over groups and ranks.

Pure arithmetic over held blocks. A plain model is one group with one rank. A group serves N tokens
if all ranks hold every block that its need names:
    PREFIX       all blocks that cover [0, N)
    LAST_TOKENS  all blocks that cover [max(0, N - need_tokens), N)
    LAST_STATE   the block that ends at N
The answer is the greatest N that all groups serve. For any need, the N that a group serves form
closed intervals that end at a block's end. So only the ends of blocks are tried, and 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import among, distinct, every
from tierd.core.formats.model import HASH_BYTES, Need
from tierd.core.plan import Bools, GroupQuery, Ids
from tierd.errors import InvalidArgument


class Span(NamedTuple):
    """Blocks first to stop - 1 of a group."""

    first: int
    stop: int


def check_groups(groups: Sequence[GroupQuery]) -> None:
    """Raises InvalidArgument for an impossible question."""
    if not groups:
        raise InvalidArgument("groups: none; ask for at least one")
    for number, group in enumerate(groups):
        shape = group.hashes.shape
        if len(shape) != 2 or shape[1] != HASH_BYTES:
            raise InvalidArgument(f"groups[{number}].hashes: shape {shape} instead of (blocks, {HASH_BYTES})")
        if not group.namespaces:
            raise InvalidArgument(f"groups[{number}].namespaces: none; name one per rank")
        if group.tokens_per_block < 1 or group.tokens < 0 or group.need_tokens < 0:
            raise InvalidArgument(
                f"groups[{number}]: {group.tokens} tokens in blocks of {group.tokens_per_block}, the last "
                f"{group.need_tokens} needed; give counts of 0 or more, and at least 1 token per block"
            )
        if shape[0] != -(-group.tokens // group.tokens_per_block):
            raise InvalidArgument(
                f"groups[{number}].hashes: {shape[0]} blocks of {group.tokens_per_block} tokens do not cover exactly "
                f"{group.tokens} tokens; give one hash per block"
            )


def ends(group: GroupQuery) -> Ids:
    """The end of each block, in tokens: int64 [blocks]."""
    stops = np.arange(1, len(group.hashes) + 1, dtype=np.int64) * group.tokens_per_block
    return np.minimum(stops, group.tokens)


def block_tokens(group: GroupQuery) -> Ids:
    """How many tokens each block covers: int64 [blocks]."""
    tokens = np.full(len(group.hashes), group.tokens_per_block, np.int64)
    tokens[-1:] = group.tokens - max(len(tokens) - 1, 0) * group.tokens_per_block
    return tokens


def longest(groups: Sequence[GroupQuery], there: Sequence[Bools]) -> int:
    """The greatest token count that every group can serve. there: bool [blocks] per group."""
    if len(groups) == 1 and groups[0].need == Need.PREFIX:
        return _prefix(groups[0], there[0])
    tried = ends(groups[0]) if len(groups) == 1 else distinct(np.concatenate([ends(group) for group in groups]))
    for group, have in zip(groups, there, strict=True):
        tried = tried[_serves(group, have, tried)]
    return int(tried[-1]) if len(tried) else 0


def needed(group: GroupQuery, tokens: int) -> Span:
    """The blocks needed to serve so many tokens."""
    if group.need == Need.PREFIX:
        return Span(0, -(-tokens // group.tokens_per_block))
    first, last = _bounds(group, np.asarray([tokens]))
    return Span(int(first[0]), int(last[0]))


def tier_tokens(group: GroupQuery, nearest: NDArray[np.int8], tokens: int, *, tiers: int) -> list[int]:
    """Per tier, tokens of the needed blocks that it is nearest for. nearest: int8 [blocks]."""
    first, stop = needed(group, tokens)
    tier = nearest[first:stop]
    out: list[int] = (np.bincount(tier, minlength=tiers) * group.tokens_per_block).tolist()
    if stop > first:  # the last block may be short
        out[int(tier[-1])] -= max(0, stop * group.tokens_per_block - group.tokens)
    return out


def _prefix(group: GroupQuery, there: Bools) -> int:
    held = len(there) if every(there) else int(np.argmin(there))
    return min(held * group.tokens_per_block, group.tokens)


def _bounds(group: GroupQuery, tokens: Ids) -> tuple[NDArray[Any], NDArray[Any]]:
    """First needed block and the one after the last, for each token count."""
    stop = -(-tokens // group.tokens_per_block)
    if group.need == Need.PREFIX:
        return np.zeros_like(stop), stop
    if group.need == Need.LAST_STATE:
        return np.maximum(stop - 1, 0), stop
    if group.need_tokens == 0:
        return stop, stop
    return np.maximum(tokens - group.need_tokens, 0) // group.tokens_per_block, stop


def _serves(group: GroupQuery, there: Bools, tokens: Ids) -> Bools:
    if group.need == Need.PREFIX:
        return np.asarray(tokens <= _prefix(group, there), bool)
    good = tokens <= group.tokens
    first, stop = _bounds(group, np.minimum(tokens, group.tokens))
    gaps = np.concatenate((np.zeros(1, np.int64), np.cumsum(~there)))
    good &= gaps[stop] == gaps[first]
    if group.need == Need.LAST_STATE:
        good &= among(tokens, ends(group))
    return np.asarray(good, bool)
