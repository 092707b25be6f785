"""Zeroing: write a store's space once, ahead of its first blocks.

A file system marks reserved space as unwritten. The first write must change that mark, which
doubles its time. So zeros are written while the disk is idle. Nothing reads them. Only empty space
is written, in files of places without a segment, a step at a time. A writer to a place waits for
the current step there (`leave`). A step that fails ends the work, and costs only speed.
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
"""Bytes of a step; a block that arrives meanwhile waits for one step."""
START_S = 1.0
"""After the store was opened."""
PAUSE_S = 0.1
"""Between two checks for an idle disk."""


class Zeroing:
    """Zeroing of a store. is_free: whether a place has no segment. wrote: gets each step's bytes."""

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
        """Begin in the background."""
        self._task = asyncio.create_task(self._run())

    async def leave(self, place: int) -> None:
        """Wait for the current step at a place where a segment has begun; no step follows there."""
        if self._step is not None and self._place == place:
            await asyncio.wait([self._step])

    async def done(self) -> None:
        """Wait until nothing is left to do."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """End after the current step."""
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
        except (OSError, RuntimeError) as error:  # the disk refuses, or the system gives no thread
            self._opened.notices.append(
                f"{self._opened.name}: {self._opened.directory} could not be zeroed ahead ({error}); check the disk"
            )

    async def _go_on(self, place: int, at: int) -> int | None:
        """Write a step; returns the start of the next, or None. Uses half the time of an idle disk."""
        loop = asyncio.get_running_loop()
        if self._calls.age_s():
            await asyncio.sleep(PAUSE_S)
            return at
        begun, file = loop.time(), self._opened.files[place]
        with self._calls.one("write"):
            self._place, self._step = place, loop.run_in_executor(self._threads, self._write, file, at)
            self._step.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # the caller may be gone by then
            await asyncio.wait([self._step])
        written, self._step = self._step.result(), None
        self._wrote(len(written))
        await asyncio.sleep(loop.time() - begun)
        return written.stop if written else None

    def _write(self, file: SlotFile, at: int) -> range:
        """Write one step; returns its range."""
        gap = self._opened.disk.find_unwritten(file.fd, at)
        if gap is None:
            return range(0)
        start, end = gap[0], min(gap[1], gap[0] + STEP_BYTES)
        self._opened.io.write(file, start, [self._zeros[: end - start]])
        return range(start, end)
