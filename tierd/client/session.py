"""The client's end of the session socket: identity, mapped segments, and holds that end.

Purpose: one blocking connection, whose life is the session's. Non-purpose: gRPC, reconnecting (connection.py). Invariants: descriptors
are close-on-exec and closed as soon as they are mapped; `let_go` never blocks and takes no lock, so a finaliser may call it; nobody waits
beyond its time, not even for its turn; after a reply that did not come in time the connection is closed, since the next reply would be the wrong one,
but where a line was asked for: its reply is read, and thrown away, before the next request.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import sys
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from numpy.typing import NDArray

import tierd
from tierd.client import trusted
from tierd.client.mailbox import IDS_PER_MESSAGE, Mailbox
from tierd.client.mapping import Segment, SegmentTable, map_file, map_segment
from tierd.client.replies import error_of
from tierd.client.target import LocalTarget
from tierd.core.directory import Directory
from tierd.core.model import StructArray
from tierd.core.sets import every
from tierd.core.versions import FORMAT_VERSION, PROTO_VERSION
from tierd.core.words import words_of
from tierd.errors import (
    DeadlineExceeded,
    OperatorError,
    Overloaded,
    SessionLost,
    TierFailed,
    Unavailable,
    Unsupported,
)

if TYPE_CHECKING:
    from tierd.client.device import DeviceSegment

REPLY_MAX_BYTES = 1 << 16
SWEEP_SEGMENTS = 32
"""With more segments mapped than this, those that have become empty are dropped before another is mapped."""

Place = tuple[int, int]
"""Tier and segment."""
Parts = list[tuple[Place, NDArray[np.intp] | slice]]
"""Handles by the segments that they point into: each with its rows."""


class Session:
    """A session with a local daemon. Raises what `connect_session` says."""

    def __init__(
        self, connection: socket.socket, hello: Mapping[str, Any], *, directory: Directory | None = None
    ) -> None:
        """directory: of its trust domain, where the daemon gives it."""
        self.directory = directory
        self.id = int(hello["session"])
        self.token = str(hello["token"])
        self.daemon = str(hello.get("daemon", ""))
        self.instance = str(hello.get("instance", ""))
        self.tiers: tuple[str, ...] = tuple(str(tier["name"]) for tier in hello.get("tiers", ()))
        self.gpus: dict[int, Mapping[str, Any]] = {
            i: tier["gpu"] for i, tier in enumerate(hello.get("tiers", ())) if "gpu" in tier
        }
        """Which GPU's memory a tier is, by the tier's place, for those that are one's."""
        self.patience_s = math.inf
        """For what a daemon answers at once; then its reply is read, and thrown away, before the next request, and the session goes on."""
        self.credits = int(hello.get("credits", 0))
        self.lines = min(int(hello.get("lines", 0)), self.credits)
        self.tells_events = bool(hello.get("events", False))
        self._connection = connection
        # A second face of the same socket, whose calls never wait: the first one's wait for its timeout even with MSG_DONTWAIT.
        self._glance = connection.dup()
        self._glance.setblocking(False)
        self._sockets = [connection, self._glance]
        self.mailbox = Mailbox(is_told_of_gets=bool(hello.get("one_sided", False)))
        self._turn = threading.Lock()
        self._owed = 0  # replies that nobody waits for
        self._segments: dict[Place, Segment | DeviceSegment] = {}
        self._table: SegmentTable | None = None
        self._tabled: tuple[int, object] = (0, None)
        self._unsent: deque[dict[str, Any]] = deque()
        self._requests = itertools.count(1)
        # Nothing that holds a page outlives the session's last link: what is collected without a word has said goodbye.
        self._farewell = weakref.finalize(self, _say_goodbye, self._glance, self._sockets, os.getpid())
        self._farewell.atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether the daemon still holds its end open: a look at the socket, a microsecond."""
        if self._unsent:
            self.flush()
        try:
            return bool(self._glance.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Ends the session's service; the daemon reuses what it held once this process has gone, or lets go."""
        self._farewell.detach()
        _close_all(self._sockets)
        self._segments.clear()
        self._table = None

    def leave(self) -> None:
        """Closes, and says that this process uses nothing of it any more, if the daemon is there to hear it. For finalisers too."""
        self._farewell()
        self._segments.clear()
        self._table = None

    def next_request(self) -> str:
        """A name for a call, unlike any other of this session."""
        return f"{self.id:x}-{next(self._requests)}"

    def unmap(self) -> None:
        """Keeps no segment mapped but for the views that are alive."""
        self._segments.clear()
        self._table = None
        if self.gpus:
            _device().unmap_ended()

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """One request, its reply. Raises what the daemon raised, SessionLost, DeadlineExceeded."""
        with self._turned(timeout_s) as left_s:
            reply, fds = self._exchange(request, timeout_s=left_s)
        _close(fds)
        return _checked(reply)

    def map(self, handles: StructArray, *, timeout_s: float) -> None:
        """Makes sure that the segments of HANDLE [n] are mapped. Raises NotFound, TierFailed, SessionLost, DeadlineExceeded."""
        for place in self.unmapped(handles):
            self.mapped(place, timeout_s=timeout_s)

    def mapped(self, place: Place, *, timeout_s: float) -> Segment | DeviceSegment:
        """A segment, mapped now if it was not. Raises as `map`."""
        with self._turned(timeout_s) as left_s:
            if place not in self._segments:
                self._sweep()
                self._segments[place] = self._fetch(place, timeout_s=left_s)
            return self._segments[place]

    def line(self, *, timeout_s: float) -> socket.socket:
        """A new line. Raises Overloaded where there are too many, SessionLost, DeadlineExceeded, which costs a call and not the session."""
        with self._turned(timeout_s) as left_s:
            reply, fds = self._exchange(
                {"op": "line", "mailbox": self.mailbox.socket is None}, timeout_s=left_s, is_vital=False
            )
        try:
            _checked(reply)
            has_mailbox = reply.get("mailbox") is True
            _check_came(fds, 2 if has_mailbox else 1, what="a line")
            if has_mailbox:
                mailbox = self.mailbox.socket = socket.socket(fileno=fds.pop())
                mailbox.setblocking(False)
                self._sockets.append(mailbox)
            return socket.socket(fileno=fds.pop())
        finally:
            _close(fds)

    def check_gpus(self, wanted: str) -> None:
        """Whether this process can map the device tier that is wanted, or all of them. Raises Unsupported."""
        for tier, told in self.gpus.items():
            if wanted in ("device", self.tiers[tier]):
                _device().gpu_at(_device().GpuPlace.of(told))

    def unmapped(self, handles: StructArray) -> set[Place]:
        """Segments of HANDLE [n] that are not mapped yet."""
        only = only_place(handles)
        places = places_of(handles) if only is None else (only,)
        return {place for place in places if place not in self._segments}

    def has_mapped(self, places: Iterable[Place]) -> bool:
        """Whether all of them are mapped."""
        return all(place in self._segments for place in places)

    def segment(self, place: Place) -> Segment | DeviceSegment | None:
        """A mapped segment."""
        return self._segments.get(place)

    def table(self) -> SegmentTable:
        """The mapped segments of host memory."""
        mapped = list(self._segments.values())
        known = len(mapped), mapped[-1] if mapped else None  # a new one comes last, and one that goes is missed
        if self._table is None or self._tabled != known:
            self._table = SegmentTable(segment for segment in mapped if isinstance(segment, Segment))
            self._tabled = known
        return self._table

    def let_go(self, *, leases: Sequence[int] = (), reservations: Sequence[int] = ()) -> None:
        """Ends holds, without an answer. For finalisers: what the socket does not take now goes with the next one."""
        if leases and not reservations and self.mailbox.post(leases):
            return
        self._unsent.append(
            {"op": "release", "reply": False, "leases": list(leases), "reservations": list(reservations)}
        )
        self.flush()

    def revoke(self, request: str) -> None:
        """Takes back what a call gave whose reply is not to be had, or is still to give. Without an answer, like `let_go`."""
        self._unsent.append({"op": "revoke", "request": request})
        self.flush()

    def flush(self) -> None:
        """Sends what the socket did not take before."""
        while self._unsent:
            with contextlib.suppress(IndexError):
                message = self._unsent.popleft()
                try:
                    self._tell(message)
                except BlockingIOError:
                    self._unsent.appendleft(message)
                    return
                except OSError:
                    self._unsent.clear()  # the daemon has gone, and the holds with it

    def release(self, leases: Iterable[int], *, timeout_s: float) -> None:
        """Ends leases and waits until the daemon has done it."""
        ids = list(leases)
        for start in range(0, len(ids), IDS_PER_MESSAGE):
            part = ids[start : start + IDS_PER_MESSAGE]
            self.ask({"op": "release", "leases": part, "reply": True}, timeout_s=timeout_s)

    def abort(self, reservations: Sequence[int], *, timeout_s: float) -> None:
        """Ends as many reservations as a message holds, and waits until the daemon has done it."""
        self.ask({"op": "release", "reservations": list(reservations), "reply": True}, timeout_s=timeout_s)

    def _fetch(self, place: Place, *, timeout_s: float) -> Segment | DeviceSegment:
        tier, segment = place
        reply, fds = self._exchange({"op": "map", "tier": tier, "segment": segment}, timeout_s=timeout_s)
        try:
            _checked(reply)
            _check_came(fds, 2, what=f"segment {segment}")
            data, catalogue = (fds[0], int(reply["bytes"])), (fds[1], int(reply["catalogue_bytes"]))
            is_writable = bool(reply["writable"])
            if tier not in self.gpus:
                return map_segment(place, data=data, catalogue=catalogue, is_writable=is_writable)
            gpu = _device().GpuPlace.of(self.gpus[tier])
            mapped: DeviceSegment = _device().map_segment(
                gpu, segment, data=data, catalogue=catalogue, is_writable=is_writable
            )
            return mapped
        finally:
            _close(fds)

    def _sweep(self) -> None:
        """Of a GPU at once: what has ended may be memory that nobody else gets while it is mapped here."""
        is_many = len(self._segments) >= SWEEP_SEGMENTS
        swept = [place for place, segment in self._segments.items() if is_many or place[0] in self.gpus]
        for place in swept:
            if self._segments[place].is_empty:
                del self._segments[place]

    @contextlib.contextmanager
    def _turned(self, timeout_s: float) -> Iterator[float]:
        """One thread at a time; the seconds left. Raises DeadlineExceeded."""
        timeout_s = min(timeout_s, self.patience_s)
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=max(timeout_s, 0.0)):
            raise DeadlineExceeded(
                f"session socket: another thread's request had no answer within {timeout_s:.3g} s; is the daemon stuck?"
            )
        try:
            yield deadline - time.monotonic()
        finally:
            self._turn.release()

    def _exchange(
        self, request: Mapping[str, Any], *, timeout_s: float, is_vital: bool = True
    ) -> tuple[dict[str, Any], list[int]]:
        """is_vital: whether the session ends where the reply does not come in time."""
        deadline = time.monotonic() + timeout_s
        try:
            while self._owed:
                _close(self._reply(deadline)[1])
            self._wait(deadline)
            self._connection.sendall(msgpack.packb(request), socket.MSG_NOSIGNAL)
            self._owed += 1
            data, fds = self._reply(deadline)
        except TimeoutError as error:
            if is_vital and self.patience_s == math.inf:
                with contextlib.suppress(OSError):
                    # Told at once, though a child that is just being forked has a copy: what is told of this session next is told to one that has ended.
                    self._connection.shutdown(socket.SHUT_RDWR)
                _close_all(self._sockets)
            raise DeadlineExceeded(
                f"session socket: no answer to {request['op']} within {timeout_s:.3g} s; is the daemon stuck?"
            ) from error
        except OSError as error:
            raise SessionLost(
                f"session socket: the daemon has gone ({error}); the next call opens a session again"
            ) from error
        if not data:
            _close(fds)
            raise SessionLost("session socket: the daemon has gone; the next call opens a session again")
        return msgpack.unpackb(data), fds

    def _reply(self, deadline: float) -> tuple[bytes, list[int]]:
        self._wait(deadline)
        found = _receive(self._connection)
        self._owed -= 1
        return found

    def _wait(self, deadline: float) -> None:
        self._connection.settimeout(max(deadline - time.monotonic(), 0.001))

    def _took(self, request: Mapping[str, Any]) -> bool:
        """Whether the socket had room for it. Raises OSError."""
        try:
            self._tell(request)
        except BlockingIOError:
            return False
        return True

    def _tell(self, request: Mapping[str, Any]) -> None:
        self._glance.send(msgpack.packb(request), socket.MSG_NOSIGNAL)


