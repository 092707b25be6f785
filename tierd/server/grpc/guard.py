"""The checks before every handler: identity, deadline, room.

One interceptor serves the Cache and Admin services. No handler runs without a caller. Every call
except Watch and Scrub has a deadline. No session can take all the room (credits.py). Every
exception becomes a named gRPC status (call_errors.py). An unexpected one is logged with the
request's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from tierd.call_context import InCall
from tierd.clock import Clock
from tierd.errors import InvalidArgument, NotPermitted, TierdError, Unsupported
from tierd.metrics import Metrics
from tierd.server.grpc.call_errors import abort, unless_over
from tierd.server.grpc.caller import CALLER, Caller
from tierd.server.grpc.credits import ENDLESS, Credits, Place
from tierd.tracing import NO_SPAN, Tracing, exemplar_of

log = structlog.get_logger(__name__)

LONGEST_S = 3600.0
"""Limit of a call's time, even if its client asks for more."""
SLOW_S = 0.001
"""Slower calls leave an exemplar. For all calls it would cost 1 us each."""
LOCAL = {f"/tierd.v1.Cache/{verb}" for verb in ("Acquire", "Release", "Reserve", "Commit", "Abort", "ReportAttention")}
"""Verbs that need a session of the client's own. The daemon's session for TCP never ends, so it
would never release what they hold."""
OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")


@dataclass
class Arrival:
    """A call that arrived, with its place or the reason for its refusal."""

    method: str
    metadata: dict[str, str]
    place: Place | None = None
    refusal: TierdError | None = None

    def taken(self) -> Place:
        """The place, held while the call is handled. Raises its refusal."""
        if self.refusal is not None:
            raise self.refusal
        assert self.place is not None
        return self.place


@dataclass
class Outcome:
    """How a call ended: ok, or the error's name."""

    name: str = "ok"
    step: Any = NO_SPAN


Parse = Callable[[Any], Any]
"""Bytes to a message. Raises DecodeError."""

Inner = Callable[[Any, Any], Awaitable[Any]]
"""The work of a call under the guard: stream and context to the reply."""

