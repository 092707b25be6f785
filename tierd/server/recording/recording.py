"""One recording: the clients' requests as a trace in a file, written by its own thread.

Each request is one line, in the format of `tierctl replay` and `tierctl simulate`: time, tokens,
blocks. It contains no tokens, hashes or names. No call waits for the thread: requests beyond its
queue are lost and counted. The file never exceeds its limit. It holds whole gzip members only, so
it stays readable after a kill. Any error here ends only the recording, with a reason.

A request is an acquire or a lookup. Engines look a prompt up, then each rank acquires what was
found. So an acquire within LOOKUP_MS of a lookup of its blocks belongs to that lookup. Only the
first rank has lines. The numbers are from numbering.py.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog

from tierd.core.formats.block import Namespace
from tierd.core.plan import GroupQuery, Ids
from tierd.server.recording.numbering import Numbers

log = structlog.get_logger(__name__)

POLL_S = 0.25
"""Interval at which the thread reads its queue, since no call wakes it."""
FLUSH_S = 2.0
"""A killed daemon may lose this much."""
FLUSH_BYTES = 1 << 16
"""Bytes of lines in one gzip member. Its window is half as long."""
LEVEL = 1
"""Of compression. Higher levels would take three times as long and save a tenth."""
QUEUE_BLOCKS = 1 << 19
"""Requested but not numbered yet: 16 MiB of hashes."""
REQUEST_BLOCKS = 8
"""Cost of a request in the queue besides its own blocks."""
PART_BLOCKS = 1 << 12
"""Numbered at a time: cheap per block, and short enough that other threads get the interpreter."""
NUMBER_LIMIT = 8 << 20
"""Different blocks in one recording: some 200 MB of memory while it runs."""
LOOKUP_MS = 60_000
RESERVE_BYTES = 64 << 20
"""Free space of its file system kept for the daemon's own state."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A recording ends after this many bytes or seconds."""

    max_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call's first group, and its arrival on the daemon's clock."""

    at_s: float
    group: GroupQuery
    is_lookup: bool

    @property
    def cost(self) -> int:
        """Its share of the queue."""
        return len(self.group.hashes) + REQUEST_BLOCKS


@dataclass(slots=True)
class Counts:
    """Contents of the file: requests, their blocks, how many of these differ, bytes. lost: requests
    not in the file."""

    requests: int = 0
    blocks: int = 0
    distinct: int = 0
    bytes: int = 0
    lost: int = 0


@dataclass(slots=True)
class PendingLines:
    """Lines that are not in the file yet, and their additions to its counts."""

    texts: list[bytes] = field(default_factory=list)
    length: int = 0
    blocks: int = 0

    def add(self, text: bytes, blocks: int) -> None:
        """Adds a line."""
        self.texts.append(text)
        self.length += len(text)
        self.blocks += blocks


class _Over(Exception):
    """The recording has reached a limit, named in the text."""


class Recording:
    """One recording. begun_s: on the daemon's clock. namespace_of: by an id of any rank. Raises
    OSError if the file cannot be made."""

    def __init__(self, path: Path, bounds: Bounds, *, begun_s: float, namespace_of: Callable[[int], Namespace]) -> None:
        self.path, self.bounds, self.counts = path, bounds, Counts()
        self.reason = ""
        """Why it has ended; empty while it runs."""
        self._begun_s, self._namespace_of = begun_s, namespace_of
        self._began, self._ended = time.monotonic(), 0.0
        self._queue: deque[RecordedCall] = deque()
        self._noted = self._taken = 0
        self._lines, self._flushed = PendingLines(), self._began
        self._numbers = Numbers(limit=NUMBER_LIMIT)
        self._tails: dict[int, bytes] = {}
        self._stop = threading.Event()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def elapsed_s(self) -> float:
        """How long it has run, or ran."""
        return (self._ended or time.monotonic()) - self._began

    def note(self, now: float, group: GroupQuery, *, is_lookup: bool) -> None:
        """Queues a call. Never waits: a call beyond the queue's limit is lost and counted."""
        if self._stop.is_set() or self.reason or not len(group.hashes):
            return
        asked = RecordedCall(now, group, is_lookup)
        if self._noted - self._taken + asked.cost > QUEUE_BLOCKS:
            self.counts.lost += 1
            return
        self._noted += asked.cost
        self._queue.append(asked)

    def stop(self) -> None:
        """Ends the recording. Earlier calls are still written, later ones not. Call it in the
        thread that calls `note`."""
        self._stop.set()

    def join(self, *, timeout_s: float) -> None:
        """After `stop`: waits for the thread, or until the time is over (a hanging disk). Blocking."""
        self._thread.join(timeout_s)

    # -- in the thread

    def _run(self) -> None:
        try:
            self._write_on()
            reason = "stopped"
        except _Over as over:
            reason = str(over)
        except OSError as error:
            reason = (
                f"{self.path}: cannot be written ({error}); earlier calls are kept: free space, and start another one"
            )
        except Exception as error:  # after any error, serving goes on
            log.exception("recording failed", path=str(self.path))
            reason = f"internal fault ({error!r:.200}); see the daemon's log"
        self._end(reason)

    def _write_on(self) -> None:
        """Writes until it is stopped. Raises _Over, OSError."""
        while not self._stop.wait(POLL_S):
            is_over = self.elapsed_s >= self.bounds.seconds
            self._take()
            if is_over or time.monotonic() - self._flushed >= FLUSH_S:
                self._flush()
            if is_over:
                raise _Over(f"its {self.bounds.seconds:g} seconds are over")
        self._take()
        self._flush()

    def _end(self, reason: str) -> None:
        self._ended, self.reason = time.monotonic(), reason
        self.counts.lost += len(self._queue) + len(self._lines.texts)
        self._queue.clear()
        self._lines, self._numbers = PendingLines(), Numbers(limit=0)  # frees the memory, keeps the counts
        with contextlib.suppress(OSError):
            os.close(self._fd)
        log.info("recording ended", path=str(self.path), reason=reason, requests=self.counts.requests)

    def _take(self) -> None:
        """Turns the queue into lines, and writes most of them to the file. Raises _Over, OSError."""
        left = len(self._queue)  # later calls wait for the next turn
        while left > 0:
            part, blocks = [], 0
            while self._queue and blocks < PART_BLOCKS:
                part.append(self._queue.popleft())
                blocks += len(part[-1].group.hashes)
            left -= len(part)
            self._number([(asked, self._namespace_of(asked.group.namespaces[0]).id) for asked in part])
            self._taken += sum(asked.cost for asked in part)
            if self._lines.length >= FLUSH_BYTES:
                self._flush()

    def _number(self, part: Sequence[tuple[RecordedCall, int]]) -> None:
        """Adds lines of these calls. Each call has the id of its namespace's first rank."""
        part = [(asked, base) for asked, base in part if base in asked.group.namespaces]
        if not part:
            return
        sizes = [len(asked.group.hashes) for asked, _ in part]
        hashes = np.concatenate([asked.group.hashes for asked, _ in part])
        ids = self._numbers.of(hashes, np.repeat(np.array([base for _, base in part], np.uint32), sizes))
        if ids is None:
            self.counts.lost += len(part)
            raise _Over(f"it has numbered {self._numbers.count} different blocks, the limit is {NUMBER_LIMIT}")
        texts, end = [b"%d" % number for number in ids.tolist()], 0
        for asked, base in part:
            first, end = end, end + len(asked.group.hashes)
            if not self._is_part_of_lookup(asked, ids[first:end]):
                self._add_line(asked, base, b",".join(texts[first:end]))

    def _at_ms(self, asked: RecordedCall) -> int:
        return max(0, round(1000 * (asked.at_s - self._begun_s)))

    def _is_part_of_lookup(self, asked: RecordedCall, ids: Ids) -> bool:
        """Whether an acquire belongs to a recent lookup. Each lookup matches one acquire."""
        at_ms, numbers = self._at_ms(asked), self._numbers
        if asked.is_lookup:
            numbers.note_lookup(ids, at_ms, after_ms=at_ms - LOOKUP_MS)
            return False
        return numbers.take_lookup(int(ids[-1]), after_ms=at_ms - LOOKUP_MS)

    def _add_line(self, asked: RecordedCall, base: int, listed: bytes) -> None:
        tail = self._tails.get(base) or self._tails.setdefault(base, self._tail(base))
        head = b'{"timestamp":%d,"input_length":%d,"output_length":0,' % (self._at_ms(asked), asked.group.tokens)
        self._lines.add(b'%s"hash_ids":[%s],%s' % (head, listed, tail), len(asked.group.hashes))

    def _tail(self, base: int) -> bytes:
        """The end of every line of a namespace. output_length is unknown when a request comes;
        other readers need the field."""
        spec = self._namespace_of(base).spec
        size = (spec.tokens_per_block, spec.block_bytes * spec.rank_count)
        return b'"tokens_per_block":%d,"block_bytes":%d,"namespace":%d}\n' % (*size, len(self._tails))

    def _flush(self) -> None:
        """Appends the lines to the file as one gzip member. Raises _Over, OSError."""
        self._flushed = time.monotonic()
        if not self._lines.texts:
            return
        member = gzip.compress(b"".join(self._lines.texts), LEVEL, mtime=0)
        if self.counts.bytes + len(member) > self.bounds.max_bytes:
            raise _Over(f"its file would pass {self.bounds.max_bytes} bytes")
        self._check_room(len(member))
        self._append(member)
        lines, self._lines = self._lines, PendingLines()
        self.counts.requests += len(lines.texts)
        self.counts.blocks += lines.blocks
        self.counts.distinct = self._numbers.count

    def _check_room(self, count: int) -> None:
        found = os.fstatvfs(self._fd)
        if found.f_bavail * found.f_frsize < count + RESERVE_BYTES:
            raise OSError(errno.ENOSPC, f"less than {RESERVE_BYTES >> 20} MiB would be left for the daemon's own state")

    def _append(self, member: bytes) -> None:
        """Appends all of it or nothing. Raises OSError."""
        rest = memoryview(member)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.counts.bytes)
            raise
        self.counts.bytes += len(member)
