"""Calls to a disk: which are under way since when, and how many have failed.

Purpose: `Calls`, from which a tier says how it fares, and `outlast`. Non-purpose: what follows from it (`cache.breaker`). Invariants: used on the event loop
alone; times are the loop's; a call is under way until its thread has come back, whoever has stopped waiting for it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

Kind = Literal["read", "write"]


class Calls:
    """See the module. A sync counts as a write. unread: reads that failed since one has succeeded."""

    def __init__(self) -> None:
        self.errors: dict[Kind, int] = {"read": 0, "write": 0}
        self.unread = 0
        self._begun: dict[Kind, dict[int, float]] = {"read": {}, "write": {}}
        self._number = itertools.count()

    @contextmanager
    def one(self, kind: Kind) -> Iterator[None]:
        """While a call is under way."""
        number = next(self._number)
        self._begun[kind][number] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._begun[kind][number]

    def fail(self, kind: Kind) -> None:
        """A call has failed, for good: what is tried again in smaller parts has not."""
        self.errors[kind] += 1
        self.unread += kind == "read"

    def age_s(self, *kinds: Kind) -> float:
        """Of the oldest call under way, of these kinds or all; 0.0: there is none."""
        begun = [min(self._begun[kind].values()) for kind in kinds or self._begun if self._begun[kind]]
        return asyncio.get_running_loop().time() - min(begun) if begun else 0.0


async def outlast(works: Sequence[asyncio.Future[None]]) -> None:
    """Awaits every one to its end, also when cancelled meanwhile: their threads have the caller's memory."""
    cancelled: asyncio.CancelledError | None = None
    while not all(work.done() for work in works):
        try:
            await asyncio.wait(works)
        except asyncio.CancelledError as error:
            cancelled = error
    for work in works:
        work.result()
    if cancelled is not None:
        raise cancelled
