"""Conversations: calls of one request and one reply, one after another, over a stream that stays open (`Converse` in cache.proto).

A call of gRPC's own costs twice what a message on an open stream does, before anything of ours runs. So clients of this machine keep a few
streams, each with one call at a time, and every message passes here what a call passes in guard.py: its session, its place among
the calls in progress, its deadline, its name in the metrics and logs, its error by name.

Purpose: a message in, a verb of the service, a message out. Non-purpose: what verbs do (service.py), opening and ending of streams (guard.py).
Invariants: no verb runs without an open session and a place; a conversation holds a place only while a call of it runs; what
interrupts the stream interrupts its call; none rests after its session has ended, else a process that opens and closes sessions would
take all the daemon's streams; in the end no conversation is cut off in the middle of a call that still has time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from structlog.contextvars import bind_contextvars

from tierd._proto import cache_pb2 as pb
from tierd.errors import GRPC_STATUS, InvalidArgument, Overloaded, TierdError
from tierd.server.guard import CALLER, DETAILS_LIMIT_CHARS, Guard, parsed, said_of, unless_over

log = structlog.get_logger(__name__)

QUICK = frozenset({"Lookup", "Prefetch", "Release", "Abort", "ReportAttention"})
"""They wait for nothing, so no deadline is set up for them."""
REQUEST_CHARS = 64


@dataclass(frozen=True, slots=True)
class Verb:
    """A call that may be made. path: as gRPC names it, for credits and rights; name: for metrics."""

    name: str
    path: str
    parse: Callable[[bytes], Any]
    handle: Callable[[Any, Any], Awaitable[Any]]


class Conversations:
    """All of a daemon's. service: whose handlers are called; verbs are found by their descriptors."""

    def __init__(self, service: Any, *, guard: Guard) -> None:
        self._guard = guard
        self._verbs = {verb.name: verb for verb in _verbs_of(service)}
        self._numbers = itertools.count(1)
        self._resting: dict[asyncio.Task[Any], int] = {}
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Those that rest end now, the others after the call that they are in."""
        self._ending.set()
        for task in list(self._resting):
            task.cancel()

    def leave(self, session: int) -> None:
        """The session has ended, and so do its conversations: those that rest now, the others after the call that they are in."""
        for task in [task for task, its in self._resting.items() if its == session]:
            task.cancel()

    async def hold(self, context: Any) -> None:
        """One stream, to its end. Raises SessionLost with its session, AbortError for one that the daemon ends."""
        metadata = dict(context.invocation_metadata() or ())
        task = asyncio.current_task()
        assert task is not None
        while (raw := await self._next(context, task, metadata)) is not None:
            answer = await self._answer(raw, metadata)
            with unless_over():
                await context.write(answer)
        if self._ending.is_set():
            with unless_over():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "daemon: it is ending; try another one, or later")

    async def _next(self, context: Any, task: asyncio.Task[Any], metadata: dict[str, str]) -> bytes | None:
        """The next message; None at the end, whose ever it is. Raises SessionLost."""
        if self._ending.is_set():
            return None
        self._resting[task] = self._guard.session_of(metadata)
        try:
            raw = await context.read()
        except asyncio.CancelledError:
            if not self._ending.is_set():
                self._guard.session_of(metadata)
                raise
            return None
        finally:
            del self._resting[task]
        return raw if isinstance(raw, bytes) else None  # grpc.aio.EOF

    async def _answer(self, raw: bytes, metadata: dict[str, str]) -> pb.Answer:
        """The reply to one message, or why there is none."""
        begun, verb, outcome = time.perf_counter(), None, "ok"
        try:
            ask = parsed(pb.Ask.FromString, raw)
            verb = self._verb(ask.method)
            return await self._made(verb, ask, metadata)
        except (TierdError, TimeoutError) as error:
            outcome = type(error).__name__
            return _refusal(error)
        except asyncio.CancelledError:
            outcome = "Cancelled"
            raise
        except Exception as error:
            outcome = type(error).__name__
            log.exception("call failed")
            return pb.Answer(status="INTERNAL", details=f"internal fault, request {ask.request}: see the daemon's log")
        finally:
            self._guard.count(verb.name if verb else "Converse", outcome, seconds=time.perf_counter() - begun)

    def _verb(self, name: str) -> Verb:
        verb = self._verbs.get(name)
        if verb is None:
            raise InvalidArgument(f"ask.method: {name!r:.80} is none that a conversation takes; call it by itself")
        return verb

    async def _made(self, verb: Verb, ask: pb.Ask, metadata: dict[str, str]) -> pb.Answer:
        request = ask.request[:REQUEST_CHARS] or f"c{next(self._numbers):x}"
        bind_contextvars(request=request, call=verb.name)
        caller = self._guard.caller(verb.path, metadata, request, timeout_s=ask.timeout_us / 1e6 or math.inf)
        with self._guard.place(verb.path, caller.session):
            CALLER.set(caller)
            message = parsed(verb.parse, ask.message)
            if verb.name in QUICK:
                reply = await verb.handle(message, None)
            else:
                async with asyncio.timeout_at(caller.deadline):
                    reply = await verb.handle(message, None)
        return pb.Answer(message=reply.SerializeToString())


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
