"""The client's end of the session socket: requests and their replies, with descriptors, and words without a reply.

It is one blocking connection. What the requests are (session.py) and reconnecting (connection.py) are not its
business. Nobody waits beyond its time, not even for its turn. A reply that is late ends the connection, or, if it
was not vital, is thrown away before the next request. `post` never blocks and takes no lock: finalisers may call it.
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
    """One connection. It ends with a word to the daemon, also where it is collected."""

    def __init__(self, connection: socket.socket) -> None:
        self.patience_s = math.inf
        """For what a daemon answers at once; then its reply is read, and thrown away, before the next request, and the session goes on."""
        self._connection = connection
        # A second face of the same socket, whose calls never wait: the first one's wait for its timeout even with MSG_DONTWAIT.
        self._glance = connection.dup()
        self._glance.setblocking(False)
        self._sockets = [connection, self._glance]
        self._turn = threading.Lock()
        self._owed = 0  # replies that nobody waits for
        self._unsent: deque[dict[str, Any]] = deque()
        # Nothing that holds a page outlives the session's last link: what is collected without a word has said goodbye.
        self._farewell = weakref.finalize(self, _say_goodbye, self._glance, self._sockets, os.getpid())
        self._farewell.atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether the daemon still holds its end open: a look at the socket, a microsecond."""
        if self._unsent:
            self.flush()
        try:
            return bool(self._glance.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Ends the session's service; the daemon reuses what it held once this process has gone, or lets go."""
        self._farewell.detach()
        _close_all(self._sockets)

    def leave(self) -> None:
        """Closes, and says that this process uses nothing of it any more, if the daemon is there to hear it. For finalisers too."""
        self._farewell()

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """One request, its reply. Raises what the daemon raised, SessionLost, DeadlineExceeded."""
        with self._turned(timeout_s) as left_s:
            reply, fds = self._exchange(request, timeout_s=left_s)
        close_fds(fds)
        return checked(reply)

    def post(self, message: dict[str, Any]) -> None:
        """Says this, without an answer: what the socket does not take now goes with the next one."""
        self._unsent.append(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the socket did not take before."""
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
        """One thread at a time; the seconds left. Raises DeadlineExceeded."""
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
        """is_vital: whether the session ends where the reply does not come in time."""
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
                    # Told at once, though a child that is just being forked has a copy: what is told of this session next is told to one that has ended.
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
    """In a child only its own copies are closed: the parent's session goes on."""
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            glance.send(msgpack.packb({"op": "bye"}), socket.MSG_NOSIGNAL)
    _close_all(sockets)


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def hang_up(connection: socket.socket) -> None:
    """A hello that is answered later opens a session that nobody knows: it is to end, and not with this process."""
    with contextlib.suppress(OSError):
        connection.settimeout(0)
        connection.send(msgpack.packb({"op": "bye"}), socket.MSG_NOSIGNAL)
    connection.close()


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, and the descriptors that came with it. Raises OSError."""
    # Not socket.recv_fds, which leaves its flags out before Python 3.13: the descriptors would be inherited over exec.
    data, told, _flags, _address = connection.recvmsg(
        REPLY_MAX_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds = [
        fd
        for level, kind, packed in told
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for fd in array("i", packed)
    ]
    return data, fds


def checked(reply: Mapping[str, Any]) -> dict[str, Any]:
    """A reply that is no refusal. Raises what the daemon raised, Unavailable."""
    if not isinstance(reply, dict) or "ok" not in reply:
        raise Unavailable("session socket: the daemon closed it without a word; try again")
    if not reply["ok"]:
        raise error_of(str(reply.get("error")), str(reply.get("message")), status="refused")
    return reply


def check_came(fds: Sequence[int], count: int, *, what: str) -> None:
    """Descriptors for which a process has no room are dropped by the kernel, so too few of them say that; too many, that they mean something else."""
    if len(fds) < count:
        raise Overloaded(
            f"session socket: {len(fds)} of {count} descriptors for {what} came in: this process has as many open as it may; close some, or raise its limit (ulimit -n)"
        )
    if len(fds) > count:
        raise OperatorError(f"daemon: {len(fds)} descriptors for {what} instead of {count}; versions differ?")


def close_fds(fds: Iterable[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)
