"""The conversation of `tierd demo`: questions in turns about a long real text.

Each prompt begins with the whole conversation before it. The text is the sources of the Python
standard library, which every machine has. Prompts never exceed the model's positions.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BYTE_BOS = 256
"""The first token of every sequence of a model whose tokens are bytes."""

MODULES = ("heapq.py", "bisect.py", "textwrap.py", "queue.py", "functools.py", "contextlib.py", "statistics.py")
"""The text, in this order; it is cut at the length of a plan."""

BLOCK_TOKENS = 16
"""Tokens in a block of the worker's pages."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in tokens: the text of the first turn, the additions of later turns, and the answers.

    All are multiples of BLOCK_TOKENS. So each turn ends with a full block, and the next turn reuses
    blocks of a single tier. A turn's last token is generated but not computed.
    """

    first: int = 2000
    later: int = 32
    answer: int = 16

    @classmethod
    def within(cls, positions: int, *, turns: int) -> Plan:
        """The plan for a model of so many positions: the default, or one with a shorter first turn."""
        usual = cls()
        spent = turns * usual.answer + (turns - 1) * usual.later + 1
        return cls(first=min(usual.first, (positions - spent) // BLOCK_TOKENS * BLOCK_TOKENS))


class Conversation:
    """The conversation so far, in tokens of a byte-level model."""

    def __init__(self, plan: Plan, *, turns: int) -> None:
        self._plan = plan
        self._text = standard_text(plan.first + turns * plan.later)
        self._read = 0
        self.tokens: list[int] = [BYTE_BOS]

    def ask(self) -> tuple[int, ...]:
        """The next turn's prompt: the whole conversation, then the text's next passage."""
        step = self._plan.later if self._read else self._plan.first
        self.tokens += self._text[self._read : self._read + step]
        self._read += step
        return tuple(self.tokens)

    def add_answer(self, answer: Sequence[int]) -> None:
        """Adds an answer to the conversation."""
        self.tokens += answer


def standard_text(length: int) -> bytes:
    """So many bytes of the standard library's sources."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n\n".join((folder / name).read_bytes() for name in MODULES)
    assert len(text) >= length, "the modules are longer than any plan"
    return text[:length]
