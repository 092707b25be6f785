"""Synthetic traffic, of the kinds on which policies differ, and a core that it is played to.

Purpose: a policy's hits on puts, gets, and gets that put their misses. Non-purpose: traces
(`tierctl simulate`), bytes, sockets. Sizes are in blocks and in multiples of the tiers', so
patterns suit tiers of any size. Invariant: a pattern depends only on its arguments and its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tierd.core.core import Core
from tierd.core.formats.model import TierKind, TierSpec
from tierd.core.instant_driver import InstantDriver
from tierd.core.instant_driver import Sequence as Chain
from tierd.core.plan import Ids
from tierd.policies.named import NamedPolicies

PAGE = 4096
TOKENS = 16
MIX = 0x9E37_79B9_7F4A_7C15
Verb = Literal["put", "get", "use"]
"""use: a get, and a put of its misses, as an engine does."""


@dataclass(frozen=True, slots=True)
class Step:
    """blocks: of a chain by number, first to last; a number identifies a block and all before it."""

    verb: Verb
    blocks: Ids
    tenant: int = 1


Pattern = Callable[[int, np.random.Generator], Iterator[Step]]
"""(blocks of the contended tier, dice) -> steps."""


def chain(number: int, length: int) -> Ids:
    """The blocks of chain `number`; chains of one pattern have one length."""
    return np.arange(number * length, (number + 1) * length)


def put_then_get(
    size: int, _: np.random.Generator, *, share: float = 1 / 16, rounds: int = 40, length: int = 4
) -> Iterator[Step]:
    """A batch of fresh chains is put, then read once; then the next batch."""
    count, fresh = max(1, int(share * size / length)), 0
    for _round in range(rounds):
        batch = [chain(fresh + number, length) for number in range(count)]
        fresh += count
        for verb in ("put", "get"):
            yield from (Step(verb, blocks) for blocks in batch)  # type: ignore[arg-type]


def loop(size: int, _: np.random.Generator, *, share: float, uses: int = 8, length: int = 8) -> Iterator[Step]:
    """The same chains, one after another, over and over."""
    count = max(1, int(share * size / length))
    for number in range(max(3 * count, uses * size // length)):
        yield Step("use", chain(number % count, length))


def uniform(
    size: int, dice: np.random.Generator, *, share: float = 3.0, uses: int = 8, length: int = 4
) -> Iterator[Step]:
    """Any of some chains, each as likely."""
    count = int(share * size / length)
    for number in dice.integers(count, size=uses * size // length).tolist():
        yield Step("use", chain(number, length))


def zipf(
    size: int, dice: np.random.Generator, *, skew: float = 0.9, share: float = 8.0, uses: int = 8, length: int = 4
) -> Iterator[Step]:
    """Some chains much more often than others."""
    weights = 1 / np.arange(1, int(share * size / length) + 1) ** skew
    for number in dice.choice(len(weights), size=uses * size // length, p=weights / weights.sum()).tolist():
        yield Step("use", chain(number, length))


def scans(
    size: int, dice: np.random.Generator, *, hot: float = 0.5, scan: float = 0.75, rounds: int = 8, length: int = 4
) -> Iterator[Step]:
    """A hot set is in use; each round ends with a scan of chains that are never used again."""
    count, fresh = int(hot * size / length), size
    for _ in range(rounds):
        for number in dice.integers(count, size=size // length).tolist():
            yield Step("use", chain(number, length))
        for number in range(int(scan * size / length)):
            yield Step("use", chain(fresh + number, length))
        fresh += int(scan * size / length)


def phases(size: int, dice: np.random.Generator, *, length: int = 4) -> Iterator[Step]:
    """Zipf, a loop, puts and gets, a loop, uniform, Zipf again; each of separate chains."""
    parts: Sequence[Iterator[Step]] = (
        zipf(size, dice, uses=4, length=length),
        loop(size, dice, share=0.75, uses=4, length=length),
        put_then_get(size, dice, rounds=40, length=length),
        loop(size, dice, share=1.25, uses=3, length=length),
        uniform(size, dice, share=2.0, uses=4, length=length),
        zipf(size, dice, uses=4, length=length),
    )
    for number, part in enumerate(parts):
        yield from (Step(step.verb, step.blocks + number * (size << 12)) for step in part)


def threads(
    size: int, dice: np.random.Generator, *, count: int = 8, rounds: int = 400, length: int = 4
) -> Iterator[Step]:
    """Each of some threads puts a few chains, then gets them; in any order among the threads."""
    batch, fresh = max(1, size // (4 * count * length)), 0
    todo: list[list[Step]] = [[] for _ in range(count)]
    for thread in dice.integers(count, size=rounds * 2 * batch).tolist():
        if not todo[thread]:
            mine = [chain(fresh + number, length) for number in range(batch)]
            fresh += batch
            todo[thread] = [Step("get", blocks) for blocks in mine[::-1]] + [
                Step("put", blocks) for blocks in mine[::-1]
            ]
        yield todo[thread].pop()


def puts_again(
    size: int, dice: np.random.Generator, *, share: float = 2.0, rounds: int = 16, length: int = 4
) -> Iterator[Step]:
    """Chains are put again and again, whether they are held or not, and read soon after, if at all."""
    count = int(share * size / length)
    for number in dice.integers(count, size=rounds * size // length).tolist():
        yield Step("put", chain(number, length))
        if dice.random() < 0.5:
            yield Step("get", chain(max(0, number - int(dice.integers(3))), length))


def tenants(size: int, dice: np.random.Generator, *, count: int = 24, uses: int = 8, length: int = 4) -> Iterator[Step]:
    """Many tenants, each with its own working set and pace; some only write."""
    weights = 1 / np.arange(1, count + 1)
    fresh = 0
    for tenant in dice.choice(count, size=uses * size // length, p=weights / weights.sum()).tolist():
        if tenant % 3 == 2:
            fresh += 1
            yield Step("put", chain(size + fresh, length), tenant + 1)
        else:
            yield Step(
                "use", chain(int(dice.integers(1 + size // (4 * length * (1 + tenant % 4)))), length), tenant + 1
            )


PATTERNS: dict[str, Pattern] = {
    "put_get": put_then_get,
    "put_get_large": lambda size, dice: put_then_get(size, dice, share=0.6, rounds=8),
    **{
        f"loop_{share:g}": (lambda size, dice, share=share: loop(size, dice, share=share))
        for share in (0.5, 0.9, 1.0, 1.05, 1.25, 2.0, 5.0)
    },
    "uniform": uniform,
    "zipf_0.7": lambda size, dice: zipf(size, dice, skew=0.7),
    "zipf_1.1": lambda size, dice: zipf(size, dice, skew=1.1),
    "scans": scans,
    "phases": phases,
    "threads": threads,
    "puts_again": puts_again,
    "tenants": tenants,
}


class Player:
    """A core in which every transfer succeeds at once. found, asked: blocks of gets."""

    def __init__(self, specs: Sequence[TierSpec]) -> None:
        """specs: of its tiers."""
        self.core = Core(specs, policies=NamedPolicies(), session_share=1.0)
        self.driver = InstantDriver(self.core, tier_count=len(specs))
        self.found = self.asked = 0

    def play(self, step: Step, now: float) -> int:
        """Blocks found, from the beginning of the chain."""
        blocks = sequence(step)
        if step.verb == "put":
            self._release(self.driver._store(blocks, first=0, now=now), now)
            return 0
        tokens = sum(self.driver.request(blocks, now=now)) if step.verb == "use" else self._get(blocks, now)
        self.asked, self.found = self.asked + len(step.blocks), self.found + tokens // TOKENS
        return tokens // TOKENS

    def _get(self, blocks: Chain, now: float) -> int:
        got = self.core.acquire(1, groups=[blocks.group()], kind=TierKind.HOST, now=now)
        self.driver._run(got.plan, now)
        if got.lease:
            self.driver._run(self.core.settle(got.lease, now=now).plan, now)
        self._release(got.lease, now)
        return sum(got.tier_tokens)

    def _release(self, lease: int, now: float) -> None:
        if lease:
            self.driver._run(self.core.release(1, leases=[lease], now=now), now)
        self.driver.background(now)


def sequence(step: Step) -> Chain:
    """The step's chain as the driver takes it; hashes as evenly spread as real ones (splitmix64)."""
    words = np.zeros((len(step.blocks), 4), "<u8")
    for word in range(4):
        mixed = (step.blocks.astype(np.uint64) + np.uint64(1 + (word << 40))) * np.uint64(MIX)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        words[:, word] = mixed ^ (mixed >> np.uint64(31))
    return Chain(step.tenant, words.view(np.uint8), TOKENS * len(words), TOKENS, PAGE)


def hit_rate(pattern: Pattern, specs: Sequence[TierSpec], pace_s: float, *, seed: int = 0) -> float:
    """Per cent of the blocks of gets that hit, from the first step on; one step each pace_s
    seconds. The farthest tier is contended for."""
    player = Player(specs)
    size = specs[-1].capacity_bytes // (PAGE + specs[-1].slot_overhead_bytes)
    for number, step in enumerate(pattern(size, np.random.default_rng(seed))):
        player.play(step, number * pace_s)
    return 100 * player.found / max(1, player.asked)