def connect_session(
    target: LocalTarget, *, name: str, engine: Mapping[str, str], credential: str | None, timeout_s: float
) -> Session:
    """Opens a session. Raises Unavailable, Overloaded, NotPermitted, VersionMismatch, DeadlineExceeded, Unsupported."""
    if sys.platform != "linux":
        raise Unsupported(f"tierd: {sys.platform} has no session sockets; give a daemon on Linux as host:port")
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise Overloaded(
            f"session socket: none can be made ({error}): this process has as many descriptors open as it may; close some, or raise its limit (ulimit -n)"
        ) from error
    hello = {
        "op": "hello",
        "proto": PROTO_VERSION,
        "format": FORMAT_VERSION,
        "sdk": tierd.__version__,
        "name": name[:128],
        "credential": credential,
        "engine": dict(engine),
    }
    try:
        connection.settimeout(max(timeout_s, 0.001))
        trusted.connect(connection, target.session_path)
        connection.sendall(msgpack.packb(hello))
        data, fds = _receive(connection)
        try:
            told = _checked(msgpack.unpackb(data) if data else {})
            return Session(connection, told, directory=_directory(fds, int(told.get("directory", 0))))
        finally:
            _close(fds)
    except TimeoutError as error:
        _hang_up(connection)
        raise DeadlineExceeded(f"daemon at {target}: no hello within {timeout_s:.3g} s; is it stuck?") from error
    except OSError as error:
        connection.close()
        raise Unavailable(f"daemon at {target}: it went away during hello ({error}); try again") from error
    except BaseException:
        _hang_up(connection)
        raise


