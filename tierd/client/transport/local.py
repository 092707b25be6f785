"""The transport to a daemon on this machine: calls over lines, and the other calls over gRPC.

It chooses the way of each call; bytes of a line are in local_rpc.py, gRPC is in grpc_calls.py and
loaded when first needed. Every call has a deadline. If no reply comes, the daemon takes back the
call's result. A failure that the daemon itself did not report marks the link as broken, unless the
daemon says that only the line ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from tierd import tracing
from tierd._proto import cache_pb2 as pb
from tierd.client.blocks.page_grants import PageGrants
from tierd.client.connect import cancellation
from tierd.client.connect.link import Link, Meanwhile
from tierd.client.transport.local_rpc import MESSAGE_MAX_BYTES, Line, LineLost, LocalRpcPool
from tierd.client.transport.replies import error_of
from tierd.client.transport.requests import GIVING
from tierd.errors import DeadlineExceeded, OperatorError, Overloaded, TierdError, Unavailable

if TYPE_CHECKING:
    from tierd.client.transport.grpc_calls import Replies, SyncTransport

_REPLIES = {
    method.name: getattr(pb, method.output_type.name).FromString
    for method in pb.DESCRIPTOR.services_by_name["Cache"].methods
    if not (method.client_streaming or method.server_streaming)
}
"""Parsers for the calls that lines carry."""


LINES_MOST = 1 << 10
"""More than the daemon's limit."""


class Sent:
    """A call in progress on a line. name: identifies its result; empty if it has none to take back."""

    def __init__(self, link: Link, lines: LocalRpcPool, line: Line, *, method: str, name: str) -> None:
        self._link, self._lines, self._line, self._method, self._name = link, lines, line, method, name
        self._asked_s = time.monotonic()

    def reply(self, *, deadline: float, meanwhile: Meanwhile | None = None) -> Any:
        """The reply. meanwhile: work to run first; if it fails, the call is given up. Raises TierdErrors."""
        try:
            if meanwhile is not None:
                meanwhile.run()
            with cancellation.ended_by(self._line.end):
                if meanwhile is not None:
                    self._line.send(meanwhile.rest(), deadline=deadline)
                answer = self._receive(deadline)
            cancellation.check()
            self._line.check_over()
            reply = None if answer.status else _REPLIES[self._method](answer.message)
            if self._link.session is not None:
                self._link.session.notices.note_answered(self._asked_s)
        except BaseException as error:  # noqa: BLE001 - raised again, in our words
            raise self.given_up(error, deadline) from None
        self._lines.rest(self._line)
        if reply is None:
            self._revoke()
            raise _refused(answer)
        return reply

    @property
    def is_answered(self) -> bool:
        """Whether the reply, or the end of the line, can be read."""
        return self._line.is_answered

    def comes(self, within_s: float) -> bool:
        """Waits up to within_s for `is_answered`."""
        return self._line.comes(within_s)

    def drop(self) -> None:
        """Gives the call up; its reply is not wanted."""
        self._lines.drop(self._line)
        self._revoke()

    def given_up(self, error: BaseException, deadline: float) -> BaseException:
        """Gives up a call that failed midway. Returns the error to raise."""
        self.drop()
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(f"daemon: no answer to {self._method} in time; allow more, or take it as a miss")
        if isinstance(error, OSError | EOFError):
            if self._is_served(deadline):
                self._lines.drop_resting()
                return LineLost(
                    f"daemon: the connection of {self._method} was closed during the call ({error}); try again"
                )
            self._link.is_broken = True
            return Unavailable(f"daemon: the connection was closed during the call ({error}); try again")
        if isinstance(error, DecodeError):
            return OperatorError(
                f"daemon: its answer to {self._method} is malformed ({error}); use one tierd on both sides"
            )
        return error

    def _is_served(self, deadline: float) -> bool:
        """Asks whether the daemon knows the session: a dying one closes its sockets one by one."""
        assert self._link.session is not None
        try:
            self._link.session.ask({"op": "ping"}, timeout_s=max(0.0, deadline - time.monotonic()))
        except TierdError:
            return False
        return True

    def _receive(self, deadline: float) -> pb.Answer:
        session = self._link.session
        assert session is not None
        while deadline - time.monotonic() > session.patience_s and not self._line.comes(session.patience_s):
            session.ask({"op": "ping"}, timeout_s=session.patience_s)  # a slow daemon is fine, a silent one is not
        return pb.Answer.FromString(self._line.receive(deadline=deadline))

    def _revoke(self) -> None:
        if self._name and self._link.session is not None:
            self._link.session.revoke(self._name)


