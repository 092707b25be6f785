"""The client's end of the session socket: requests with replies, and one-way messages.

It is one blocking connection; replies may bring descriptors. Requests are in session.py,
reconnecting in connection.py. No call waits beyond its timeout, not even for its turn. A late reply
ends the connection, or is discarded before the next request if it was not vital. Finalisers may
call `post`, because it never blocks and takes no lock.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgpack

from tierd.client.transport.replies import error_of
from tierd.errors import DeadlineExceeded, OperatorError, Overloaded, SessionLost, Unavailable

REPLY_MAX_BYTES = 1 << 16


class SessionSocket:
    """One connection. When it ends or is collected, the daemon gets a farewell."""

    def __init__(self, connection: socket.socket) -> None:
        self.patience_s = math.inf
        """Time limit for requests that the daemon answers at once. A reply that comes later is
        discarded before the next request, and the session goes on."""
        self._connection = connection
        # A duplicate whose calls never wait: those of the first one wait even with MSG_DONTWAIT.
        self._glance = connection.dup()
        self._glance.setblocking(False)
        self._sockets = [connection, self._glance]
        self._turn = threading.Lock()
        self._owed = 0  # replies that no call waits for
        self._unsent: deque[dict[str, Any]] = deque()
        # No hold outlives the session's last link, so a collected session can send its farewell.
        self._farewell = weakref.finalize(self, _say_goodbye, self._glance, self._sockets, os.getpid())
        self._farewell.atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether the daemon still holds its end open. This takes a microsecond."""
        if self._unsent:
            self.flush()
        try:
            return bool(self._glance.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Ends the session. The daemon may reuse its pages once this process ends or leaves."""
        self._farewell.detach()
        _close_all(self._sockets)

    def leave(self) -> None:
        """Closes and tells a live daemon that this process no longer uses it. Safe in finalisers."""
        self._farewell()

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """One request, one reply. Raises what the daemon raised, SessionLost, DeadlineExceeded."""
        with self._turned(timeout_s) as left_s:
            reply, fds = self._exchange(request, timeout_s=left_s)
        close_fds(fds)
        return checked(reply)

    def post(self, message: dict[str, Any]) -> None:
        """Sends a message without an answer; if the socket does not take it now, it goes with the next one."""
        self._unsent.append(message)
        self.flush()

    def flush(self) -> None:
        """Sends messages that the socket did not take before."""
        while self._unsent:
            with contextlib.suppress(IndexError):
                message = self._unsent.popleft()
                try:
                    self._glance.send(msgpack.packb(message), socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    self._unsent.appendleft(message)
                    return
                except OSError:
                    self._unsent.clear()  # the daemon has gone, and the holds with it

    @contextlib.contextmanager
    def _turned(self, timeout_s: float) -> Iterator[float]:
        """One thread at a time; yields the seconds left. Raises DeadlineExceeded."""
        timeout_s = min(timeout_s, self.patience_s)
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=max(timeout_s, 0.0)):
            raise DeadlineExceeded(
                f"session socket: another thread's request had no answer within {timeout_s:.3g} s; is the daemon stuck?"
            )
        try:
            yield deadline - time.monotonic()
        finally:
            self._turn.release()

    def _exchange(
        self, request: Mapping[str, Any], *, timeout_s: float, is_vital: bool = True
    ) -> tuple[dict[str, Any], list[int]]:
        """is_vital: whether the session ends if the reply is late."""
        deadline = time.monotonic() + timeout_s
        try:
            while self._owed:
                close_fds(self._reply(deadline)[1])
            self._wait(deadline)
            self._connection.sendall(msgpack.packb(request), socket.MSG_NOSIGNAL)
            self._owed += 1
            data, fds = self._reply(deadline)
        except TimeoutError as error:
            if is_vital and self.patience_s == math.inf:
                with contextlib.suppress(OSError):
                    # shutdown takes effect even if a child being forked has a copy, so later
                    # messages for this session find it ended.
                    self._connection.shutdown(socket.SHUT_RDWR)
                _close_all(self._sockets)
            raise DeadlineExceeded(
                f"session socket: no answer to {request['op']} within {timeout_s:.3g} s; is the daemon stuck?"
            ) from error
        except OSError as error:
            raise SessionLost(
                f"session socket: the daemon has gone ({error}); the next call opens a session again"
            ) from error
        if not data:
            close_fds(fds)
            raise SessionLost("session socket: the daemon has gone; the next call opens a session again")
        return msgpack.unpackb(data), fds

    def _reply(self, deadline: float) -> tuple[bytes, list[int]]:
        self._wait(deadline)
        found = receive(self._connection)
        self._owed -= 1
        return found

    def _wait(self, deadline: float) -> None:
        self._connection.settimeout(max(deadline - time.monotonic(), 0.001))


def _say_goodbye(glance: socket.socket, sockets: Iterable[socket.socket], pid: int) -> None:
    """In a child process, only its copies are closed: the parent's session goes on."""
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            glance.send(msgpack.packb({"op": "bye"}), socket.MSG_NOSIGNAL)
    _close_all(sockets)


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def hang_up(connection: socket.socket) -> None:
    """Sends a farewell, because a hello that is answered later opens a session without an owner."""
    with contextlib.suppress(OSError):
        connection.settimeout(0)
        connection.send(msgpack.packb({"op": "bye"}), socket.MSG_NOSIGNAL)
    connection.close()


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, and the descriptors that came with it. Raises OSError."""
    # socket.recv_fds ignores its flags before Python 3.13: exec would inherit the descriptors.
    data, ancillary, _flags, _address = connection.recvmsg(
        REPLY_MAX_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds = [
        fd
        for level, kind, packed in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for fd in array("i", packed)
    ]
    return data, fds


def checked(reply: Mapping[str, Any]) -> dict[str, Any]:
    """A reply that is not a refusal. Raises what the daemon raised, Unavailable."""
    if not isinstance(reply, dict) or "ok" not in reply:
        raise Unavailable("session socket: the daemon closed it without an answer; try again")
    if not reply["ok"]:
        raise error_of(str(reply.get("error")), str(reply.get("message")), status="refused")
    return reply


def check_came(fds: Sequence[int], count: int, *, what: str) -> None:
    """Checks the number of descriptors. Raises Overloaded if the kernel dropped some because the
    process has no room, OperatorError if there are too many."""
    if len(fds) < count:
        raise Overloaded(
            f"session socket: {len(fds)} of {count} descriptors for {what} arrived: this process is at its limit of"
            " open descriptors; close some, or raise the limit (ulimit -n)"
        )
    if len(fds) > count:
        raise OperatorError(
            f"daemon: {len(fds)} descriptors for {what} instead of {count}; use one tierd on both sides"
        )


def close_fds(fds: Iterable[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)
