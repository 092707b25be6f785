"""gRPC for one link: the channel, its options, and its errors as TierdErrors.

This is the only module that imports grpc; the first call that needs it loads it. Every call has a
deadline. Every failure becomes a TierdError. A failure that the daemon itself did not report marks
the link as broken.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from tierd import tracing
from tierd._proto import cache_pb2 as pb
from tierd._proto import cache_pb2_grpc
from tierd.client.connect import cancellation, forks, trusted
from tierd.client.connect.link import Link, Meanwhile
from tierd.client.transport.replies import error_of
from tierd.client.transport.requests import GIVING, REQUEST_KEY
from tierd.errors import ERROR_KEY, RETRY_KEY, DeadlineExceeded, Overloaded, TierdError, Unavailable
from tierd.tcp.chunks import Codec

MESSAGE_MAX_BYTES = 8 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
    ("grpc.max_send_message_length", MESSAGE_MAX_BYTES),
    # Channels share no connections, neither with a lost link's nor across a fork.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.default_authority", "tierd"),
)
Metadata = tuple[tuple[str, str], ...]
_LOST = ("UNAVAILABLE", "CANCELLED", "UNKNOWN")


def _path(method: str) -> str:
    return f"/{pb.DESCRIPTOR.services_by_name['Cache'].full_name}/{method}"


class SyncTransport:
    """Calls over gRPC. They block."""

    def __init__(self, link: Link, address: str) -> None:
        self.link = link
        if link.session is not None:
            trusted.check(address.removeprefix("unix:"))
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self.stub: Any = cache_pb2_grpc.CacheStub(self._channel)
        # The codec here encodes and decodes chunks, so gRPC must not.
        self.stub.Put = self._channel.stream_unary(_path("Put"), None, pb.PutReply.FromString)
        self.stub.Get = self._channel.unary_stream(
            _path("Get"), pb.GetRequest.SerializeToString, Codec(pb.GetChunk).decode
        )

    def call(self, method: str, request: Any, *, timeout_s: float, meanwhile: Meanwhile | None = None) -> Any:
        """One request, one reply."""
        with self.link.credits.turn(method, timeout_s=timeout_s) as left_s:
            return self.ask(method, request, timeout_s=left_s)

    def ask(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """As `call`, for a call that already has its turn."""
        with named(self.link, method) as metadata, translated(self.link), forks.calling():
            return self._answer(getattr(self.stub, method), request, timeout_s=timeout_s, metadata=_traced(metadata))

    def begin(self, method: str, request: Any, timeout_s: float, lines: int) -> None:
        """None: gRPC has no lines."""

    def pull(self, method: str, request: Any, *, timeout_s: float, take: Callable[[Any], None]) -> None:
        """One request; `take` gets each reply."""
        with translated(self.link), forks.calling():
            call = getattr(self.stub, method)(request, timeout=timeout_s, metadata=_traced(self.link.metadata))
            with cancellation.ended_by(call.cancel), self._probed(call):
                try:
                    for reply in call:
                        take(reply)
                finally:
                    call.cancel()  # take may have raised; the daemon would keep the rest of its replies

    def push(self, method: str, requests: Iterator[Any], *, timeout_s: float) -> Any:
        """An iterator of requests, one reply."""
        with translated(self.link), forks.calling():
            return self._answer(
                getattr(self.stub, method), requests, timeout_s=timeout_s, metadata=_traced(self.link.metadata)
            )

    def stream(self, method: str, request: Any) -> Replies:
        """Yields replies until closed."""
        return Replies(self.link, getattr(self.stub, method)(request, metadata=self.link.metadata))

    def close(self) -> None:
        """Cancels calls in flight."""
        self._channel.close()

    def _answer(self, method: Any, request: Any, *, timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> Any:
        """The one reply to a request, or to an iterator of them."""
        if (
            not cancellation.is_possible() and self.link.patience_s > timeout_s
        ):  # a call that waits passes fewer threads
            return method(request, timeout=timeout_s, metadata=metadata)
        call = method.future(request, timeout=timeout_s, metadata=metadata)
        with cancellation.ended_by(call.cancel), self._probed(call):
            return call.result()

    @contextlib.contextmanager
    def _probed(self, call: Any) -> Iterator[None]:
        """Around a slow call: probes the daemon. Raises DeadlineExceeded if it is silent."""
        done, is_silent, patience_s = threading.Event(), threading.Event(), self.link.patience_s

        def look() -> None:
            while not done.wait(patience_s):
                try:
                    with forks.calling():
                        self.stub.Release(pb.ReleaseRequest(), timeout=patience_s, metadata=self.link.metadata)
                except grpc.RpcError as error:
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not done.is_set():
                        is_silent.set()
                        call.cancel()
                        return
                except ValueError:  # the channel was closed
                    return

        if patience_s != math.inf:
            threading.Thread(target=look, daemon=True).start()
        try:
            yield
        except (grpc.RpcError, grpc.FutureCancelledError):
            if is_silent.is_set():
                raise DeadlineExceeded(f"daemon: no answer for {patience_s:g} s; calls miss until it answers") from None
            raise
        finally:
            done.set()


class Replies:
    """Iterates over a stream's replies. One thread at a time takes the next; any may close it."""

    def __init__(self, link: Link, call: Any) -> None:
        self._link, self._call, self._is_closed = link, call, False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except grpc.RpcError as error:
            if self._is_closed:
                raise StopIteration from None
            raise translate(error, self._link) from None

    def close(self) -> None:
        """Ends the stream, and a thread that waits for its next reply."""
        self._is_closed = True
        self._call.cancel()


def _traced(metadata: Metadata) -> Metadata:
    """The metadata with the current span's traceparent, if there is one."""
    parent = tracing.traceparent()
    return (*metadata, ("traceparent", parent)) if parent else metadata


@contextlib.contextmanager
def named(link: Link, method: str) -> Iterator[tuple[tuple[str, str], ...]]:
    """Around a call: yields its metadata. If no reply comes, the daemon takes back the call's result."""
    session = link.session
    if session is None or method not in GIVING:
        yield link.metadata
        return
    request = session.next_request()
    try:
        yield (*link.metadata, (REQUEST_KEY, request))
    except BaseException:
        session.revoke(request)
        raise


@contextlib.contextmanager
def translated(link: Link) -> Iterator[None]:
    """Around a call: turns grpc's errors into TierdErrors."""
    try:
        yield
    except grpc.RpcError as error:
        raise translate(error, link) from None
    except (
        ValueError,
        grpc.FutureCancelledError,
    ) as error:  # grpc's words for a channel that another thread has just closed
        link.is_broken = True
        raise Unavailable(f"daemon: the connection was closed during the call ({error}); try again") from error


def translate(error: Any, link: Link) -> TierdError:
    """The error that the daemon raised, or the meaning of the transport's failure."""
    trailing = {key: str(value) for key, value in error.trailing_metadata() or ()}
    name, status = trailing.get(ERROR_KEY), error.code().name
    if name is None and status in _LOST:
        link.is_broken = True
    raised = error_of(name, error.details() or status, status=status)
    if isinstance(raised, Overloaded) and trailing.get(RETRY_KEY, "").isdecimal():
        raised.retry_after_s = int(trailing[RETRY_KEY]) / 1000
    return raised
