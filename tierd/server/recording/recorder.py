"""The daemon's recordings: one at a time, in a directory of their own below the state directory.

It starts and stops a recording, and reports its state; recording.py has its content. Clients choose
a name, never a path. The directory is 0700 and a file 0600. An existing file is never written to,
and stays until an operator removes it.
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
from tierd.server.recording.recording import Bounds, Recording
from tierd.tiers.io.lock import private_directory

log = structlog.get_logger(__name__)

SUFFIX = ".jsonl.gz"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FILES_LIMIT = 100
"""Recordings in the directory."""
MAX_BYTES = 256 << 20
"""Default size limit of a recording."""
LEAST_BYTES = 64 << 10
SECONDS = 3600.0
"""Default time limit of a recording."""
LONGEST_S = 30 * 86400.0
STOP_TIMEOUT_S = 10.0
"""Wait for the last writes to a hanging disk."""


class Recorder:
    """Starts and stops recordings. directory: made with the first one."""

    def __init__(self, directory: Path, cache: Cache) -> None:
        self._directory = directory
        self._cache = cache
        self._recording: Recording | None = None
        self._turn = asyncio.Lock()

    def note(self, groups: Sequence[GroupQuery], *, is_lookup: bool) -> None:
        """Records a call. Its first group stands for the request."""
        if self._recording is not None:
            self._recording.note(self._cache.clock.now(), groups[0], is_lookup=is_lookup)

    async def start(self, request: pb.RecordStartRequest) -> pb.RecordReply:
        """Starts a recording. Raises InvalidArgument, Overloaded if one runs, TierFailed without a
        file."""
        bounds = bounds_of(request)
        async with self._turn:
            if self._recording is not None and not self._recording.reason:
                name = named(self._recording.path)
                raise Overloaded(
                    f"recording {name}: it is running, and only one may run; stop it with `tierctl record stop`"
                )
            self._recording = await asyncio.to_thread(self._begin, request.name, bounds)
        log.info("recording", path=str(self._recording.path), max_bytes=bounds.max_bytes, seconds=bounds.seconds)
        return self.status()

    async def stop(self) -> pb.RecordReply:
        """Ends the recording; calls noted so far are written. Raises NotFound if none is running."""
        async with self._turn:
            if self._recording is None or self._recording.reason:
                ended = (
                    f"; {named(self._recording.path)} has ended: {self._recording.reason}" if self._recording else ""
                )
                raise NotFound(f"recording: none is running{ended}; see `tierctl record status`")
            self._recording.stop()
            await asyncio.to_thread(self._recording.join, timeout_s=STOP_TIMEOUT_S)
        return self.status()

    async def close(self, *, timeout_s: float) -> None:
        """Ends the recording when the daemon ends."""
        if self._recording is not None:
            self._recording.stop()
            await asyncio.to_thread(self._recording.join, timeout_s=timeout_s)

    def status(self) -> pb.RecordReply:
        """The running recording, else the last one of this daemon."""
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
            raise TierFailed(
                f"{path}: cannot be made ({error}); free space in server.state_dir, or check its disk"
            ) from error

    def _check_count(self) -> None:
        count = sum(path.name.endswith(SUFFIX) for path in self._directory.iterdir())
        if count >= FILES_LIMIT:
            raise Overloaded(f"{self._directory}: holds {count} recordings, the limit is {FILES_LIMIT}; remove some")


def named(path: Path) -> str:
    """The name of a recording."""
    return path.name.removesuffix(SUFFIX)


def bounds_of(request: pb.RecordStartRequest) -> Bounds:
    """The limits in a request. Raises InvalidArgument."""
    if request.name and not NAME.fullmatch(request.name):
        raise InvalidArgument(
            f"name: {request.name!r:.80} is invalid; use 1 to 64 letters, digits, . - and _, first a letter or digit"
        )
    bounds = Bounds(request.max_bytes or MAX_BYTES, request.seconds or SECONDS)
    if bounds.max_bytes < LEAST_BYTES:
        raise InvalidArgument(f"max_bytes: {bounds.max_bytes} is below {LEAST_BYTES}; give more")
    if not 0 < bounds.seconds <= LONGEST_S or math.isnan(bounds.seconds):
        raise InvalidArgument(f"seconds: {bounds.seconds} is outside 0 to {LONGEST_S:g}; give a time in that range")
    return bounds
