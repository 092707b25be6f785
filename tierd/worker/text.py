"""Text for models whose tokens are bytes.

Purpose: enough to talk to a byte-level model (ids 0 to 255, then a first-token id) with no tokenizer at hand. Non-purpose: any
other vocabulary: bring the model's own tokenizer and pass ids.
"""

from __future__ import annotations

from collections.abc import Sequence

BYTE_BOS = 256
"""Begins every sequence."""

BYTE_EOS = 257
"""Ends one."""


def encode_bytes(text: str) -> tuple[int, ...]:
    """The first token, then the UTF-8 bytes."""
    return (BYTE_BOS, *text.encode())


def decode_bytes(tokens: Sequence[int]) -> str:
    """The text of the byte tokens; others are left out, broken UTF-8 is replaced."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")
