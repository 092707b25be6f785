"""Cases of the kernels' tests, run on the GPU: one result for each family."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tierd.errors import TierdError
from tools.gpu.bench import Bench
from tools.gpu.results import Check, Left, Result

SAID = 3
"""Cases that a failed check names."""
Case = tuple[Callable[..., None], Any]
"""A check that raises AssertionError, and its argument beside the library."""


def family(bench: Bench, library: Any, name: str, cases: Iterable[Case]) -> Result:
    """Runs all cases, or those that fit in the time."""
    right, wrong = 0, list[str]()
    for check, given in cases:
        if not bench.has_time():
            return _told(name, right, wrong, f"; no time was left after {right + len(wrong)}")
        try:
            check(library, given)
            right += 1
        except (AssertionError, TierdError) as error:
            wrong.append(str(error).strip().splitlines()[0])
    return _told(name, right, wrong, "")


def _told(name: str, right: int, wrong: list[str], more: str) -> Result:
    if wrong:
        return Check(
            name, passed=False, said=f"{len(wrong)} of {right + len(wrong)}: " + "; ".join(wrong[:SAID]) + more
        )
    return Check(name, passed=True, said=f"{right} cases{more}") if right else Left(name, "no time was left")
