"""One mutation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """`what` is the promise that it breaks. tests: arguments for pytest, the quickest that should
    fail."""

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def is_there(self, root: Path) -> bool:
        """Whether its text is in its file exactly once."""
        path = root / self.file
        return path.exists() and path.read_text(encoding="utf-8").count(self.old) == 1
