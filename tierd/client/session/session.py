"""A session with a local daemon: identity, mapped segments, and holds that end.

A session lives as long as its connection (session_socket.py). Reconnecting is in connection.py;
this module does not use gRPC. Descriptors are close-on-exec and closed once they are mapped.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

import tierd
from tierd.client.connect import trusted
from tierd.client.connect.target import LocalTarget
from tierd.client.session.mapping import MappedSegment, map_file, map_segment
from tierd.client.session.notices import IDS_PER_MESSAGE, Notices
from tierd.client.session.segments import Place, Segments
from tierd.client.session.session_socket import SessionSocket, check_came, checked, close_fds, hang_up, receive
from tierd.core.formats.directory import Directory
from tierd.core.formats.model import StructArray
from tierd.core.formats.versions import FORMAT_VERSION, PROTO_VERSION
from tierd.core.formats.words import words_of
from tierd.errors import DeadlineExceeded, Overloaded, TierFailed, Unavailable, Unsupported

if TYPE_CHECKING:
    from tierd.client.session.device import DeviceSegment


class Session(SessionSocket):
    """A session with a local daemon."""

    def __init__(
        self, connection: socket.socket, hello: Mapping[str, Any], *, directory: Directory | None = None
    ) -> None:
        """directory: of its trust domain, if the daemon sends one."""
        super().__init__(connection)
        self.directory = directory
        self.id = int(hello["session"])
        self.token = str(hello["token"])
        self.daemon = str(hello.get("daemon", ""))
        self.instance = str(hello.get("instance", ""))
        self.tiers: tuple[str, ...] = tuple(str(tier["name"]) for tier in hello.get("tiers", ()))
        self.gpus: dict[int, Mapping[str, Any]] = {
            i: tier["gpu"] for i, tier in enumerate(hello.get("tiers", ())) if "gpu" in tier
        }
        """By tier number, for tiers in GPU memory: the fields that describe the GPU."""
        self.credits = int(hello.get("credits", 0))
        self.lines = min(int(hello.get("lines", 0)), self.credits)
        self.tells_events = bool(hello.get("events", False))
        self.notices = Notices(accepts_reports=bool(hello.get("one_sided", False)))
        self.segments = Segments(self.gpus)
        self._requests = itertools.count(1)

    def close(self) -> None:
        """Ends the session. The daemon may reuse its pages once this process ends or leaves."""
        super().close()
        self.segments.clear()

    def leave(self) -> None:
        """Closes and tells a live daemon that this process no longer uses it. Safe in finalisers."""
        super().leave()
        self.segments.clear()

    def next_request(self) -> str:
        """A name for a call, unique in this session."""
        return f"{self.id:x}-{next(self._requests)}"

    def unmap(self) -> None:
        """Keeps no segment mapped, except for live views."""
        self.segments.clear()
        if self.gpus or "tierd.client.session.stream_copies" in sys.modules:
            _device().unmap_ended()

    def map(self, handles: StructArray, *, timeout_s: float) -> None:
        """Maps segments of HANDLE [n]. Raises NotFound, TierFailed, SessionLost, DeadlineExceeded."""
        for place in self.segments.unmapped(handles):
            self.mapped(place, timeout_s=timeout_s)

    def mapped(self, place: Place, *, timeout_s: float) -> MappedSegment | DeviceSegment:
        """A segment, mapped now if needed. Raises as `map`."""
        with self._turned(timeout_s) as left_s:
            found = self.segments.at(place)
            if found is None:
                self.segments.sweep()
                found = self._fetch(place, timeout_s=left_s)
                self.segments.add(place, found)
            return found

    def line(self, *, timeout_s: float) -> socket.socket:
        """Opens a new line. Raises Overloaded if there are too many, and SessionLost.
        DeadlineExceeded ends the call but not the session."""
        with self._turned(timeout_s) as left_s:
            reply, fds = self._exchange(
                {"op": "line", "mailbox": self.notices.socket is None}, timeout_s=left_s, is_vital=False
            )
        try:
            checked(reply)
            has_notices = reply.get("mailbox") is True
            check_came(fds, 2 if has_notices else 1, what="a line")
            if has_notices:
                notices = self.notices.socket = socket.socket(fileno=fds.pop())
                notices.setblocking(False)
                self._sockets.append(notices)
            return socket.socket(fileno=fds.pop())
        finally:
            close_fds(fds)

    def check_gpus(self, wanted: str) -> None:
        """Checks that this process can map the wanted device tiers. Raises Unsupported."""
        for tier, fields in self.gpus.items():
            if wanted in ("device", self.tiers[tier]):
                _device().gpu_at(_device().GpuPlace.of(fields))

    def let_go(self, *, leases: Sequence[int] = (), reservations: Sequence[int] = ()) -> None:
        """Ends holds without waiting. Finalisers may call it; unsent messages go with the next one."""
        if leases and not reservations and self.notices.post(leases):
            return
        self.post({"op": "release", "reply": False, "leases": list(leases), "reservations": list(reservations)})

    def revoke(self, request: str) -> None:
        """Takes back the result of a call whose reply will not be read. It waits for no answer."""
        self.post({"op": "revoke", "request": request})

    def release(self, leases: Iterable[int], *, timeout_s: float) -> None:
        """Ends leases and waits until the daemon has done it."""
        ids = list(leases)
        for start in range(0, len(ids), IDS_PER_MESSAGE):
            part = ids[start : start + IDS_PER_MESSAGE]
            self.ask({"op": "release", "leases": part, "reply": True}, timeout_s=timeout_s)

    def abort(self, reservations: Sequence[int], *, timeout_s: float) -> None:
        """Ends as many reservations as a message holds, and waits until the daemon has done it."""
        self.ask({"op": "release", "reservations": list(reservations), "reply": True}, timeout_s=timeout_s)

    def _fetch(self, place: Place, *, timeout_s: float) -> MappedSegment | DeviceSegment:
        tier, segment = place
        reply, fds = self._exchange({"op": "map", "tier": tier, "segment": segment}, timeout_s=timeout_s)
        try:
            checked(reply)
            check_came(fds, 2, what=f"segment {segment}")
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
            close_fds(fds)


def connect_session(
    target: LocalTarget, *, name: str, engine: Mapping[str, str], credential: str | None, timeout_s: float
) -> Session:
    """Opens a session. Raises Unavailable, Overloaded, NotPermitted, VersionMismatch,
    DeadlineExceeded, Unsupported."""
    if sys.platform != "linux":
        raise Unsupported(f"tierd: {sys.platform} has no session sockets; connect to a daemon on Linux with host:port")
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise Overloaded(
            f"session socket: cannot be created ({error}): this process is at its limit of open descriptors; close some"
            " of them, or raise the limit (ulimit -n)"
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
        data, fds = receive(connection)
        try:
            reply = checked(msgpack.unpackb(data) if data else {})
            return Session(connection, reply, directory=_directory(fds, int(reply.get("directory", 0))))
        finally:
            close_fds(fds)
    except TimeoutError as error:
        hang_up(connection)
        raise DeadlineExceeded(f"daemon at {target}: no hello within {timeout_s:.3g} s; is it stuck?") from error
    except OSError as error:
        connection.close()
        raise Unavailable(f"daemon at {target}: it closed the connection during hello ({error}); try again") from error
    except BaseException:
        hang_up(connection)
        raise


def _directory(fds: Sequence[int], length: int) -> Directory | None:
    """Maps the directory that came with the daemon's hello; without one every get makes a call."""
    with contextlib.suppress(TierFailed, ValueError):  # the process can make no further mapping
        return (
            Directory(words_of(map_file(fds[0], length, writable=False), count=length // 8)) if fds and length else None
        )
    return None


def _device() -> Any:
    """Imports the module only when it is needed, because it looks for a driver."""
    from tierd.client.session import device  # noqa: PLC0415

    return device
