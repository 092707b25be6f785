"""How much of a match an engine is told of: the one place where it can be bounded.

Purpose: every integration asks `claim` before it says "so many tokens need not be computed". Non-purpose: finding the match. Invariant: never more than was
found, never the last token of a prompt, always whole blocks. A decision whether loading beats computing belongs here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """found: tokens from the start of the sequence that tierd could serve; computed: those that the engine has already; prompt: those that it was asked for;
    tier_tokens: of `found`, by the position of the tier where they lie."""

    found: int
    computed: int
    prompt: int
    tier_tokens: tuple[int, ...] = ()


def claim(match: Match, *, tokens_per_block: int, least_tokens: int = 0) -> int:
    """Tokens beyond `computed` that are worth loading: whole blocks, at least one token of the prompt left to compute; 0 below least_tokens."""
    usable = min(match.found, match.prompt - 1) // tokens_per_block * tokens_per_block
    gain = max(0, usable - match.computed)
    return gain if gain >= max(1, least_tokens) else 0
