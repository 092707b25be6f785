"""Splits calls of more than PART_BLOCKS blocks, counted over ranks and groups, into parts.

So a prompt may have any length, and no part delays other clients for long. One call is in
asking.py. Parts start at the first token. A part ends at a block boundary of every group. If a part
was not served or stored whole, the SDK stops there, because later blocks are useless without it.
Groups that need no prefix cannot be split; they get one call of the largest size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.advisor.pace import Pace
from tierd.client.blocks import buffers
from tierd.client.blocks.lease import Lease
from tierd.client.blocks.writing import Write, kept
from tierd.client.transport import replies
from tierd.client.values import Found, GetResult, Group, OpenedNamespace, Prefetch, PutResult, Target
from tierd.core.formats.model import PAGE_ALIGN_BYTES, BlockStatus, Need

if TYPE_CHECKING:
    from tierd.client.blocks.asking import Asking

SHARE = 4
"""A part that holds its blocks takes at most 1/SHARE of the bytes that the session may hold."""
PART_BLOCKS = 1 << 11
"""Blocks of a part, if the daemon accepts as many. It works 3 us on a put's block, 1 us on a get's."""


def lookup(verbs: Asking, groups: Sequence[Group], deadline: float, *, intent: int = 0) -> Found:
    """How much could be served."""
    parts = _parts(verbs, groups, deadline)
    if parts[0] is groups:
        return verbs.found(groups, deadline, intent=intent)
    got, tier_of, is_whole, paces, begun = GetResult(), [], True, tuple[Pace | None, ...](), list[int]()
    for part in parts:
        found = verbs.found(part, deadline, intent=intent)
        begun += found.prefetch.numbers
        tier_of.append(found.tier_of)
        paces = found.paces or paces
        if is_whole:
            got = got.followed_by(GetResult(found.tokens, tier_tokens=found.tier_tokens))
        is_whole &= found.tokens == _tokens_of(part)
    tiers = [np.concatenate(each, axis=1) for each in zip(*tier_of, strict=True)]
    left = [len(group.hashes) - its.shape[1] for group, its in zip(groups, tiers, strict=True)]  # not looked up
    padded = (np.pad(its, ((0, 0), (0, n)), constant_values=-1) for its, n in zip(tiers, left, strict=True))
    return Found(got.tokens, tuple(padded), got.tier_tokens, paces, Prefetch.of(0, begun))


def prefetch(verbs: Asking, groups: Sequence[Group], target: str | Target, deadline: float) -> Prefetch:
    """Starts a prefetch."""
    begun = [verbs.begun(part, target, deadline) for part in _parts(verbs, groups, deadline)]
    return Prefetch.of(sum(begun), [number for each in begun for number in each.numbers])


def acquire(verbs: Asking, groups: Sequence[Group], tier: str, deadline: float, *, by_layer: bool) -> Lease:
    """A lease on the servable prefix of the first part."""
    parts = _parts(verbs, groups, deadline, is_one=True)
    return verbs.leased(parts[0], tier, deadline, by_layer=by_layer)


def get(verbs: Asking, group: Group, out: Any, deadline: float) -> GetResult:
    """The servable prefix. A copied part is released before the next part is requested."""
    has_ranks = len(group.ranks) > 1  # their blocks are ordered by rank
    parts = _parts(verbs, [group], deadline, is_one=has_ranks, is_held=True)
    if len(parts) == 1 or has_ranks:
        return verbs.got(parts[0][0], out, deadline)[0]
    got = GetResult()
    for (part,) in parts:
        more, lengths = verbs.shrunk(
            lambda part=part, out=out: verbs.got(part, out, deadline),  # type: ignore[misc]
            lambda: (GetResult(), ()),
        )
        got, out = got.followed_by(more), buffers.after(out, lengths)
        if more.blocks < len(part.hashes):
            break
    return got


def put(verbs: Asking, write: Write) -> PutResult:
    """Stores blocks. After a failed part, later blocks get the status of its first failed block."""
    count = len(write.sources)
    limit = _limit(verbs, [write.group.namespace], count, write.deadline)
    limit = _held(verbs, write.group.namespace, count, limit)
    if count <= limit:
        return kept(verbs, write)
    statuses = replies.all_statuses(count, BlockStatus.FAILED)
    for first in range(0, count, limit):
        stop = min(first + limit, count)
        part = replace(write, group=write.group.part(first, stop), sources=write.sources[first:stop])
        done = verbs.shrunk(
            lambda part=part: kept(verbs, part),  # type: ignore[misc]
            lambda first=first, stop=stop: PutResult(statuses[first:stop]),  # type: ignore[misc]
        )
        statuses[first:stop] = done.statuses
        if not done:
            statuses[stop:] = done.statuses[done.stored]
            break
    return PutResult(statuses)


def _limit(verbs: Asking, spaces: Sequence[OpenedNamespace], count: int, deadline: float) -> int:
    """Maximum blocks of one call."""
    link = verbs.connector.link
    if link is None or count > link.batch_blocks:
        link = verbs.opened(spaces, deadline)
    return link.batch_blocks


def _held(verbs: Asking, namespace: OpenedNamespace, count: int, limit: int) -> int:
    """Maximum blocks of a call that holds its blocks. A prompt larger than the session's limit
    goes in parts of a quarter (1/SHARE) of that limit. Other calls of the session hold pages
    too, and a put may take two pages for a block."""
    link, each = verbs.connector.link, max(PAGE_ALIGN_BYTES, namespace.spec.block_bytes)
    limit, share_bytes = min(limit, PART_BLOCKS), link.share_bytes if link else 0
    return max(1, min(limit, share_bytes // SHARE // each)) if 0 < share_bytes < count * each else limit


def _parts(
    verbs: Asking, groups: Sequence[Group], deadline: float, *, is_one: bool = False, is_held: bool = False
) -> list[Sequence[Group]]:
    """The groups of each call, in order. is_held: each call holds its blocks.

    is_one: the caller makes only the first call, with as many blocks as the daemon accepts. Groups
    that need no prefix are one call too, because their end decides whether they hit.
    """
    ranks = [max(1, len(group.ranks)) for group in groups]
    count = sum(len(group.hashes) * n for group, n in zip(groups, ranks, strict=True))
    limit = _limit(verbs, [group.namespace for group in groups], count, deadline)
    is_one = is_one or any(group.need != Need.PREFIX for group in groups)
    if not is_one:
        limit = _held(verbs, groups[0].namespace, count, limit) if is_held else min(limit, PART_BLOCKS)
    if count <= limit:
        return [groups]
    sizes = [group.namespace.spec.tokens_per_block for group in groups]
    step = math.lcm(*sizes)
    stride = max(1, limit // sum(step // size * n for size, n in zip(sizes, ranks, strict=True))) * step
    stop = max(map(_tokens_of, ([group] for group in groups)))
    starts = range(0, 1 if is_one else stop, stride)
    return [
        [group.part(at // size, (at + stride) // size) for group, size in zip(groups, sizes, strict=True)]
        for at in starts
    ]


def _tokens_of(groups: Sequence[Group]) -> int:
    return min(group.namespace.tokens_in(len(group.hashes), tokens=group.tokens) for group in groups)
