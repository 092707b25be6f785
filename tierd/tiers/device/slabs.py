"""Device memory of a tier's segments: slabs in use, and spare ones made ahead.

Purpose: what `SegmentBooks` asks of memory, over a GPU process that may be gone and come back. Non-purpose: when another process is started (`cuda.py`), what
lies in a slab. Invariants: a slab was zeroed before its descriptor came here, and no slab that anybody else may have seen is given to a segment that must be fresh; the
descriptor kept here is what keeps the memory alive while no process maps it, and is closed once. All of it runs in the thread of the event loop but `take`.
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
"""For a segment's slab to come: many times the patience with one call, since those that are missing are made one after another."""


@dataclass(frozen=True, slots=True)
class Slab:
    """number: by which GPU processes know it; fd: what keeps it alive."""

    number: int
    fd: int


class Slabs:
    """Of one tier. name: of the tier; places: how many slabs there may be at once. Made in the thread of the event loop."""

    def __init__(self, *, name: str, segment_bytes: int, places: int) -> None:
        self.gpu: GpuProcess | None = None
        """Who makes them; None while there is nobody."""
        self.shortage = ""
        """Why not all of them are there, for people; empty if they are."""
        self._name, self._segment_bytes = name, segment_bytes
        self._unmade, self._next_number = places, 1
        self._spares: deque[Slab] = deque()
        self._used: dict[int, Slab] = {}
        self._dropped: deque[int] = deque()
        self._making = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._errands: set[asyncio.Task[None]] = set()

    async def hand_over(self, gpu: GpuProcess) -> GpuFacts:
        """Starts a GPU process over the slabs that there are; from now on it makes them. Raises Unsupported, Overloaded, TierFailed, OSError."""
        lent: dict[int, tuple[int, int]] = {}
        with ExitStack() as ends:
            for slab in (*self._used.values(), *self._spares):
                # Of its own: a slab may be given up meanwhile, and its descriptor's number be another file's.
                fd = os.dup(slab.fd)
                ends.callback(os.close, fd)
                lent[slab.number] = (fd, self._segment_bytes)
            facts = await gpu.start(slabs=lent)
        self.gpu = gpu
        return facts

    async def fill(self) -> None:
        """Makes what is missing, as far as the GPU has room; `shortage` tells the rest. Raises TierFailed."""
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
        """A slab, now the segment's: a spare one, or one made here. From another thread. Raises TierFailed, after TAKE_S at the latest."""
        taking = asyncio.run_coroutine_threadsafe(self._take(segment), self._loop)
        try:
            return taking.result(TAKE_S)
        except TimeoutError:
            taking.cancel()  # one that was made all the same is there when it is asked for again
            raise TierFailed(
                f"{self._name}: no slab came within {TAKE_S:g} s; it is tried again, look at dmesg"
            ) from None

    def rename(self, old: int, new: int) -> None:
        """The slab of one segment becomes that of another."""
        self._used[new] = self._used.pop(old)

    def discard(self, segment: int) -> None:
        """A segment's slab is given up: who maps it keeps its bytes, the place gets a new one. From any thread."""
        slab = self._used.pop(segment)
        os.close(slab.fd)
        self._loop.call_soon_threadsafe(self._lost, slab.number)

    async def close(self) -> None:
        """Gives all of them up."""
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
        with suppress(TierFailed):  # tried again by whoever needs a slab
            await self.fill()

    async def _take(self, segment: int) -> Slab:
        if not self._spares and segment not in self._used:
            await self.fill()
        slab = self._used.get(segment) or self.find_ready(segment)
        if slab is None:
            raise TierFailed(f"{self._name}: {self.shortage or 'every slab is in use; the plan asks for one more'}")
        return slab

    async def _drop(self) -> None:
        """What was given up is forgotten by the GPU process first: it may be all the room that there is."""
        while self._dropped and self.gpu is not None:
            failpoint("cuda.slab.before_drop")
            with suppress(TierFailed, Overloaded, InvalidArgument):  # another process never knew it
                await self.gpu.drop(self._dropped.popleft())

    async def _make(self) -> bool:
        """One more spare slab; whether there was room. Raises TierFailed."""
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
