"""Zeroing: the space of a store is written over once, ahead of its first blocks.

Purpose: a file system notes of space that was only set aside that nobody has written it, and must change that note with the first write to it, which makes
that write take twice as long; zeros that are written while the disk has nothing else to do spare the blocks that. Non-purpose: what lies there;
nobody reads it. Invariants: only space that holds nothing is written, in files of places where no segment lives; a step at a time, and who is
about to write blocks to a place waits for the step that is under way there (`leave`); a step that fails ends the work, and nothing is lost but speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tierd.tiers.io.calls import Calls
from tierd.tiers.store.slots import SlotFile
from tierd.tiers.store.store_files import OpenStore

STEP_BYTES = 4 << 20
"""Written at one time: what a block that comes meanwhile waits for."""
START_S = 1.0
"""After the store was opened."""
PAUSE_S = 0.1
"""Between two looks whether the disk is idle."""


class Zeroing:
    """See the module. is_free: whether no segment lives at a place. wrote: is told how many bytes each step has written."""

    def __init__(
        self, opened: OpenStore, calls: Calls, *, is_free: Callable[[int], bool], wrote: Callable[[int], None]
    ) -> None:
        self._opened, self._calls, self._is_free, self._wrote = opened, calls, is_free, wrote
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"tierd-{opened.name}-zeros")
        self._zeros = memoryview(mmap.mmap(-1, STEP_BYTES))
        self._place = -1
        self._step: asyncio.Future[range] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins in the background."""
        self._task = asyncio.create_task(self._run())

    async def leave(self, place: int) -> None:
        """Waits for what is under way at a place where a segment has begun; nothing comes after it."""
        if self._step is not None and self._place == place:
            await asyncio.wait([self._step])

    async def done(self) -> None:
        """Until nothing is left to do."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Ends after the step that is under way."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._step is not None:
            await asyncio.wait([self._step])
        self._threads.shutdown(wait=False)

    async def _run(self) -> None:
        await asyncio.sleep(START_S)
        try:
            for place in sorted(self._opened.files):
                at: int | None = 0
                while at is not None and self._is_free(place):
                    at = await self._go_on(place, at)
        except (OSError, RuntimeError) as error:  # the disk does not take it, or the system gives no thread
            self._opened.notices.append(
                f"{self._opened.name}: {self._opened.directory} could not be written ahead ({error}); check the disk"
            )

    async def _go_on(self, place: int, at: int) -> int | None:
        """Where the next step begins; None: there is none. Takes half of the time of a disk that is idle."""
        loop = asyncio.get_running_loop()
        if self._calls.age_s():
            await asyncio.sleep(PAUSE_S)
            return at
        begun, file = loop.time(), self._opened.files[place]
        with self._calls.one("write"):
            self._place, self._step = place, loop.run_in_executor(self._threads, self._write, file, at)
            self._step.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # who asks may be gone by then
            await asyncio.wait([self._step])
        written, self._step = self._step.result(), None
        self._wrote(len(written))
        await asyncio.sleep(loop.time() - begun)
        return written.stop if written else None

    def _write(self, file: SlotFile, at: int) -> range:
        """What it has written."""
        gap = self._opened.disk.find_unwritten(file.fd, at)
        if gap is None:
            return range(0)
        start, end = gap[0], min(gap[1], gap[0] + STEP_BYTES)
        self._opened.io.write(file, start, [self._zeros[: end - start]])
        return range(start, end)
