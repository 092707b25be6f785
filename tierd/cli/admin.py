"""A thin connection to the Admin service: a session like any client's, and one stub.

It sends requests, returns replies, and raises the daemon's errors as tierd's own. It draws nothing.
A failed connection raises Unavailable, with the address and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, overload

import grpc
from google.protobuf.message import Message

from tierd._proto import admin_pb2 as pb
from tierd._proto import admin_pb2_grpc
from tierd.client.connect import trusted
from tierd.client.connect.target import LocalTarget, resolve_target
from tierd.client.session.session import connect_session
from tierd.client.transport.grpc_calls import OPTIONS
from tierd.client.transport.replies import error_of
from tierd.client.transport.requests import SESSION_KEY
from tierd.errors import ERROR_KEY, DeadlineExceeded, NotPermitted, TierdError, Unavailable

OWN_NAME = "tierctl"
"""Name of this program's sessions."""
CALL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
TIME_KEY = "tierd-time-ms"
"""Metadata that moves a daemon's replay clock forward. Daemons with a real clock ignore it."""

Metadata = tuple[tuple[str, str], ...]


def connect(target: str | None) -> Connection:
    """Opens a new session with the daemon at a target. Raises InvalidArgument, Unavailable,
    NotPermitted and the errors of a hello."""
    place = resolve_target(target)
    if not isinstance(place, LocalTarget):
        raise NotPermitted(
            f"daemon at {place}: it accepts operators' calls only on its own machine; go there and give --target DIR"
        )
    session = connect_session(place, name=OWN_NAME, engine={}, credential=None, timeout_s=CONNECT_TIMEOUT_S)
    trusted.check(place.rpc_path)
    channel = grpc.insecure_channel(f"unix:{place.rpc_path}", options=OPTIONS)

    def close() -> None:
        channel.close()
        session.close()

    return Connection(channel, metadata=((SESSION_KEY, session.token),), close=close)


class Connection:
    """One session's access to the Admin service; a context manager."""

    def __init__(self, channel: grpc.Channel, *, metadata: Metadata, close: Callable[[], None]) -> None:
        self._stub: Any = admin_pb2_grpc.AdminStub(channel)
        self._metadata = metadata
        self._close = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def set_time(self, time_ms: float) -> None:
        """Moves a replay clock forward to the trace's time. A daemon with a real clock ignores it."""
        self._call("Status", pb.StatusRequest(), CALL_TIMEOUT_S, ((TIME_KEY, f"{time_ms:.3f}"),))

    @overload
    def ask(self, request: pb.StatusRequest, *, timeout_s: float = ...) -> pb.StatusReply: ...
    @overload
    def ask(self, request: pb.TiersRequest, *, timeout_s: float = ...) -> pb.TiersReply: ...
    @overload
    def ask(self, request: pb.BlocksRequest, *, timeout_s: float = ...) -> pb.BlocksReply: ...
    @overload
    def ask(self, request: pb.InspectRequest, *, timeout_s: float = ...) -> pb.InspectReply: ...
    @overload
    def ask(self, request: pb.SessionsRequest, *, timeout_s: float = ...) -> pb.SessionsReply: ...
    @overload
    def ask(self, request: pb.NamespacesRequest, *, timeout_s: float = ...) -> pb.NamespacesReply: ...
    @overload
    def ask(self, request: pb.EvictRequest, *, timeout_s: float = ...) -> pb.EvictReply: ...
    @overload
    def ask(self, request: pb.PinRequest, *, method: str, timeout_s: float = ...) -> pb.PinReply: ...
    @overload
    def ask(self, request: pb.DrainRequest, *, timeout_s: float = ...) -> pb.DrainReply: ...
    @overload
    def ask(self, request: pb.FlushRequest, *, timeout_s: float = ...) -> pb.FlushReply: ...
    @overload
    def ask(self, request: pb.BumpEpochRequest, *, timeout_s: float = ...) -> pb.BumpEpochReply: ...
    @overload
    def ask(self, request: pb.QuiesceRequest, *, timeout_s: float = ...) -> pb.QuiesceReply: ...
    @overload
    def ask(self, request: pb.ResumeRequest, *, timeout_s: float = ...) -> pb.ResumeReply: ...
    @overload
    def ask(self, request: pb.ScrubStatusRequest, *, timeout_s: float = ...) -> pb.ScrubStatusReply: ...
    @overload
    def ask(self, request: pb.WearRequest, *, timeout_s: float = ...) -> pb.WearReply: ...
    @overload
    def ask(self, request: pb.SetRequest, *, timeout_s: float = ...) -> pb.SetReply: ...
    @overload
    def ask(self, request: pb.ExplainRequest, *, timeout_s: float = ...) -> pb.ExplainReply: ...
    @overload
    def ask(self, request: pb.TreeRequest, *, timeout_s: float = ...) -> pb.TreeReply: ...
    @overload
    def ask(self, request: pb.CeilingRequest, *, timeout_s: float = ...) -> pb.CeilingReply: ...
    @overload
    def ask(
        self, request: pb.RecordStartRequest | pb.RecordStopRequest | pb.RecordStatusRequest, *, timeout_s: float = ...
    ) -> pb.RecordReply: ...

    def ask(self, request: Message, *, method: str = "", timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The reply to a request; the method defaults to the request's name. Raises the daemon's error."""
        return self._call(method or request.DESCRIPTOR.name.removesuffix("Request"), request, timeout_s)

    def follow(self, request: pb.ScrubRequest) -> Iterator[pb.ScrubPass]:
        """The daemon's reports during a scrub, until the iterator is closed. Raises the daemon's error."""
        call = self._stub.Scrub(request, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise error_from(error) from None
        finally:
            call.cancel()

    def _call(self, method: str, request: Message, timeout_s: float, extra: Metadata = ()) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout_s, metadata=(*self._metadata, *extra))
        except grpc.RpcError as error:
            raise error_from(error) from None


def error_from(error: Any) -> TierdError:
    """The daemon's error by the class name in the trailing metadata, else by the status code."""
    name = next((str(value) for key, value in error.trailing_metadata() or () if key == ERROR_KEY), None)
    status = error.code().name
    if name is None and status == "UNAVAILABLE":
        return Unavailable(f"daemon: the connection broke during the call ({error.details()}); see the daemon's log")
    if name is None and status == "DEADLINE_EXCEEDED":
        return DeadlineExceeded("daemon: no answer in time; see `tierctl top`, or raise --deadline if the verb has it")
    return error_of(name, error.details() or status, status=status)
