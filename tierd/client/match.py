"""Bounds how much of a match an engine learns of.

Every integration calls `claim` before it reports how many tokens need no computation; it does not
find the match itself. The result never exceeds the match, never includes a prompt's last token, and
is whole blocks. Whether loading beats computing is decided in `advice.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A lookup's result. tierd could serve the first `found` tokens of the sequence. The engine
    already has `computed` of them; its prompt has `prompt`. tier_tokens splits `found` by tier
    position. request: the engine's id."""

    found: int
    computed: int
    prompt: int
    tier_tokens: tuple[int, ...] = ()
    request: str = ""


def claim(match: Match, *, tokens_per_block: int, least_tokens: int = 0) -> int:
    """Tokens beyond `computed` worth loading; 0 below least_tokens. Whole blocks; at least one
    token of the prompt remains to compute."""
    usable = min(match.found, match.prompt - 1) // tokens_per_block * tokens_per_block
    gain = max(0, usable - match.computed)
    return gain if gain >= max(1, least_tokens) else 0
