"""How much of a stored prefix a source of pages loads, and how much its engine computes.

Blocks on a store are loaded only if that is expected to be faster (`tierd.client.advice`). An
acquire asks for this first, by a lookup, while one of the last LOOKS acquires found blocks on a
store. Other acquires load what they find: a lookup takes half as long as an acquire of near blocks.
Declined blocks are prefetched: the daemon reads them beside the computing, for the next request.
This module handles no pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tierd.client import Client, Found, OpenedNamespace
from tierd.client.advice import NOTHING, Blocks, Claim, EngineAdvice
from tierd.client.match import Match
from tierd.client.values import Hashes
from tierd.errors import TierdError

LOOKS = 32
"""Acquires that look up first, after one that found blocks on a store."""
DECLINED_LIMIT = 1 << 16
"""Names of declined blocks that are remembered until they are computed."""
MEMORY = ("device", "host")
"""Kinds of tiers that cost nothing to load from."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Leading blocks to acquire. tokens: of them. declined: stored tokens beyond them."""

    hashes: Hashes
    tokens: int
    claimed: Claim = NOTHING
    declined: int = 0


class Advisor:
    """Of one source. One caller thread.

    is_late: The last load was given up, so the next acquire takes nothing from stores.
    waited_s: Seconds that the pass waited for layers.
    declined: Names of blocks that were left on a store, until they are computed.
    """

    def __init__(self, client: Client, namespace: OpenedNamespace, *, is_on: bool) -> None:
        self.advice = EngineAdvice(is_on=is_on)
        self._client, self._namespace, self._is_on = client, namespace, is_on
        self._looks, self.is_late, self.waited_s = LOOKS, False, 0.0
        self.declined = set[bytes]()

    def computed(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """As `PageSource.computed`."""
        waited_s, self.waited_s = self.waited_s, 0.0
        if self._is_on:
            self.advice.computed(parts, seconds - waited_s)

    def worth(self, hashes: Hashes, count: int, *, held: int, prompt: int, layers: int) -> Worth:
        """How much of the first `count` tokens to acquire.

        Args:
            hashes: Of their blocks.
            held: Leading tokens that the caller has. The result is empty if no more are worth it.
            prompt: Tokens of the request.
            layers: Of the model, if the caller waits for them one by one; else 1.

        Raises:
            TierdError: As Client.lookup.
        """
        if not (self._is_on and self._looks and count):
            return Worth(hashes, count)
        found = self._client.lookup(self._namespace, hashes, tokens=count, intent="none")
        claimed, tokens = NOTHING, found.tokens
        self._looks -= 1
        if self.note(found.tier_tokens):
            claimed = self._claimed(found, held, prompt=prompt, layers=layers)
            for computed in self.advice.take_computed():
                self._client.note_computed(computed.request, computed.tokens, times=computed[2:])
            tokens = min(tokens, held + claimed.tokens)
            if tokens < found.tokens:
                self._decline(hashes[: self._blocks(found.tokens)], found.tokens, self._blocks(tokens))
        kept = tokens if tokens > held else 0
        return Worth(hashes[: self._blocks(kept)], kept, claimed, found.tokens - tokens)

    def note(self, tier_tokens: Sequence[int]) -> bool:
        """Notes where an acquire or a lookup found its tokens; whether some are on a store."""
        names = zip(self._client.tiers, tier_tokens, strict=False)
        is_far = any(tokens and not name.startswith(MEMORY) for name, tokens in names)
        self._looks = LOOKS if is_far else self._looks
        return is_far

    def _claimed(self, found: Found, held: int, *, prompt: int, layers: int) -> Claim:
        """The advisor's decision. A short last block counts as a whole one."""
        size = self._namespace.spec.tokens_per_block
        if self.is_late:
            found = replace(found, paces=tuple(pace and replace(pace, wait_s=math.inf) for pace in found.paces))
        whole = self._blocks(found.tokens) * size
        match = Match(whole, held, max(whole, prompt) + 1)  # of a prompt that is held, a token is computed again
        return self.advice.claim(match, found, Blocks(size, self._namespace.spec.block_bytes / size, layers=layers))

    def _decline(self, hashes: Hashes, tokens: int, kept: int) -> None:
        """hashes: of the found blocks, which have so many tokens. kept: leading ones that are loaded."""
        if len(self.declined) + len(hashes) > DECLINED_LIMIT:  # of requests that were not computed
            self.declined.clear()
        self.declined.update(map(bytes, hashes[kept:]))
        with suppress(TierdError):  # a busy daemon prefetches nothing
            self._client.prefetch(self._namespace, hashes, tokens=tokens)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._namespace.spec.tokens_per_block)
