"""A fault of the kernels, and the source file whose cases should detect it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DECODE, PREFILL, PAGES, MERGE, HASH, READ = "decode", "prefill", "pages", "merge", "hash", "read"
ROT_DECODE, ROT_PAGES, SPARSE = "rot_decode", "rot_pages", "sparse"


@dataclass(frozen=True)
class Mutant:
    """`what` is the fault. file: under cuda/src, with `old` once in it. unit: the source file whose
    cases should detect it."""

    name: str
    what: str
    file: str
    old: str
    new: str
    unit: str

    def is_there(self, sources: Path) -> bool:
        """Whether its text is in its file exactly once."""
        return (sources / "src" / self.file).read_text(encoding="utf-8").count(self.old) == 1
