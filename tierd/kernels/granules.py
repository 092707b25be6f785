"""Chosen granules of 64 tokens in plain array operations: bounds of keys, scores, top-k, hot slots.

A context that is larger than the GPU's memory lies in host memory. A decode step attends to the
granules whose keys may fit its query best (Quest, arXiv 2406.10774, sections 3.2 and 3.3). Their
keys and values are copied into a hot buffer, which keeps them for later steps. Bounds, `scores` and
`choose` run on numpy and torch alike; `HotBuffer` is numpy. `sparse` has the same as kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from tierd.errors import InvalidArgument

Array = Any
"""A numpy array or a torch tensor."""
GRANULE_TOKENS = 64
ABSENT = -1
"""In `HotBuffer.where`: the granule is in no slot. In `HotBuffer.owners`: the slot is free."""
ROUNDED_BITS = 16
"""Of a float32, what a bf16 has not."""


def bounds(keys: Array) -> Array:
    """The least and greatest key per channel and granule, rounded outward to bf16.

    keys: [tokens, kv_heads, head_dim]; the last granule may be partial. Returns float32 [granules,
    kv_heads, 2, head_dim], of values that bf16 has. Bounds of a channel with a NaN are NaN.
    """
    xp, tokens = array_namespace(keys), keys.shape[0]
    granules = -(-tokens // GRANULE_TOKENS)
    # The last token again and again in place of those that are missing.
    order = xp.clip(xp.arange(granules * GRANULE_TOKENS, device=device(keys)), max=max(0, tokens - 1))
    each = xp.reshape(xp.astype(keys[order], xp.float32), (granules, GRANULE_TOKENS, *keys.shape[1:]))
    least, greatest = xp.min(each, axis=1), xp.max(each, axis=1)
    return xp.stack([-_rounded_up(-least), _rounded_up(greatest)], axis=2)


@np.errstate(invalid="ignore", over="ignore")
def scores(q: Array, limits: Array) -> Array:
    """Upper bounds of the products of a token's query heads with the keys of each granule.

    q: [q_heads, head_dim], scaled or not. limits: [granules, kv_heads, 2, head_dim], as `bounds`
    returns them. Returns float32 [kv_heads, granules]: of each kv head's query heads the greatest
    sum over channels of max(q, 0) * greatest + min(q, 0) * least. It is +inf where a bound is not
    finite, so no such granule is hidden. Sums are rounded, so it holds up to rounding. Raises
    InvalidArgument.
    """
    xp, (_, kv_heads, _, dim) = array_namespace(q), limits.shape
    if q.ndim != 2 or q.shape[1] != dim or q.shape[0] % kv_heads:
        raise InvalidArgument(
            f"q: has shape {list(q.shape)}; wanted a multiple of {kv_heads} kv heads, and {dim} channels"
        )
    grouped = xp.reshape(xp.astype(q, xp.float32), (kv_heads, -1, dim))
    none = xp.zeros_like(grouped)
    least, greatest = (xp.permute_dims(xp.astype(limits[:, :, side], xp.float32), (1, 2, 0)) for side in (0, 1))
    each = xp.matmul(xp.maximum(grouped, none), greatest) + xp.matmul(xp.minimum(grouped, none), least)
    return xp.max(xp.where(xp.isnan(each), math.inf, each), axis=1)


def choose(scores: Array, k: int, *, forced_first: int = 1, forced_last: int = 0) -> Array:
    """The granules to attend to: the first and last ones, and those with the greatest scores.

    scores: [kv_heads, granules]; NaN counts as +inf. k: how many in all. Of equal scores the lower
    ordinal wins. Returns int32 [kv_heads, min(k, granules)], rising: `subsets` of an attention.
    Raises InvalidArgument if k has no room for the forced ones.
    """
    xp, (kv_heads, granules) = array_namespace(scores), scores.shape
    check_forced(k, forced_first, forced_last)
    if k >= granules:
        return xp.stack([xp.arange(granules, dtype=xp.int32, device=device(scores))] * kv_heads)
    middle = scores[:, forced_first : granules - forced_last]
    order = xp.argsort(xp.where(xp.isnan(middle), -math.inf, -middle), axis=1, stable=True)
    best = xp.sort(order[:, : k - forced_first - forced_last] + forced_first, axis=1)
    ends = [xp.arange(*span, device=device(scores)) for span in ((forced_first,), (granules - forced_last, granules))]
    first, last = (xp.astype(xp.stack([end] * kv_heads), best.dtype) for end in ends)
    return xp.astype(xp.concat([first, best, last], axis=1), xp.int32)


def check_forced(k: int, forced_first: int, forced_last: int) -> None:
    """Raises InvalidArgument."""
    if min(forced_first, forced_last) < 0 or k < max(1, forced_first + forced_last):
        raise InvalidArgument(
            f"k: {k} granules, of which the first {forced_first} and the last {forced_last} are forced; "
            "give at least 1, at least as many as are forced, and no negative number"
        )


@dataclass(frozen=True, slots=True)
class Resolved:
    """The hot slots of a step's chosen granules, in their order.

    slots: int32 [kv_heads, k]. is_miss: bool [kv_heads, k], those to copy into their slots first.
    """

    slots: NDArray[np.int32]
    is_miss: NDArray[np.bool_]


class HotBuffer:
    """Which granules of one sequence and layer are in its hot slots; a kv head has slots of its own.

    A miss takes the slot of a victim by CLOCK (Corbato, MIT Project MAC memo MAC-M-384, 1968): a
    hand goes around the slots. It passes a slot of this step's chosen granules. It passes a used
    slot once, and takes the use away. It stops at the first other slot.

    Slots of granules are in where, int32 [kv_heads, granules]. Granules of slots are in owners,
    int32 [kv_heads, slots]. Either may be ABSENT. used: bool [kv_heads, slots]. hands: int32
    [kv_heads], the slot to look at next.
    """

    def __init__(self, kv_heads: int, granules: int, slots: int) -> None:
        if min(kv_heads, granules, slots) < 1:
            raise InvalidArgument(
                f"hot buffer: {kv_heads} kv heads, {granules} granules, {slots} slots; give at least 1 of each"
            )
        self.where = np.full((kv_heads, granules), ABSENT, np.int32)
        self.owners = np.full((kv_heads, slots), ABSENT, np.int32)
        self.used = np.zeros((kv_heads, slots), np.bool_)
        self.hands = np.zeros(kv_heads, np.int32)

    def resolve(self, chosen: NDArray[np.int32]) -> Resolved:
        """Gives each chosen granule a slot. Raises InvalidArgument if there are fewer slots.

        chosen: int32 [kv_heads, k], each granule at most once. The caller fills the slots of misses
        before it attends to them.
        """
        kv_heads, slots = self.owners.shape
        if chosen.ndim != 2 or chosen.shape[0] != kv_heads or chosen.shape[1] > slots:
            raise InvalidArgument(
                f"chosen: has shape {list(chosen.shape)}; wanted {kv_heads} kv heads, and at most {slots} granules, one a slot"
            )
        found = np.take_along_axis(self.where, chosen, axis=1)
        is_miss = found == ABSENT
        for head in range(kv_heads):
            found[head, is_miss[head]] = self._replace(head, found[head, ~is_miss[head]], chosen[head, is_miss[head]])
        return Resolved(found, is_miss)

    def _replace(self, head: int, hits: NDArray[np.int32], misses: NDArray[np.int32]) -> NDArray[np.int32]:
        """Slots for one kv head's misses. The hand passes each slot at most twice: in the first
        round it takes unused ones, in the second those that it passed."""
        where, owners, used = self.where[head], self.owners[head], self.used[head]
        is_free = np.ones(len(owners), np.bool_)
        is_free[hits] = False
        around = np.roll(np.arange(len(owners), dtype=np.int32), -int(self.hands[head]))
        around = around[is_free[around]]
        order = np.concatenate([around[~used[around]], around[used[around]]])
        victims = order[: len(misses)]
        if len(misses):
            last = victims[-1]
            is_second = bool(used[last])
            passed = around if is_second else around[: int(np.argmax(around == last)) + 1]
            used[passed] = False
            self.hands[head] = (last + 1) % len(owners)
        evicted = owners[victims]
        where[evicted[evicted != ABSENT]] = ABSENT
        where[misses], owners[victims] = victims, misses
        used[victims] = used[hits] = True
        return victims


def _rounded_up(x: Array) -> Array:
    """float32 that bf16 has, at least x; NaN stays."""
    xp = array_namespace(x)
    bits = x.view(xp.int32)
    # Without its last bits a negative number is greater, and a positive one less.
    up = xp.where(x > 0, bits + ((1 << ROUNDED_BITS) - 1), bits) & ~((1 << ROUNDED_BITS) - 1)
    return xp.where(xp.isnan(x), x, up.view(xp.float32))