Authenticate = Callable[[str], tuple[int, str, bool]]
"""Token to (session, tenant, is_admin). Raises SessionLost."""


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """The interceptor. remote: session and tenant of the bearer credential; None if TCP is off."""

    def __init__(
        self,
        authenticate: Authenticate,
        *,
        clock: Clock,
        metrics: Metrics,
        credits: Credits,
        call_timeout_s: float,
        credential: str = "",
        remote: tuple[int, str] | None = None,
    ) -> None:
        self._authenticate = authenticate
        self._clock = clock
        self._metrics = metrics
        self._credits = credits
        self.call_timeout_s = call_timeout_s
        self._credential = credential
        self._remote = remote
        self.admit_peer: Callable[[str], None] = lambda _: None
        """Called with the peer of each call that has the TCP credential. Raises Overloaded."""
        self.tracing: Tracing | None = None
        """Makes the spans of calls, if the daemon exports them."""
        self._counted: dict[tuple[str, str], tuple[Any, Any]] = {}

    @property
    def running(self) -> int:
        """Calls in progress, without endless ones."""
        return self._credits.running

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Wraps the handler of a call."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_SERVICES):
            return handler
        arrival = self._arrived(details)
        parse = handler.request_deserializer
        # Every request is taken as a stream, so the guard reads the message within its time, and
        # none for a refused call. The guard also parses: gRPC would answer a malformed message with
        # UNKNOWN and a traceback.
        if arrival.refusal is not None:
            make, call = grpc.stream_unary_rpc_method_handler, self._unary(_nothing, arrival)
        elif handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler
            call = self._stream(handler.unary_stream, parse, arrival)
        else:
            make = grpc.stream_unary_rpc_method_handler
            inner = self._streamed if handler.request_streaming else self._single
            call = self._unary(inner(handler, parse), arrival)
        return make(call, None, handler.response_serializer)

    def _arrived(self, details: Any) -> Arrival:
        """Takes a place before the message is read. So waiting calls count, not only running ones."""
        metadata = {k: v for k, v in details.invocation_metadata or () if isinstance(v, str)}
        try:
            session = self._identify(metadata)[0]
            is_shared = self._remote is not None and session == self._remote[0]
            place = self._credits.place(details.method, session, is_shared=is_shared)
            return Arrival(details.method, metadata, place)
        except TierdError as error:
            return Arrival(details.method, metadata, refusal=error)

    def _single(self, handler: Any, parse: Parse) -> Inner:
        async def inner(_raw: Any, context: Any) -> Any:
            return await handler.unary_unary(await received(parse, context, within_s=self.call_timeout_s), context)

        return inner

    def _streamed(self, handler: Any, parse: Parse) -> Inner:
        return lambda raw, context: handler.stream_unary(_each_parsed(parse, raw), context)

    def _unary(self, inner: Inner, arrival: Arrival) -> Any:
        async def call(raw: Any, context: Any) -> Any:
            async with self._guarded(arrival, context) as caller, asyncio.timeout_at(caller.deadline):
                return await inner(raw, context)

        return call

    def _stream(self, inner: Callable[..., AsyncGenerator[Any, None]], parse: Parse, arrival: Arrival) -> Any:
        # Writes instead of yielding. So a cancelled call ends in its own task, not when a generator
        # is collected.
        async def call(_raw: Any, context: Any) -> None:
            async with self._guarded(arrival, context) as caller, asyncio.timeout_at(caller.deadline):
                message = await received(parse, context, within_s=self.call_timeout_s)
                async with contextlib.aclosing(inner(message, context)) as replies:
                    async for reply in replies:
                        with unless_over():
                            await context.write(reply)

        return call

    def deadline(self, timeout_s: float) -> float:
        """The deadline of a call with this timeout, in the loop's time. 0: the daemon's default."""
        return asyncio.get_running_loop().time() + min(timeout_s or self.call_timeout_s, LONGEST_S)

    def place(self, method: str, session: int) -> Place:
        """Takes a place for a local call. Raises Overloaded."""
        return self._credits.place(method, session)

    def traced(self, method: str, parent: str, *, call: str, session: int) -> AbstractContextManager[Any]:
        """A span around a call. parent: its traceparent, or empty."""
        if not parent or self.tracing is None:
            return NO_SPAN
        return self.tracing.call(method, parent, call=call, session=session)

    def count(self, method: str, outcome: str, *, seconds: float, call: str, step: Any) -> None:
        """Counts a call that has ended. Slow and traced ones leave an exemplar. step: the call's span."""
        found = self._counted.get((method, outcome))
        if found is None:  # cached: the labels take few values
            calls = self._metrics.calls.labels(method=method, outcome=outcome)
            found = self._counted[method, outcome] = calls, self._metrics.call_seconds.labels(method=method)
        found[0].inc()
        found[1].observe(seconds, exemplar_of(step, call) if step or seconds >= SLOW_S else None)

    @contextlib.asynccontextmanager
    async def _guarded(self, arrival: Arrival, context: Any) -> AsyncIterator[Caller]:
        name = arrival.method.rpartition("/")[2]
        request = arrival.metadata.get("tierd-request", "")[:64] or secrets.token_hex(4)
        parent = arrival.metadata.get("traceparent", "")
        with InCall(request, name), self._timed(name, request) as outcome:
            try:
                with arrival.taken():
                    caller = self._admit(arrival.method, arrival.metadata, context, request)
                    CALLER.set(caller)
                    with self.traced(name, parent, call=request, session=caller.session) as outcome.step:
                        yield caller
            except (TierdError, TimeoutError) as error:
                outcome.name = type(error).__name__
                await abort(context, error)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                outcome.name = "Cancelled"
                raise
            except Exception as error:
                outcome.name = type(error).__name__
                log.exception("call failed")
                with unless_over():
                    await context.abort(
                        grpc.StatusCode.INTERNAL, f"internal fault, call {request}: see the daemon's log"
                    )

    @contextlib.contextmanager
    def _timed(self, method: str, call: str) -> Iterator[Outcome]:
        outcome, begun = Outcome(), time.perf_counter()
        try:
            yield outcome
        finally:
            seconds = time.perf_counter() - begun
            self.count(method, outcome.name, seconds=seconds, call=call, step=outcome.step)

    def _admit(self, method: str, metadata: dict[str, str], context: Any, request: str) -> Caller:
        session, tenant, is_admin = self._identify(metadata)
        if method.startswith("/tierd.v1.Admin/") and not is_admin:
            raise NotPermitted(f"{method}: only root and the daemon's own user may call it; call as one of them")
        is_remote = self._remote is not None and session == self._remote[0]
        if is_remote:
            self.admit_peer(context.peer())
        if is_remote and method in LOCAL:
            raise Unsupported(f"{method}: handles need shared memory, and TCP has none; use Put and Get")
        self._advance_clock(metadata)
        return Caller(session, tenant, is_admin, request, self._deadline(method, context))

    def _deadline(self, method: str, context: Any) -> float:
        """The deadline in the loop's time: the client's own, at most an hour, or the daemon's
        default."""
        if method in ENDLESS:
            return math.inf
        left = context.time_remaining()
        return asyncio.get_running_loop().time() + min(self.call_timeout_s if left is None else left, LONGEST_S)

    def _identify(self, metadata: dict[str, str]) -> tuple[int, str, bool]:
        token = metadata.get("tierd-session")
        if token is not None:
            return self._authenticate(token)
        bearer = metadata.get("authorization", "").removeprefix("Bearer ")
        if self._remote and bearer and hmac.compare_digest(bearer.encode(), self._credential.encode()):
            return (*self._remote, False)
        raise NotPermitted(
            "call: it has neither a session's token nor the credential of server.tcp_credential_file; correct "
            "credential_file, or connect to the session socket first"
        )

    def _advance_clock(self, metadata: dict[str, str]) -> None:
        at_ms = metadata.get("tierd-time-ms")
        if at_ms is None or not self._clock.is_replay:
            return
        try:
            at = float(at_ms) / 1000
        except ValueError:
            at = math.nan
        if not math.isfinite(at):
            raise InvalidArgument(f"tierd-time-ms: {at_ms!r:.40} is not a number of milliseconds; correct it")
        self._clock.advance(at)


async def _nothing(_message: Any, _context: Any) -> None:
    """The handler of a refused call, which is never reached."""


def parsed(parse: Parse, raw: bytes) -> Any:
    """The message of these bytes. Raises InvalidArgument."""
    try:
        return parse(raw)
    except DecodeError as error:
        raise InvalidArgument(
            f"message: {len(raw)} bytes do not parse as the request ({error}); use the generated stubs"
        ) from error


async def received(parse: Parse, context: Any, *, within_s: float) -> Any:
    """The one message of a call. Raises InvalidArgument, TimeoutError."""
    async with asyncio.timeout(within_s):
        raw = await context.read()
    if not isinstance(raw, bytes):  # the client's stream ended
        raise InvalidArgument("call: it ended without its message; use the generated stubs")
    return parsed(parse, raw)


async def _each_parsed(parse: Parse, stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for raw in stream:
        yield parsed(parse, raw)