def _directory(fds: Sequence[int], length: int) -> Directory | None:
    """Maps the directory that came with the daemon's hello; without one every get asks."""
    with contextlib.suppress(TierFailed, ValueError):  # no mapping more is to be had
        return (
            Directory(words_of(map_file(fds[0], length, writable=False), count=length // 8)) if fds and length else None
        )
    return None


def _device() -> Any:
    """The module is loaded by who needs it: it looks for a driver."""
    from tierd.client import device  # noqa: PLC0415

    return device


def places_of(handles: StructArray) -> set[Place]:
    """The segments that HANDLE [n] point into."""
    return set(zip(handles["tier"].tolist(), handles["segment"].tolist(), strict=True))


def only_place(handles: StructArray) -> Place | None:
    """The segment of HANDLE [n] where it is one; None: several, or no handles."""
    if not len(handles):
        return None
    tiers, segments = handles["tier"], handles["segment"]
    if len(handles) > 1 and not (every(segments == segments[0]) and every(tiers == tiers[0])):
        return None
    return int(tiers[0]), int(segments[0])


def by_place(handles: StructArray) -> Parts:
    """HANDLE [n] by the segments that they point into: each with its rows."""
    only = only_place(handles)
    if only is not None:
        return [(only, slice(None))]
    keys = handles["tier"].astype(np.uint64) << np.uint64(32) | handles["segment"]
    return [((int(key) >> 32, int(key) & 0xFFFFFFFF), np.flatnonzero(keys == key)) for key in np.unique(keys)]


def _say_goodbye(glance: socket.socket, sockets: Iterable[socket.socket], pid: int) -> None:
    """In a child only its own copies are closed: the parent's session goes on."""
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            glance.send(msgpack.packb({"op": "bye"}), socket.MSG_NOSIGNAL)
    _close_all(sockets)


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _hang_up(connection: socket.socket) -> None:
    """A hello that is answered later opens a session that nobody knows: it is to end, and not with this process."""
    with contextlib.suppress(OSError):
        connection.settimeout(0)
        connection.send(msgpack.packb({"op": "bye"}), socket.MSG_NOSIGNAL)
    connection.close()


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    # Not socket.recv_fds, which leaves its flags out before Python 3.13: the descriptors would be inherited over exec.
    data, told, _flags, _address = connection.recvmsg(
        REPLY_MAX_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds = [
        fd
        for level, kind, packed in told
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for fd in array("i", packed)
    ]
    return data, fds


def _checked(reply: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(reply, dict) or "ok" not in reply:
        raise Unavailable("session socket: the daemon closed it without a word; try again")
    if not reply["ok"]:
        raise error_of(str(reply.get("error")), str(reply.get("message")), status="refused")
    return reply


def _check_came(fds: Sequence[int], count: int, *, what: str) -> None:
    """Descriptors for which a process has no room are dropped by the kernel, so too few of them say that; too many, that they mean something else."""
    if len(fds) < count:
        raise Overloaded(
            f"session socket: {len(fds)} of {count} descriptors for {what} came in: this process has as many open as it may; close some, or raise its limit (ulimit -n)"
        )
    if len(fds) > count:
        raise OperatorError(f"daemon: {len(fds)} descriptors for {what} instead of {count}; versions differ?")


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
