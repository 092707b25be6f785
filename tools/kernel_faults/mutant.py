"""A fault of the kernels, and the source files whose cases should notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DECODE, PREFILL, PAGES, MERGE, HASH, READ = "decode", "prefill", "pages", "merge", "hash", "read"


@dataclass(frozen=True)
class Mutant:
    """what: the fault. file: under cuda/src, where `old` stands once. unit: the source file whose cases should notice."""

    name: str
    what: str
    file: str
    old: str
    new: str
    unit: str

    def is_there(self, sources: Path) -> bool:
        """Whether its text stands in its file exactly once."""
        return (sources / "src" / self.file).read_text(encoding="utf-8").count(self.old) == 1
