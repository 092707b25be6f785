"""Slot files through the page cache, by aiofiles: for file systems that refuse O_DIRECT.

This `SlotIO` is the last resort and slow: each call makes its own trip to a thread, and the bytes
are copied twice. Seeking is not shared, so every call has a file object of its own. As with
O_DIRECT, writes are durable only after the store's sync. A notice says that the store works this
way.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import aiofiles

from tierd.core.formats.model import StructArray
from tierd.tiers.io.files import OS, READ_WRITE
from tierd.tiers.io.pieces import plain_read_pieces
from tierd.tiers.store.slots import SlotFile


class BufferedIO:
    """Reads and writes through the page cache. count: calls at one time, on the current loop."""

    mode = "buffered"

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self._threads, self._loop = ThreadPoolExecutor(count, thread_name_prefix="tierd-buffered"), loop

    def open(self, path: Path) -> int:
        return OS.open(path, READ_WRITE)

    def read(self, file: SlotFile, offset: int, buffers: Sequence[memoryview]) -> int:
        return asyncio.run_coroutine_threadsafe(self._read(file, offset, buffers), self._loop).result()

    def read_pieces(self, file: SlotFile, pieces: StructArray) -> None:
        plain_read_pieces(partial(self.read, file), pieces)

    def write(self, file: SlotFile, offset: int, buffers: Sequence[memoryview]) -> None:
        asyncio.run_coroutine_threadsafe(self._write(file, offset, buffers), self._loop).result()

    async def _read(self, file: SlotFile, offset: int, buffers: Sequence[memoryview]) -> int:
        done = 0
        async with aiofiles.open(file.path, "rb", buffering=0, executor=self._threads) as slots:
            await slots.seek(offset)
            for buffer in buffers:
                rest = buffer
                while rest and (count := await slots.readinto(rest)):
                    rest = rest[count:]
                done += len(buffer) - len(rest)
                if rest:
                    break
        return done

    async def _write(self, file: SlotFile, offset: int, buffers: Sequence[memoryview]) -> None:
        async with aiofiles.open(file.path, "r+b", buffering=0, executor=self._threads) as slots:
            await slots.seek(offset)
            for buffer in buffers:
                rest = buffer
                while rest:
                    count = await slots.write(rest)
                    if not count:
                        raise OSError(errno.EIO, "write wrote nothing")
                    rest = rest[count:]
