"""A load: blocks go from a lease's pages into an engine's memory.

`EngineStore.load` carries it out. Blocks of a codec are copied first and decoded after the lease
was checked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tierd.client import Group, Lease
from tierd.client.blocks.copying import sum_and_copy
from tierd.integrations.coding import Codings, Engine, Target
from tierd.integrations.pieces import Bytes, Pieces, copy_out, rows_out


@dataclass(frozen=True, slots=True)
class Loaded:
    """tokens: served and copied, over all groups. good: per group, good blocks from the first requested.
    first: per group, leading blocks not needed and not copied.
    tier_tokens: by the position of the tier that had them."""

    tokens: int = 0
    good: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    tier_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Filled:
    """copied: per group, the blocks from its first one on. coded: encoded blocks, in memory of their own."""

    copied: list[int]
    coded: list[tuple[Engine, Target]]


def fill(
    lease: Lease,
    groups: Sequence[Group],
    targets: Sequence[Sequence[Pieces | None]],
    codings: Codings,
    stream: Any = None,
) -> Filled:
    """Copies the wanted blocks of a lease. stream: as for `EngineStore.load`. Raises InvalidArgument."""
    views = iter(lease.views())
    blocks, filled = list[tuple[Bytes, Pieces]](), Filled([], [])
    for group, leased, pieces in zip(groups, lease.groups, targets, strict=True):
        engine = codings.of(group.namespace.spec)
        for index in range(leased.count):
            view, wanted = next(views), pieces[leased.first + index]
            if wanted is not None and engine is not None:
                tokens = int(leased.handles["tokens"][0, index])
                filled.coded.append((engine, Target(index, view.copy(), wanted, tokens)))
            elif wanted is not None:
                blocks.append((view, wanted))
        filled.copied.append(leased.first + leased.count)
    _copy(blocks, stream)
    return filled


def _copy(blocks: Sequence[tuple[Bytes, Pieces]], stream: Any) -> None:
    rows = rows_out(blocks)
    if rows is not None:
        sum_and_copy(rows)
        return
    with _on(stream):
        for page, pieces in blocks:
            copy_out(page, pieces, is_awaited=stream is None)
    if stream is not None:
        stream.synchronize()


def _on(stream: Any) -> Any:
    """Around copies that a stream orders; None: each copy has ended when its call returns."""
    if stream is None:
        return nullcontext()
    import torch  # noqa: PLC0415

    return torch.cuda.stream(stream)


def decoded(filled: Filled, good: int, codings: Codings, *, until: float) -> list[int]:
    """Decodes the blocks before `good`. Returns the numbers, in their groups, of those that cannot
    be, or not before `until` (of time.monotonic())."""
    valid = [(engine, target) for engine, target in filled.coded if target.index < good]
    done = codings.each(lambda each: time.monotonic() < until and each[0].decode(each[1]), valid)
    return [target.index for (_, target), is_good in zip(valid, done, strict=True) if not is_good]


def loaded_of(lease: Lease, copied: Sequence[int], good: int) -> Loaded:
    """The blocks that are good: those before `good` in each group."""
    first = tuple(group.first for group in lease.groups)
    whole = good >= max((group.count for group in lease.groups), default=0)
    if whole:
        return Loaded(lease.tokens, tuple(copied), first, lease.tier_tokens)
    if len(lease.groups) == 1:
        return Loaded(lease.tokens_of(good), (lease.groups[0].first + good,), first, lease.tier_tokens)
    return Loaded(good=(0,) * len(lease.groups))
