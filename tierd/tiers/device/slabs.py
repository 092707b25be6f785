"""Device memory of a tier's segments: slabs in use, and spare ones made ahead.

It supplies memory to `SegmentBooks` over a GPU process, which may end and be replaced (`cuda.py`
does that).

A slab is zeroed before its descriptor arrives here. A segment that must be fresh gets no slab that
another process may have seen. The descriptor kept here keeps the memory alive while no process maps
it; it is closed once. All functions but `take` and `discard` run in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from tierd.errors import InvalidArgument, Overloaded, TierFailed
from tierd.failpoint import failpoint
from tierd.gpu.process import GpuProcess
from tierd.gpu.protocol import GpuFacts

TAKE_S = 120.0
"""Limit for a segment's slab, many times one call's, since missing slabs are made in turn."""


@dataclass(frozen=True, slots=True)
class Slab:
    """number: its id in GPU processes; fd: keeps it alive."""

    number: int
    fd: int


class Slabs:
    """Slabs of one tier. places: their limit. Made in the event loop's thread."""

    def __init__(self, *, name: str, segment_bytes: int, places: int) -> None:
        self.gpu: GpuProcess | None = None
        """The process that makes slabs; None while none runs."""
        self.shortage = ""
        """Why some slabs are missing, for people; empty if none is."""
        self._name, self._segment_bytes = name, segment_bytes
        self._unmade, self._next_number = places, 1
        self._spares: deque[Slab] = deque()
        self._used: dict[int, Slab] = {}
        self._dropped: deque[int] = deque()
        self._making = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._errands: set[asyncio.Task[None]] = set()

    async def hand_over(self, gpu: GpuProcess) -> GpuFacts:
        """Start a GPU process over the existing slabs; it makes later ones.

        Raises Unsupported, Overloaded, TierFailed, OSError.
        """
        lent: dict[int, tuple[int, int]] = {}
        with ExitStack() as ends:
            for slab in (*self._used.values(), *self._spares):
                # A duplicate: a slab may be discarded meanwhile, and its descriptor's number
                # reused.
                fd = os.dup(slab.fd)
                ends.callback(os.close, fd)
                lent[slab.number] = (fd, self._segment_bytes)
            facts = await gpu.start(slabs=lent)
        self.gpu = gpu
        return facts

    async def fill(self) -> None:
        """Make missing slabs while the GPU has room, else set `shortage`. Raises TierFailed."""
        async with self._making:
            await self._drop()
            while self._unmade and await self._make():
                pass

    def find_ready(self, segment: int) -> Slab | None:
        """A spare slab, now the segment's, or None if none is ready."""
        if not self._spares:
            return None
        slab = self._used[segment] = self._spares.popleft()
        return slab

    def take(self, segment: int) -> Slab:
        """A slab for the segment, for other threads. Raises TierFailed, after TAKE_S at the latest."""
        taking = asyncio.run_coroutine_threadsafe(self._take(segment), self._loop)
        try:
            return taking.result(TAKE_S)
        except TimeoutError:
            taking.cancel()  # a slab that is made later serves the next request
            raise TierFailed(
                f"{self._name}: the GPU made no slab within {TAKE_S:g} s; tierd tries again; look at dmesg"
            ) from None

    def rename(self, old: int, new: int) -> None:
        """Move the slab of one segment to another."""
        self._used[new] = self._used.pop(old)

    def discard(self, segment: int) -> None:
        """Discard a segment's slab. Processes that map it keep its bytes. Works in any thread."""
        slab = self._used.pop(segment)
        os.close(slab.fd)
        self._loop.call_soon_threadsafe(self._lost, slab.number)

    async def close(self) -> None:
        """Discard all slabs."""
        for errand in list(self._errands):
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)
        for slab in (*self._used.values(), *self._spares):
            os.close(slab.fd)
        self._used.clear()
        self._spares.clear()

    def _lost(self, number: int) -> None:
        self._dropped.append(number)
        self._unmade += 1
        task = self._loop.create_task(self._refill())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _refill(self) -> None:
        with suppress(TierFailed):  # the next request for a slab retries
            await self.fill()

    async def _take(self, segment: int) -> Slab:
        if not self._spares and segment not in self._used:
            await self.fill()
        slab = self._used.get(segment) or self.find_ready(segment)
        if slab is None:
            raise TierFailed(f"{self._name}: {self.shortage or 'every slab is in use; the plan asks for one more'}")
        return slab

    async def _drop(self) -> None:
        """Have the GPU process forget discarded slabs first: they may occupy all the room."""
        while self._dropped and self.gpu is not None:
            failpoint("cuda.slab.before_drop")
            with suppress(TierFailed, Overloaded, InvalidArgument):  # a new process never knew it
                await self.gpu.drop(self._dropped.popleft())

    async def _make(self) -> bool:
        """Make one more spare slab; False if there was no room. Raises TierFailed."""
        if self.gpu is None:
            raise TierFailed(f"{self._name}: no GPU process runs that could make a slab; it is started again soon")
        number = self._next_number
        self._next_number += 1
        try:
            fd = await self.gpu.make(number, self._segment_bytes)
        except Overloaded as error:
            self.shortage = (
                f"{self._unmade} of its slabs of {self._segment_bytes} bytes have no room on the GPU ({error})"
            )
            return False
        failpoint("cuda.slab.before_spare")
        self._unmade -= 1
        self._spares.append(Slab(number, fd))
        self.shortage = ""
        return True