class Later:
    """A call that keeps its turn until its reply is taken."""

    def __init__(self, sent: Sent, link: Link, method: str) -> None:
        self._sent, self._link, self._method = sent, link, method

    @property
    def is_answered(self) -> bool:
        """Whether the reply, or the end of the line, can be read."""
        return self._sent.is_answered

    def comes(self, within_s: float) -> bool:
        """Waits up to within_s for `is_answered`."""
        return self._sent.comes(within_s)

    def reply(self, *, deadline: float) -> Any:
        """The reply. Raises TierdErrors."""
        try:
            return self._sent.reply(deadline=deadline)
        finally:
            self._link.credits.give(self._method)

    def drop(self) -> None:
        """Gives the call up; the daemon takes back its result."""
        try:
            self._sent.drop()
        finally:
            self._link.credits.give(self._method)


class LocalTransport:
    """Calls to a local daemon. They block."""

    def __init__(self, link: Link, address: str) -> None:
        assert link.session is not None, "lines are a session's"
        self._link, self._session, self._address = link, link.session, address
        self._lines = LocalRpcPool(link.session)
        self._opened: SyncTransport | None = None
        self._turn = threading.Lock()
        self._page_grants = PageGrants(self.begin, lambda numbers: self._session.let_go(reservations=numbers))
        link.page_grants, link.credits.on_wait = self._page_grants, self._page_grants.give_back

    def call(self, method: str, request: Any, *, timeout_s: float, meanwhile: Meanwhile | None = None) -> Any:
        """One request, one reply. meanwhile: work to do while the daemon handles the request."""
        with self._link.credits.turn(method, timeout_s=timeout_s) as left_s:
            deadline = time.monotonic() + left_s
            sent = self._send(method, request, deadline=deadline, has_more=meanwhile is not None)
            if sent is None:
                if meanwhile is not None:
                    meanwhile.run()
                    meanwhile.complete(request)
                return self._rpc.ask(method, request, timeout_s=max(0.0, deadline - time.monotonic()))
            return sent.reply(deadline=deadline, meanwhile=meanwhile)

    def begin(self, method: str, request: Any, timeout_s: float, lines: int = 2) -> Later | None:
        """Sends a call whose reply is taken later, over one of at most `lines` lines.

        None: there is no turn or no resting line for it now, or the daemon cannot be reached.
        """
        turns = self._link.credits
        if turns.count == 1:  # keep the only turn for the next call
            return None
        waiter = turns.ask(method)
        if waiter is not None:
            turns.withdraw(waiter)
            return None
        sent = None
        try:
            sent = self._send(method, request, deadline=time.monotonic() + timeout_s, lines=lines)
        except TierdError:
            return None
        finally:
            if sent is None:
                turns.give(method)
        return Later(sent, self._link, method) if sent is not None else None

    def pull(self, method: str, request: Any, *, timeout_s: float, take: Callable[[Any], None]) -> None:
        """One request; `take` gets each reply."""
        self._rpc.pull(method, request, timeout_s=timeout_s, take=take)

    def push(self, method: str, requests: Iterator[Any], *, timeout_s: float) -> Any:
        """An iterator of requests, one reply."""
        return self._rpc.push(method, requests, timeout_s=timeout_s)

    def stream(self, method: str, request: Any) -> Replies:
        """Yields replies until closed."""
        return self._rpc.stream(method, request)

    def close(self) -> None:
        """Ends calls in flight."""
        self._page_grants.close()
        self._lines.close()
        if self._opened is not None:
            self._opened.close()

    @property
    def _rpc(self) -> SyncTransport:
        with self._turn:
            if self._opened is None:
                from tierd.client.transport.grpc_calls import SyncTransport  # noqa: PLC0415

                self._opened = SyncTransport(self._link, self._address)
            return self._opened

    def _send(
        self, method: str, request: Any, *, deadline: float, lines: int = LINES_MOST, has_more: bool = False
    ) -> Sent | None:
        """Starts a call; None: lines do not carry it, or none is free. has_more: a message follows.

        lines: below this number, a new line may be opened. Raises TierdErrors.
        """
        name = self._session.next_request() if method in GIVING else ""
        left_s = max(0.0, deadline - time.monotonic())
        message = request.SerializeToString()
        ask = pb.Ask(method=method, message=message, timeout_us=max(1, int(left_s * 1e6)), request=name, more=has_more)
        if tracing.is_possible():
            ask.traceparent = tracing.traceparent()
        raw = ask.SerializeToString()
        if len(raw) > MESSAGE_MAX_BYTES:
            return None
        line = self._lines.take(timeout_s=left_s) if len(self._lines) < lines else self._lines.take_resting()
        if line is None:
            return None
        sent = Sent(self._link, self._lines, line, method=method, name=name)
        try:
            line.send(raw, deadline=deadline)
        except BaseException as error:  # noqa: BLE001 - raised again, in our words
            raise sent.given_up(error, deadline) from None
        return sent


def _refused(answer: pb.Answer) -> TierdError:
    """The error that the daemon raised."""
    raised = error_of(answer.error or None, answer.details, status=answer.status)
    if isinstance(raised, Overloaded):
        raised.retry_after_s = answer.retry_ms / 1000
    return raised
