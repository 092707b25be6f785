"""Calls to a disk: which are under way since when, and how many have failed.

Purpose: `Calls`, from which a tier says how it fares, and `outlast`. Non-purpose: what follows from it (`cache.breaker`). Invariants: times are the
loop's; a call is under way until its thread has come back, whoever has stopped waiting for it; only `Call.go_on` is for other threads than the loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tierd.tiers.tier import Health

Kind = Literal["read", "write"]
KINDS: tuple[Kind, ...] = ("read", "write")


class HangError(Exception):
    """As many calls as there may be are at the disk, and none has come back for long."""


@dataclass(eq=False, slots=True)
class Call:
    """One that is under way, or one after another by the same thread. begun: when the present one began."""

    kind: Kind
    begun: float

    def go_on(self, kind: Kind, begun: float) -> None:
        """The thread has come back from the disk and begins another call."""
        self.kind, self.begun = kind, begun


class Calls:
    """See the module. A sync counts as a write. unread: reads that failed since one has succeeded. stir: called when one begins."""

    def __init__(self) -> None:
        self.errors: dict[Kind, int] = {"read": 0, "write": 0}
        self.unread = 0
        self.stir: Callable[[], None] = lambda: None
        self._under_way: set[Call] = set()
        self._last_error = ""

    def begin(self, kind: Kind) -> Call:
        """A call is under way until `end`."""
        call = Call(kind, asyncio.get_running_loop().time())
        self._under_way.add(call)
        self.stir()
        return call

    def end(self, call: Call) -> None:
        """Its thread has come back."""
        self._under_way.discard(call)

    @contextmanager
    def one(self, kind: Kind) -> Iterator[None]:
        """While a call is under way."""
        call = self.begin(kind)
        try:
            yield
        finally:
            self.end(call)

    def fail(self, kind: Kind, error: str) -> None:
        """A call has failed, for good: what is tried again in smaller parts has not."""
        self._last_error = error
        self.errors[kind] += 1
        self.unread += kind == "read"

    def health(self, *, fault: str) -> Health:
        """As `WatchedTier.health`."""
        return Health(
            fault=fault,
            last_error=self._last_error,
            read_errors=self.errors["read"],
            write_errors=self.errors["write"],
            unread=self.unread,
            calls=len(self._under_way),
            read_age_s=self.age_s("read"),
            write_age_s=self.age_s("write"),
        )

    def age_s(self, *kinds: Kind) -> float:
        """Of the oldest call under way, of these kinds or all; 0.0: there is none."""
        begun = [call.begun for call in self._under_way if not kinds or call.kind in kinds]
        return asyncio.get_running_loop().time() - min(begun) if begun else 0.0


async def outlast(work: asyncio.Future[None]) -> None:
    """Awaits its end, also when cancelled meanwhile: its threads have the caller's memory."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    work.result()
