"""Lines: calls of one request and one reply, one after another, over a socket that a session has for itself.

A call of gRPC passes five threads in two processes and costs ten times what a message on a socket does, before anything of ours runs. So clients of
this machine ask the session socket for a few lines, each with one call at a time. The messages are those of the service `Cache`, in an `Ask` and an
`Answer` (cache.proto); each passes here what a call passes in guard.py: its session, its place among the calls in progress, its deadline, its
name in the metrics and logs, its error by name. gRPC takes the same calls from everybody else.

Purpose: a message in, a verb of the service, a message out. Non-purpose: what verbs do (service.py), bytes of a line (line.py). Invariants: no
verb runs without an open session and a place; a line holds a place only while a call of it runs; the end of a line is the end of its call; none
rests after its session has ended, and no session has more than LINES_BORNE; each message waits for the loop's next turn; in the end no line is cut off in the middle of a call that still has time.
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
from structlog.contextvars import bind_contextvars

from tierd._proto import cache_pb2 as pb
from tierd.errors import GRPC_STATUS, InvalidArgument, Overloaded, TierdError, Unavailable
from tierd.server.grpc.call_errors import DETAILS_LIMIT_CHARS, said_of
from tierd.server.grpc.caller import CALLER, Caller
from tierd.server.grpc.guard import Guard, parsed
from tierd.server.local_rpc.backlog import Backlog
from tierd.server.local_rpc.line import Line
from tierd.server.session.sessions import Session

T = TypeVar("T")
log = structlog.get_logger(__name__)

LINES = 8
"""What a session is told that it may have; each call on one takes a place like any other, so those that rest take none."""
LINES_BORNE = 2 * LINES
"""What it may have: of those that it has closed the daemon may not have heard yet."""
REQUEST_CHARS = 64
WRITERS_S = 1.0
"""In the end, for puts that are being written to be written."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A call that may be made. path: as gRPC names it, for credits and rights; name: for metrics."""

    name: str
    path: str
    parse: Callable[[bytes], Any]
    handle: Callable[[Any, Any], Coroutine[Any, Any, Message]]


class Lines:
    """All of a daemon's. service: whose handlers are called; verbs are found by their descriptors. answered: hears of each session of which a call has been."""

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
        """A new line: the client's end, which the caller gives away and closes. Raises Overloaded, OSError."""
        if self._open[session.id] >= LINES_BORNE:
            raise Overloaded(f"lines: {LINES_BORNE} of this session are open; close some of them")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._open[session.id] += 1
        task = asyncio.get_running_loop().create_task(self._hold(ours, session))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, session.id))
        return theirs

    def leave(self, session: int) -> None:
        """The session has ended, and so do its lines: those that rest or wait for more of a call now, the others
        after the call that they are in."""
        for task in [task for task, its in (*self._resting.items(), *self._awaiting.items()) if its.id == session]:
            task.cancel()

    async def finish(self, *, timeout_s: float) -> None:
        """Those that rest end now, those that wait for more of a call in WRITERS_S, the others after the call that
        they are in, or when the time is over."""
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
            log.error("line failed", session=session, exc_info=task.exception())

    async def _hold(self, ours: socket.socket, session: Session) -> None:
        """One line, to its end."""
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
                if line.owes_more:  # of a call that ended before it came
                    await self._rest(line, session)
                if not line.is_taken:
                    async with asyncio.timeout(self._guard.call_timeout_s):  # who does not read keeps nothing for ever
                        await line.taken()
                if line.has_more:
                    await asyncio.sleep(0)  # who sends ahead does not have the loop for himself
        except InvalidArgument as error:
            log.info("line closed", session=session.id, reason=str(error))
        except TimeoutError:
            log.info("line closed", session=session.id, reason="the client does not read its answers")
        finally:
            line.close()

    async def _next(self, line: Line, task: asyncio.Task[None], session: Session) -> bytes | None:
        """The next message; None at the end, whose ever it is. Raises InvalidArgument for one that is too long, or broken off."""
        if self._is_ending or not session.is_open:
            return None
        self._resting[task] = session
        try:
            return await line.read(patience_s=self._guard.call_timeout_s)
        finally:
            del self._resting[task]

    async def _rest(self, line: Line, session: Session) -> bytes:
        """The message that belongs to the call before it. Raises InvalidArgument, Unavailable."""
        task = asyncio.current_task()
        assert task is not None
        self._awaiting[task] = session
        try:
            raw = await line.read(patience_s=self._guard.call_timeout_s)
        finally:
            del self._awaiting[task]
        if raw is None:
            raise Unavailable("line: the client has closed it in the middle of a call; call again")
        line.owes_more = False
        return raw

    async def _serve(self, raw: bytes, session: Session, line: Line) -> None:
        """Writes the reply to one message, or why there is none, and counts it then."""
        begun, verb, outcome, request = time.perf_counter(), None, "ok", ""
        try:
            ask = parsed(pb.Ask.FromString, raw)
            request = ask.request[:REQUEST_CHARS] or f"c{next(self._numbers):x}"
            verb = self._verb(ask.method)
            line.owes_more = ask.more
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
            log.exception("call failed")
            details = f"internal fault, request {request}: see the daemon's log"
            line.write(pb.Answer(status="INTERNAL", details=details).SerializeToString())
        finally:
            self._guard.count(verb.name if verb else "Line", outcome, seconds=time.perf_counter() - begun)
            self._answered(session.id)

    def _verb(self, name: str) -> Verb:
        verb = self._verbs.get(name)
        if verb is None:
            raise InvalidArgument(f"ask.method: {name!r:.80} is none that a line takes; call it over gRPC")
        return verb

    async def _made(self, verb: Verb, ask: pb.Ask, session: Session, request: str, line: Line) -> Message:
        bind_contextvars(request=request, call=verb.name)
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
    """Its result, unless it waits for longer. A deadline is set up for what waits at all, which most calls do not. Raises TimeoutError."""
    try:
        paused = work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    async with asyncio.timeout_at(deadline):
        return await _resumed(work, paused)


@types.coroutine
def _resumed(work: Coroutine[Any, Any, T], paused: Any) -> Generator[Any, Any, T]:
    """As to await a coroutine that has come to its first pause."""
    try:
        while True:
            try:
                told = yield paused
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                paused = work.throw(error)
            else:
                paused = work.send(told)
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
