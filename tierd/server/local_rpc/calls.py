"""Lines: calls of one request and one reply, one after another, over a socket of one session.

A gRPC call passes five threads in two processes. That costs ten times as much as a message on a
socket, before our code runs. So local clients ask the session socket for a few lines, each with one
call at a time. The messages are those of the service `Cache`, in an `Ask` and an `Answer`
(cache.proto). Each call passes the same checks as in guard.py. It needs its session, a place among
the calls in progress, and a deadline. Metrics, logs and errors have its name. gRPC accepts the same
calls.

No verb runs without an open session and a place. A line holds a place only while its call runs. The
end of a line ends its call. No line is idle after its session has ended, and no session has more
than LINES_BORNE. Each message waits for the loop's next turn. At the daemon's end, no line is
closed during a call that still has time. Verbs are in service.py, bytes in line.py.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog
from google.protobuf.message import Message

from tierd._proto import cache_pb2 as pb
from tierd.call_context import InCall
from tierd.errors import GRPC_STATUS, InvalidArgument, Overloaded, TierdError, Unavailable
from tierd.server.grpc.call_errors import DETAILS_LIMIT_CHARS, said_of
from tierd.server.grpc.caller import CALLER, Caller
from tierd.server.grpc.guard import Guard, parsed
from tierd.server.local_rpc.backlog import Backlog
from tierd.server.local_rpc.line import Line
from tierd.server.session.sessions import Session
from tierd.tracing import NO_SPAN

T = TypeVar("T")
log = structlog.get_logger(__name__)

LINES = 8
"""Lines that a session may have, as its greeting says. Each call takes a place, so idle lines take
none."""
LINES_BORNE = 2 * LINES
"""Lines that the daemon accepts. It may not have noticed yet that some are closed."""
REQUEST_CHARS = 64
WRITERS_S = 1.0
"""At the end, time for puts to finish writing."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A call that a line accepts. path: its gRPC name, for credits and rights. name: for metrics."""

    name: str
    path: str
    parse: Callable[[bytes], Any]
    handle: Callable[[Any, Any], Coroutine[Any, Any, Message]]


