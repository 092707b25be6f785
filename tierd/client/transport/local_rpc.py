"""Lines: stream sockets of a session, each with one call at a time.

    take ──▶ a resting line, or a new one ──▶ message, answer ──▶ the line rests

Purpose: a message to the daemon and its answer, for a tenth of what a call of gRPC costs. Non-purpose: what messages say (local.py). Invariants: a
call ends by its deadline; a line whose answer did not come, whatever the reason, is closed, since the next answer would be the wrong one, and
closing it is what tells the daemon; a child of a fork closes its copies.
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
"""Read at once: as a rule that is the whole answer."""


class LineLost(Unavailable):
    """The line of a call has ended, and the session has not: the same call may be made over another."""


class Line:
    """One line. One thread at a time asks."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""  # of what came at once, what follows the message that was received
        weakref.finalize(self, connection.close).atexit = False

    def ask(self, message: bytes, *, deadline: float) -> bytes:
        """The answer. Raises TimeoutError, EOFError, OSError, OperatorError; after any exception the line is to be dropped."""
        self.send(message, deadline=deadline)
        answer = self.receive(deadline=deadline)
        self.check_over()
        return answer

    def send(self, message: bytes, *, deadline: float) -> None:
        """The first half of `ask`."""
        self._wait(deadline)
        self._socket.sendall(HEAD.pack(len(message)) + message, socket.MSG_NOSIGNAL)

    @property
    def is_answered(self) -> bool:
        """Whether there is something to receive, or nothing will ever come."""
        return self.comes(0.0)

    def comes(self, within_s: float) -> bool:
        """The same, or it comes to that in so long."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(self._rest or poll.poll(within_s * 1000))

    def receive(self, *, deadline: float) -> bytes:
        """The second half of `ask`: the next message."""
        data, self._rest = self._rest, b""
        while len(data) < HEAD.size:
            data += self._more(FIRST_BYTES, deadline)
        end = HEAD.size + HEAD.unpack_from(data)[0]
        if end > HEAD.size + MESSAGE_MAX_BYTES:
            raise OperatorError(f"daemon: an answer of {end} bytes; versions differ?")
        parts, self._rest = [data[HEAD.size : end]], data[end:]
        missing = end - len(data)
        while missing > 0:
            parts.append(self._more(missing, deadline))
            missing -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check_over(self) -> None:
        """Nothing may follow the answer: it would be taken for the next call's. Raises OperatorError."""
        if self._rest:
            raise OperatorError(f"daemon: {len(self._rest)} bytes after its answer; versions differ?")

    def close(self) -> None:
        """Ends the line. Of the thread that has it, and safe to call twice."""
        self.end()
        self._socket.close()

    def end(self) -> None:
        """Ends the call of another thread, which closes the line then. Its descriptor lives until that: its number may be another's the moment after."""
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


class Lines:
    """Those of one session: at most as many at one time as it was told. Threads may share it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._resting: list[Line] = []
        self._busy: set[Line] = set()
        self._turn = threading.Lock()
        self._opening = 0
        self._is_closed = False
        forks.register(self)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._resting) + len(self._busy)

    def take(self, *, timeout_s: float) -> Line | None:
        """A line to ask on; None: all are in use, or the daemon gives no more. Raises SessionLost, DeadlineExceeded."""
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
        """One that is there already."""
        with self._turn:
            if not self._resting:
                return None
            line = self._resting.pop()
            self._busy.add(line)
            return line

    def _opened(self, line: Line | None) -> None:
        """A line that was asked for is there, or will not be; what comes after the end is closed."""
        with self._turn:
            self._opening -= 1
            if line is not None and not self._is_closed:
                self._busy.add(line)
                return
        if line is not None:
            line.close()

    def rest(self, line: Line) -> None:
        """The call has been answered."""
        with self._turn:
            self._busy.discard(line)
            if not self._is_closed:
                self._resting.append(line)
                return
        line.close()

    def drop(self, line: Line) -> None:
        """The call has not been answered."""
        line.close()
        with self._turn:
            self._busy.discard(line)

    def drop_resting(self) -> None:
        """What ended one line may have ended these."""
        with self._turn:
            resting, self._resting = self._resting, []
        for line in resting:
            line.close()

    def close(self) -> None:
        """Ends all of them, and the calls in progress."""
        with self._turn:
            self._is_closed, resting, busy = True, self._resting, list(self._busy)
            self._resting = []
        for line in busy:
            line.end()
        for line in resting:
            line.close()

    def forked(self) -> None:
        """In a child: they are the parent's."""
        for line in [*self._resting, *self._busy]:
            line.abandon()
        self._resting, self._busy, self._turn, self._is_closed = [], set(), threading.Lock(), True
