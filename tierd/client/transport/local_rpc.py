"""Lines: stream sockets of a session, each with one call at a time.

    take ──▶ a resting line, or a new one ──▶ message, answer ──▶ the line rests

A call over a line costs a tenth of a call over gRPC. local.py makes the messages. A call ends by
its deadline. A line without its answer is closed, because the next answer would belong to the wrong
call. The daemon sees the close. A forked child closes its copies.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
import weakref

from tierd.client.connect import forks
from tierd.client.session.session import Session
from tierd.errors import OperatorError, Overloaded, Unavailable

HEAD = struct.Struct("<I")
"""The length before each message."""
MESSAGE_MAX_BYTES = 8 << 20
FIRST_BYTES = 64 << 10
"""Bytes of the first read; usually they are the whole answer."""


class LineLost(Unavailable):
    """The line of a call has ended but the session has not: retry the call over another line."""


class Line:
    """One line. One thread at a time uses it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""  # bytes read after the end of the received message
        weakref.finalize(self, connection.close).atexit = False

    def ask(self, message: bytes, *, deadline: float) -> bytes:
        """Sends and receives. Raises TimeoutError, EOFError, OSError, OperatorError: drop the line."""
        self.send(message, deadline=deadline)
        answer = self.receive(deadline=deadline)
        self.check_over()
        return answer

    def send(self, message: bytes, *, deadline: float) -> None:
        """Sends a message: the first half of `ask`."""
        self._wait(deadline)
        self._socket.sendall(HEAD.pack(len(message)) + message, socket.MSG_NOSIGNAL)

    @property
    def is_answered(self) -> bool:
        """Whether an answer, or the end of the line, can be read."""
        return self.comes(0.0)

    def comes(self, within_s: float) -> bool:
        """Waits up to within_s for `is_answered`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(self._rest or poll.poll(within_s * 1000))

    def receive(self, *, deadline: float) -> bytes:
        """Receives the next message: the second half of `ask`."""
        data, self._rest = self._rest, b""
        while len(data) < HEAD.size:
            data += self._more(FIRST_BYTES, deadline)
        end = HEAD.size + HEAD.unpack_from(data)[0]
        if end > HEAD.size + MESSAGE_MAX_BYTES:
            raise OperatorError(f"daemon: an answer of {end} bytes is too long; use one tierd on both sides")
        parts, self._rest = [data[HEAD.size : end]], data[end:]
        missing = end - len(data)
        while missing > 0:
            parts.append(self._more(missing, deadline))
            missing -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check_over(self) -> None:
        """Raises OperatorError if bytes follow the answer: the next call would take them for its own."""
        if self._rest:
            raise OperatorError(f"daemon: {len(self._rest)} bytes after its answer; use one tierd on both sides")

    def close(self) -> None:
        """Closes the line, by the thread that uses it. Safe to call twice."""
        self.end()
        self._socket.close()

    def end(self) -> None:
        """Ends the call of another thread, which then closes the line. The descriptor stays open
        until then, because its number could be reused."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Closes a child's copy; the parent's line goes on."""
        self._socket.close()

    def _more(self, count: int, deadline: float) -> bytes:
        self._wait(deadline)
        data = self._socket.recv(count)
        if not data:
            raise EOFError("the daemon closed it")
        return data

    def _wait(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)


class LocalRpcPool:
    """The lines of one session, at most as many as the daemon allows. Threads may share it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._resting: list[Line] = []
        self._busy: set[Line] = set()
        self._turn = threading.Lock()
        self._opening = 0
        self._is_closed = False
        forks.register(self)

    def __len__(self) -> int:
        """The number of lines."""
        return len(self._resting) + len(self._busy)

    def take(self, *, timeout_s: float) -> Line | None:
        """A line; None: all are in use, or no more are allowed. Raises SessionLost, DeadlineExceeded."""
        if line := self.take_resting():
            return line
        with self._turn:
            if self._is_closed or len(self._busy) + self._opening >= self._session.lines:
                return None
            self._opening += 1
        line = None
        try:
            line = Line(self._session.line(timeout_s=timeout_s))
        except Overloaded:
            return None
        finally:
            self._opened(line)
        return None if self._is_closed else line

    def take_resting(self) -> Line | None:
        """A line that is open and free, or None."""
        with self._turn:
            if not self._resting:
                return None
            line = self._resting.pop()
            self._busy.add(line)
            return line

    def _opened(self, line: Line | None) -> None:
        """Registers a requested line, or its failure. A line that arrives after `close` is closed."""
        with self._turn:
            self._opening -= 1
            if line is not None and not self._is_closed:
                self._busy.add(line)
                return
        if line is not None:
            line.close()

    def rest(self, line: Line) -> None:
        """The call has been answered; the line is free."""
        with self._turn:
            self._busy.discard(line)
            if not self._is_closed:
                self._resting.append(line)
                return
        line.close()

    def drop(self, line: Line) -> None:
        """The call has not been answered; the line is closed."""
        line.close()
        with self._turn:
            self._busy.discard(line)

    def drop_resting(self) -> None:
        """Closes all free lines, since they may have ended with the one that failed."""
        with self._turn:
            resting, self._resting = self._resting, []
        for line in resting:
            line.close()

    def close(self) -> None:
        """Ends all lines, and the calls in progress."""
        with self._turn:
            self._is_closed, resting, busy = True, self._resting, list(self._busy)
            self._resting = []
        for line in busy:
            line.end()
        for line in resting:
            line.close()

    def forked(self) -> None:
        """In a child process: closes the copies of the parent's lines."""
        for line in [*self._resting, *self._busy]:
            line.abandon()
        self._resting, self._busy, self._turn, self._is_closed = [], set(), threading.Lock(), True