class LocalRpcServer:
    """All lines of a daemon. service: has the handlers. answered: called with the session after
    each call."""

    def __init__(self, service: Any, *, guard: Guard, answered: Callable[[int], None]) -> None:
        self._guard, self._answered = guard, answered
        self._verbs = {verb.name: verb for verb in _verbs_of(service)}
        self._numbers = itertools.count(1)
        self._open: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resting: dict[asyncio.Task[None], Session] = {}
        self._awaiting: dict[asyncio.Task[None], Session] = {}
        self._backlog = Backlog()
        self._is_ending = False

    def open(self, session: Session) -> socket.socket:
        """A new line. Returns the client's end, which the caller sends and closes. Raises
        Overloaded, OSError."""
        if self._open[session.id] >= LINES_BORNE:
            raise Overloaded(f"local RPC: {LINES_BORNE} connections of this session are open, the limit; close some")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._open[session.id] += 1
        task = asyncio.get_running_loop().create_task(self._hold(ours, session))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, session.id))
        return theirs

    def leave(self, session: int) -> None:
        """Ends an ended session's lines: idle ones and those that wait for the rest of a call now,
        others after their call."""
        for task in [task for task, its in (*self._resting.items(), *self._awaiting.items()) if its.id == session]:
            task.cancel()

    async def finish(self, *, timeout_s: float) -> None:
        """Ends all lines: idle ones now, those that wait for the rest of a call after WRITERS_S.
        Others end after their call, or when the time is over."""
        self._is_ending = True
        for task in list(self._resting):
            task.cancel()
        asyncio.get_running_loop().call_later(WRITERS_S, lambda: [task.cancel() for task in list(self._awaiting)])
        if self._tasks and timeout_s > 0:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None], session: int) -> None:
        self._tasks.discard(task)
        self._open[session] -= 1
        if not self._open[session]:
            del self._open[session]
        if not task.cancelled() and task.exception() is not None:
            log.error("local RPC failed", session=session, exc_info=task.exception())

    async def _hold(self, ours: socket.socket, session: Session) -> None:
        """Serves one line until its end."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        try:
            _, line = await loop.connect_accepted_socket(lambda: Line(task.cancel, self._backlog), ours)
        except BaseException:
            ours.close()
            raise
        try:
            while (raw := await self._next(line, task, session)) is not None:
                await self._serve(raw, session, line)
                if line.owes_more:  # it belongs to a call that ended before
                    await self._rest(line, session)
                if not line.is_taken:
                    async with asyncio.timeout(self._guard.call_timeout_s):  # limits how long a client may not read
                        await line.taken()
                if line.has_more:
                    await asyncio.sleep(0)  # lets other clients run before a pipelined call
        except InvalidArgument as error:
            log.info("local RPC closed", session=session.id, reason=str(error))
        except TimeoutError:
            log.info("local RPC closed", session=session.id, reason="the client does not read its answers")
        finally:
            line.close()

    async def _next(self, line: Line, task: asyncio.Task[None], session: Session) -> bytes | None:
        """The next message, or None at the end of the line. Raises InvalidArgument for one that is
        too long or incomplete."""
        if self._is_ending or not session.is_open:
            return None
        self._resting[task] = session
        try:
            return await line.read(patience_s=self._guard.call_timeout_s)
        finally:
            del self._resting[task]

    async def _rest(self, line: Line, session: Session) -> bytes:
        """The second message of a call. Raises InvalidArgument, Unavailable."""
        task = asyncio.current_task()
        assert task is not None
        self._awaiting[task] = session
        try:
            raw = await line.read(patience_s=self._guard.call_timeout_s)
        finally:
            del self._awaiting[task]
        if raw is None:
            raise Unavailable("local RPC: the client closed the connection during a call; call again")
        line.owes_more = False
        return raw

    async def _serve(self, raw: bytes, session: Session, line: Line) -> None:
        """Writes the reply to one message, or its error, and counts it."""
        begun, verb, outcome, request = time.perf_counter(), None, "ok", ""
        step: Any = NO_SPAN
        try:
            ask = parsed(pb.Ask.FromString, raw)
            request = ask.request[:REQUEST_CHARS] or f"c{next(self._numbers):x}"
            verb = self._verb(ask.method)
            line.owes_more = ask.more
            span = self._guard.traced(verb.name, ask.traceparent, call=request, session=session.id)
            with InCall(request, verb.name), span as step:
                reply = await self._made(verb, ask, session, request, line)
            line.write(pb.Answer(message=reply.SerializeToString()).SerializeToString())
        except (TierdError, TimeoutError) as error:
            outcome = type(error).__name__
            line.write(_refusal(error).SerializeToString())
        except asyncio.CancelledError:
            outcome = "Cancelled"
            raise
        except Exception as error:
            outcome = type(error).__name__
            log.exception("call failed", call=request)
            details = f"internal fault, call {request}: see the daemon's log"
            line.write(pb.Answer(status="INTERNAL", details=details).SerializeToString())
        finally:
            seconds = time.perf_counter() - begun
            self._guard.count(verb.name if verb else "Line", outcome, seconds=seconds, call=request, step=step)
            self._answered(session.id)

    def _verb(self, name: str) -> Verb:
        verb = self._verbs.get(name)
        if verb is None:
            raise InvalidArgument(f"ask.method: {name!r:.80} is no method of local RPC; call it over gRPC")
        return verb

    async def _made(self, verb: Verb, ask: pb.Ask, session: Session, request: str, line: Line) -> Message:
        who, deadline = session.identity, self._guard.deadline(ask.timeout_us / 1e6)
        caller = Caller(
            session.id,
            who.tenant,
            who.is_admin,
            request,
            deadline,
            rest=partial(self._rest, line, session) if ask.more else None,
        )
        with self._guard.place(verb.path, session.id):
            CALLER.set(caller)
            return await _in_time(verb.handle(parsed(verb.parse, ask.message), None), caller.deadline)


async def _in_time(work: Coroutine[Any, Any, T], deadline: float) -> T:
    """The result of the coroutine within the deadline. Raises TimeoutError. The deadline is set
    only if the coroutine waits, which most calls do not."""
    try:
        paused = work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    async with asyncio.timeout_at(deadline):
        return await _resumed(work, paused)


@types.coroutine
def _resumed(work: Coroutine[Any, Any, T], paused: Any) -> Generator[Any, Any, T]:
    """Awaits a coroutine that is at its first pause."""
    try:
        while True:
            try:
                sent = yield paused
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                paused = work.throw(error)
            else:
                paused = work.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result


def _verbs_of(service: Any) -> list[Verb]:
    described = pb.DESCRIPTOR.services_by_name["Cache"]
    return [
        Verb(
            method.name,
            f"/{described.full_name}/{method.name}",
            getattr(pb, method.input_type.name).FromString,
            getattr(service, method.name),
        )
        for method in described.methods
        if not (method.client_streaming or method.server_streaming)
    ]


def _refusal(error: TierdError | TimeoutError) -> pb.Answer:
    said = said_of(error)
    retry_ms = math.ceil(said.retry_after_s * 1000) if isinstance(said, Overloaded) and said.retry_after_s else 0
    return pb.Answer(
        status=GRPC_STATUS[type(said)],
        error=type(said).__name__,
        details=str(said)[:DETAILS_LIMIT_CHARS],
        retry_ms=retry_ms,
    )
