"""Calls to a disk: those in flight, their ages, and counts of failures.

A tier reports its health from `Calls`; `cache.breaker` acts on it. Times are the loop's. A call is
in flight until its thread has returned, even if its caller stopped waiting. Only `Call.go_on` may
be called by other threads than the loop's.
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
    """The disk has its maximum number of calls, and none has returned for long."""


@dataclass(eq=False, slots=True)
class Call:
    """A call in flight, or a series by one thread. begun: start of the present one."""

    kind: Kind
    begun: float

    def go_on(self, kind: Kind, begun: float) -> None:
        """The thread returned from the disk and begins another call."""
        self.kind, self.begun = kind, begun


class Calls:
    """Calls to one disk. A sync counts as a write. unread: failed reads since the last success.
    stir: called when one begins."""

    def __init__(self) -> None:
        self.errors: dict[Kind, int] = {"read": 0, "write": 0}
        self.unread = 0
        self.stir: Callable[[], None] = lambda: None
        self._under_way: set[Call] = set()
        self._last_error = ""

    def begin(self, kind: Kind) -> Call:
        """Begin a call, in flight until `end`."""
        call = Call(kind, asyncio.get_running_loop().time())
        self._under_way.add(call)
        self.stir()
        return call

    def end(self, call: Call) -> None:
        """The call's thread has returned."""
        self._under_way.discard(call)

    @contextmanager
    def one(self, kind: Kind) -> Iterator[None]:
        """A call in flight during the block."""
        call = self.begin(kind)
        try:
            yield
        finally:
            self.end(call)

    def fail(self, kind: Kind, error: str) -> None:
        """Count a call that failed for good, not one that is retried in smaller parts."""
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
        """Age of the oldest call in flight, of these kinds or all; 0.0 if there is none."""
        begun = [call.begun for call in self._under_way if not kinds or call.kind in kinds]
        return asyncio.get_running_loop().time() - min(begun) if begun else 0.0


async def outlast(work: asyncio.Future[None]) -> None:
    """Await the end of work even when cancelled, since its threads use the caller's memory."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    work.result()
