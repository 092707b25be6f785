"""The daemon's recordings: one at a time, in a directory of its own below the state directory.

Purpose: begin one, end it, say how it is. Non-purpose: what is in it (recording.py). Invariants: clients choose a name and never a path; the
directory is 0700 and a file 0600; a file that exists is never written to; one that a former life wrote stays until somebody removes it.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from tierd._proto import admin_pb2 as pb
from tierd.cache.cache import Cache
from tierd.core.plan import GroupQuery
from tierd.errors import InvalidArgument, NotFound, Overloaded, TierFailed
from tierd.server.operators.recording import Bounds, Recording
from tierd.tiers.io.lock import private_directory

log = structlog.get_logger(__name__)

SUFFIX = ".jsonl.gz"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FILES_LIMIT = 100
"""Recordings in the directory."""
MAX_BYTES = 256 << 20
"""Where the request names no size."""
LEAST_BYTES = 64 << 10
SECONDS = 3600.0
"""Where the request names no time."""
LONGEST_S = 30 * 86400.0
STOP_TIMEOUT_S = 10.0
"""For what is still to be written, on a disk that hangs."""


class Recorder:
    """See the module. directory: made with the first recording."""

    def __init__(self, directory: Path, cache: Cache) -> None:
        self._directory = directory
        self._cache = cache
        self._recording: Recording | None = None
        self._turn = asyncio.Lock()

    def note(self, groups: Sequence[GroupQuery], *, is_lookup: bool) -> None:
        """A call has come; its first group stands for the request."""
        if self._recording is not None:
            self._recording.note(self._cache.clock.now(), groups[0], is_lookup=is_lookup)

    async def start(self, request: pb.RecordStartRequest) -> pb.RecordReply:
        """Begins a recording. Raises InvalidArgument, Overloaded where one goes on, TierFailed where no file can be made."""
        bounds = bounds_of(request)
        async with self._turn:
            if self._recording is not None and not self._recording.reason:
                name = named(self._recording.path)
                raise Overloaded(
                    f"recording {name}: goes on, and there is one at a time; stop it with `tierctl record stop`"
                )
            self._recording = await asyncio.to_thread(self._begin, request.name, bounds)
        log.info("recording", path=str(self._recording.path), max_bytes=bounds.max_bytes, seconds=bounds.seconds)
        return self.status()

    async def stop(self) -> pb.RecordReply:
        """Ends the recording; what was asked for until now is in it. Raises NotFound where none goes on."""
        async with self._turn:
            if self._recording is None or self._recording.reason:
                ended = (
                    f"; {named(self._recording.path)} has ended: {self._recording.reason}" if self._recording else ""
                )
                raise NotFound(f"recording: none goes on{ended}; `tierctl record status` tells of the last one")
            self._recording.stop()
            await asyncio.to_thread(self._recording.join, timeout_s=STOP_TIMEOUT_S)
        return self.status()

    async def close(self, *, timeout_s: float) -> None:
        """The daemon ends."""
        if self._recording is not None:
            self._recording.stop()
            await asyncio.to_thread(self._recording.join, timeout_s=timeout_s)

    def status(self) -> pb.RecordReply:
        """The recording that goes on, else the last one of this life."""
        if self._recording is None:
            return pb.RecordReply(state="none")
        recording, counts = self._recording, self._recording.counts
        return pb.RecordReply(
            state="ended" if recording.reason else "recording",
            name=named(recording.path),
            path=str(recording.path),
            reason=recording.reason,
            requests=counts.requests,
            blocks=counts.blocks,
            distinct=counts.distinct,
            lost=counts.lost,
            bytes=counts.bytes,
            max_bytes=recording.bounds.max_bytes,
            elapsed_s=recording.elapsed_s,
            seconds=recording.bounds.seconds,
        )

    def _begin(self, name: str, bounds: Bounds) -> Recording:
        path = self._directory / ((name or time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())) + SUFFIX)
        try:
            private_directory(self._directory)
            self._check_count()
            return Recording(path, bounds, begun_s=self._cache.clock.now(), namespace_of=self._cache.registry.get)
        except FileExistsError:
            raise InvalidArgument(f"name: {path} exists already; choose another, or remove it") from None
        except OSError as error:
            raise TierFailed(f"{path}: cannot be made ({error}); make room in server.state_dir, or mend it") from error

    def _check_count(self) -> None:
        count = sum(path.name.endswith(SUFFIX) for path in self._directory.iterdir())
        if count >= FILES_LIMIT:
            raise Overloaded(f"{self._directory}: holds {count} recordings, {FILES_LIMIT} are the most; remove some")


def named(path: Path) -> str:
    """The name of a recording."""
    return path.name.removesuffix(SUFFIX)


def bounds_of(request: pb.RecordStartRequest) -> Bounds:
    """What a request asks for. Raises InvalidArgument."""
    if request.name and not NAME.fullmatch(request.name):
        raise InvalidArgument(
            f"name: {request.name!r:.80} is none; 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"
        )
    bounds = Bounds(request.max_bytes or MAX_BYTES, request.seconds or SECONDS)
    if bounds.max_bytes < LEAST_BYTES:
        raise InvalidArgument(f"max_bytes: {bounds.max_bytes} is below {LEAST_BYTES}; give more")
    if not 0 < bounds.seconds <= LONGEST_S or math.isnan(bounds.seconds):
        raise InvalidArgument(f"seconds: {bounds.seconds} is outside 0 to {LONGEST_S:g}; give a time within")
    return bounds
