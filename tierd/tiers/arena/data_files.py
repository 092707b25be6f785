"""The data files of one arena: those in use, named by segment, and spare ones made ahead.

A thread makes spare files, allocated and touched, until the arena's whole capacity exists. A
segment takes one by rename. The contents of files are not handled here. Files that are spare, in
use or still to be made add up to the places of the tier. A file is allocated whole before its
mapping is handed out, so no access raises SIGBUS. Files are renamed and unlinked, never truncated
or punched. The thread yields to every other. It locks the process's mappings for one step at most.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import deque
from pathlib import Path

import structlog

from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.linux.huge_pages import HUGE_BYTES
from tierd.linux.mapping import allocate, map_file, populate

log = structlog.get_logger(__name__)

SUFFIX = ".data"
SPARE = "spare-"
_STEP_BYTES = HUGE_BYTES
"""Made per step: while its pages are touched, no thread of the process can map or unmap memory."""
LOOK_S, LOOKS = 1.0, 10
"""Longest time between two looks for a file that can go, and how many in vain."""
_NICE = 10
"""Added to the nice value of the thread that makes spare files."""


class DataFiles:
    """Files of one directory, each segment_bytes long. places: the limit of files at once."""

    def __init__(self, directory: Path, *, segment_bytes: int, places: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._unmade = places
        self._making = 0
        self._touched_bytes = 0
        self._fault = ""
        self._spares: deque[tuple[Path, memoryview]] = deque()
        self._made: set[Path] = set()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def path(self, segment: int) -> Path:
        """The file of a segment."""
        return self._directory / f"{segment}{SUFFIX}"

    # -- at start and end

    def find_segments(self) -> list[int]:
        """Ids of the segments that have a file here."""
        names = [p.name.removesuffix(SUFFIX) for p in self._directory.glob(f"*{SUFFIX}")]
        return sorted(int(name) for name in names if name.isdigit())

    def adopt(self, segment: int) -> memoryview:
        """Adopt an old file. Raises OSError, TierFailed if its size is wrong or the tier is full."""
        path = self.path(segment)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != self._segment_bytes:
                raise TierFailed(
                    f"{path}: {os.fstat(fd).st_size} bytes, segments have {self._segment_bytes}; the file is dropped"
                )
            if os.fstat(fd).st_blocks * 512 < self._segment_bytes:
                os.posix_fallocate(fd, 0, self._segment_bytes)
            memory = map_file(fd, self._segment_bytes)
        finally:
            os.close(fd)
        self._claim()
        return memory

    def adopt_spares(self) -> None:
        """Take over whole spare files of the previous run; remove partial and surplus ones."""
        for path in sorted(self._directory.glob(f"{SPARE}*{SUFFIX}")):
            found = path.lstat()
            whole = found.st_size == self._segment_bytes and found.st_blocks * 512 >= self._segment_bytes
            if not whole or not self._unmade:
                path.unlink()
                continue
            self._claim()
            self._spares.append((path, self._map(path)))

    def held_bytes(self) -> int:
        """Bytes that the files use now. One that gets another name meanwhile may not count."""
        held = 0
        for path in self._directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                held += path.lstat().st_blocks * 512
        return held

    def start(self) -> None:
        """Begin to make spare files in the background."""
        self._thread = threading.Thread(target=self._make_all, name="tierd-spares", daemon=True)
        self._thread.start()

    def stop(self, *, undo: bool = False) -> None:
        """End the background work, remove a half-made file; with undo, all spare files made here."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for path in [path for path, _ in self._spares if undo and path in self._made]:
            path.unlink(missing_ok=True)
        self._spares.clear()

    @property
    def spares(self) -> int:
        """How many files are ready."""
        return len(self._spares)

    @property
    def unready_bytes(self) -> int:
        """Memory of the places that does not exist yet."""
        with self._changed:
            return (self._unmade + self._making) * self._segment_bytes - self._touched_bytes

    @property
    def idle_reason(self) -> str:
        """Why missing memory is made only on demand; empty while the thread makes it."""
        is_over = self._thread is not None and not self._thread.is_alive()
        return self._fault or ("files were dropped since the start" if is_over and self._unmade else "")

    # -- use

    def find_ready(self, segment: int) -> memoryview | None:
        """A spare file's memory, now the segment's, or None if none is ready. Does not wait."""
        with self._changed:
            while self._spares:
                path, memory = self._spares.popleft()
                self._unmade += 1  # if a spare file was removed or cut short, a new one is made on demand
                with contextlib.suppress(FileNotFoundError):
                    if path.lstat().st_size == self._segment_bytes:
                        os.rename(path, self.path(segment))
                        self._unmade -= 1
                        return memory
                    path.unlink()
            return None

    def take(self, segment: int) -> memoryview:
        """A file's memory for the segment: spare, being made, or new. Raises TierFailed, OSError."""
        while True:
            memory = self.find_ready(segment)
            if memory is not None:
                return memory
            with self._changed:
                if self._stop.is_set():
                    raise TierFailed(f"{self._directory}: the arena is closing")
                if self._making and not self._spares and not self._unmade:
                    self._changed.wait()
                    continue
                if not self._unmade and not self._spares:
                    raise TierFailed(f"{self._directory}: every file of the tier is in use; the plan asks for one more")
            self._make(touch=False)

    def grow(self, count: int) -> None:
        """There are so many places more; their files are made in the background."""

        def go_on(before: threading.Thread | None) -> None:
            if before is not None:
                before.join()
            self._make_all()

        with self._changed:
            self._unmade += count
            self._fault = ""
        self._thread = threading.Thread(target=go_on, args=(self._thread,), name="tierd-spares", daemon=True)
        self._thread.start()

    def shrink(self, count: int) -> None:
        """Give up so many files that no segment has: those still to be made first. In a thread: it
        waits for files that are being made, or that come back from a segment that has ended."""
        patience = LOOKS
        while count and not self._stop.is_set():
            with self._changed:
                unmade = min(count, self._unmade)
                self._unmade -= unmade
                count -= unmade
                spare = self._spares.pop() if count and self._spares else None
                if count and spare is None and patience:
                    self._changed.wait(LOOK_S)
            if spare is not None:
                spare[0].unlink(missing_ok=True)
                count -= 1
            elif count and not patience:
                log.error("files of closed places were not found", place=str(self._directory), files=count)
                return
            patience -= spare is None

    def rename(self, old: int, new: int) -> None:
        """The file of one segment becomes that of another; mappings of it stay. Raises OSError."""
        os.rename(self.path(old), self.path(new))

    def discard(self, segment: int) -> None:
        """Unlink a segment's file and free its place. Processes that map it keep its bytes."""
        self.path(segment).unlink(missing_ok=True)
        with self._changed:
            self._unmade += 1
            self._changed.notify_all()

    # -- inner

    def _claim(self) -> None:
        with self._changed:
            if not self._unmade:
                raise TierFailed(f"{self._directory}: more files than the capacity allows; the rest is dropped")
            self._unmade -= 1

    def _make_all(self) -> None:
        with contextlib.suppress(OSError):  # lower priority is optional
            os.nice(_NICE)  # on Linux, for this thread only
        try:
            while not self._stop.is_set() and self._make(touch=True):
                pass
        except OSError as error:  # the next demand tries again and gets the error
            self._fault = f"{self._directory}: {error.strerror or error}"
            log.warning("no more memory is allocated ahead", place=str(self._directory), error=self._fault)

    def _make(self, *, touch: bool) -> bool:
        """Make one spare file if any is still to be made. Raises OSError."""
        with self._changed:
            if not self._unmade:
                return False
            self._unmade -= 1
            self._making += 1
        path = self._directory / f"{SPARE}{secrets.token_hex(8)}{SUFFIX}"
        memory = None
        try:
            memory = self._allocate(path, touch=touch)
        finally:
            with self._changed:
                self._making -= 1
                if touch:
                    self._touched_bytes = 0
                if memory is None:
                    self._unmade += 1
                else:
                    self._spares.append((path, memory))
                    self._made.add(path)
                self._changed.notify_all()
        return memory is not None

    def _allocate(self, path: Path, *, touch: bool) -> memoryview | None:
        """A new file's memory; with touch, None if the stop signal came first."""
        failpoint("arena.spare.before_file")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, self._segment_bytes)
            memory, is_huge = map_file(fd, self._segment_bytes), True
            for start in range(0, self._segment_bytes, _STEP_BYTES):
                is_huge = allocate(fd, memory, start, huge=is_huge)  # once refused, not tried again for this file
                if touch:
                    populate(memory[start : start + _STEP_BYTES])
                    self._touched_bytes = min(start + _STEP_BYTES, self._segment_bytes)
                if touch and self._stop.is_set():
                    os.unlink(path)
                    return None
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return memory

    def _map(self, path: Path) -> memoryview:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return map_file(fd, self._segment_bytes)
        finally:
            os.close(fd)
