"""A client's connection to the session socket: its hello, its requests, and its session's end with
the socket.

session_requests.py has the messages; `Sessions` acts on them. Before hello, only a refusal is sent.
A malformed request gets one error reply, and its connection is closed. No client can block the
daemon, in reading or in writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgpack
import structlog

from tierd.errors import InvalidArgument, Overloaded, TierdError, Unavailable
from tierd.failpoint import failpoint
from tierd.server.session import peers
from tierd.server.session import session_requests as requests
from tierd.server.session.hit_reports import LOOKED_UP, USED
from tierd.server.session.identity import Identity, Peer
from tierd.server.session.notices import Notices, leases_of
from tierd.server.session.sessions import Session, Sessions

log = structlog.get_logger(__name__)

OPERATOR = "tierctl"
"""A session of this name lasts for one call; a health check makes thousands a day."""

HELLO_TIMEOUT_S = 5.0
MESSAGES_AT_ONCE = 1024
"""Messages: more than the kernel keeps for a socket."""

Identify = Callable[[Peer, str | None], Identity]
"""Peer and credential to identity. Raises NotPermitted."""


class Owner(Protocol):
    """The listener. greeting: part of the reply to every accepted hello. open_line: returns the
    client's end of a new line."""

    sessions: Sessions
    identify: Identify
    open_line: Callable[[Session], socket.socket] | None
    greeting: Mapping[str, Any]

    def drop(self, connection: Connection) -> None:
        """Forgets a connection that has closed itself."""
        ...


class Connection:
    """One client's socket, from accept to close."""

    def __init__(self, accepted: socket.socket, owner: Owner) -> None:
        self.session: Session | None = None
        self._socket = accepted
        self._notices: Notices | None = None
        self._owner = owner
        loop = asyncio.get_running_loop()
        loop.add_reader(accepted, self._read)
        self._hello_timeout = loop.call_later(
            HELLO_TIMEOUT_S,
            lambda: self.close(Unavailable(f"session: no hello within {HELLO_TIMEOUT_S:g} s; connect again")),
        )

    def close(self, why: TierdError | None = None) -> None:
        """Ends the connection, with a reason if given, and stops its session. Safe to call twice."""
        if self._socket.fileno() < 0:
            return
        self.read_notices()
        if why is not None:
            self._send(requests.refusal(why))
        self._hello_timeout.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._notices is not None:
            self._notices.close()
        self._owner.drop(self)
        if self.session:
            self._owner.sessions.stop(self.session)

    def read_messages(self) -> None:
        """Processes waiting messages. Bounded: later ones wait for their turn."""
        for _ in range(MESSAGES_AT_ONCE):
            if not self._read():
                break
        self.read_notices()

    def read_notices(self) -> None:
        """Processes waiting notices."""
        if self._notices is None or self.session is None:
            return
        for data in self._notices.messages():
            if data.startswith((USED, LOOKED_UP)):
                self._owner.sessions.note_hit_report(self.session, data)
                continue
            leases = leases_of(data)
            try:
                self._owner.sessions.let_go(self.session, leases=leases, reservations=())
            except TierdError:
                pass
            except Exception:  # another session's call may read these notices, and must not fail
                log.exception("release failed", session=self.session.id, leases=len(leases))

    def _read(self) -> bool:
        """Reads one message. False if there was none."""
        try:
            data = self._socket.recv(requests.MESSAGE_MAX_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        try:
            self._answer(requests.request_of(data))
        except InvalidArgument as error:
            self.close(error)
        except TierdError as error:
            if self.session is None:
                self.close(error)
            else:
                self._send(requests.refusal(error))
        except Exception as error:  # one client's failure must not end the others
            log.exception("session request failed")
            self.close(
                Unavailable(f"session: internal fault ({type(error).__name__}), see the daemon's log; connect again")
            )

    def _answer(self, request: dict[str, Any]) -> None:
        op = request.get("op")
        if self.session is None:
            if op != "hello":
                raise InvalidArgument(f"session socket: {op!r:.80} before hello; send hello first")
            self._hello(request)
        elif op == "map":
            place = {name: requests.field(request, name, int) for name in ("tier", "segment")}
            self._map(self.session, **place)
        elif op == "line":
            self._line(self.session, wants_notices=request.get("mailbox") is True)
        elif op == "release":
            self._release(self.session, request)
        elif op == "forget":
            self._owner.sessions.forget(requests.field(request, "session", int), by=self.session)
            self._send({"ok": True})
        elif op == "revoke":
            self._owner.sessions.revoke(self.session, requests.field(request, "request", str)[:64])
        elif op == "bye":
            self._owner.sessions.leave(self.session)
        elif op == "ping":
            self._send({"ok": True})
        else:
            raise InvalidArgument(
                f"session socket: unknown op {op!r:.80}; known are hello, map, line, release, forget, revoke, bye, ping"
            )

    def _hello(self, request: dict[str, Any]) -> None:
        requests.check_versions(request)
        if self._owner.sessions.is_refusing:
            raise Unavailable("daemon: draining, no new sessions; connect to another one or try again later")
        self._owner.sessions.check_room()
        peer, pidfd = peers.peer_of(self._socket)
        try:
            session = Session(
                id=self._owner.sessions.new_id(),
                identity=self._owner.identify(peer, requests.credential(request)),
                peer=peer,
                pidfd=pidfd,
                name=requests.field(request, "name", str)[:128],
                sdk=requests.field(request, "sdk", str)[:64],
                engine=requests.engine(request),
            )
            self._owner.sessions.open(session, connection=self)
        except BaseException:
            os.close(pidfd)
            raise
        self._hello_timeout.cancel()
        self.session = session
        is_operator = session.identity.is_admin and session.name == OPERATOR
        log.log(
            logging.DEBUG if is_operator else logging.INFO,
            "session open",
            session=session.id,
            pid=peer.pid,
            uid=peer.uid,
            tenant=session.identity.tenant,
            name=session.name,
        )
        failpoint("session.hello.before_reply")
        reply = {"ok": True, "session": session.id, "token": session.token, **self._owner.greeting}
        directory = self._owner.sessions.directory(session)
        if directory is None:
            self._send(reply)
            return
        fd, reply["directory"] = directory
        try:
            self._send(reply, fds=[fd])
        finally:
            os.close(fd)

    def _map(self, session: Session, *, tier: int, segment: int) -> None:
        files = self._owner.sessions.map_segment(session, tier=tier, segment=segment)
        reply = {
            "ok": True,
            "bytes": files.data_bytes,
            "writable": files.is_writable,
            "catalogue_bytes": files.catalogue_bytes,
        }
        fds = [files.data_fd, files.catalogue_fd]
        try:
            failpoint("session.map.before_reply")
            self._send(reply, fds=fds)
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):  # closed all the same, and its client has a copy
                    os.close(fd)

    def _line(self, session: Session, *, wants_notices: bool) -> None:
        if self._owner.open_line is None:
            raise Overloaded("local RPC: this daemon does not offer it; call over gRPC")
        try:
            theirs = self._owner.open_line(session)
        except OSError as error:  # the daemon is out of descriptors
            raise Overloaded(f"local RPC: no connection can be made ({error}); call over gRPC, or try later") from error
        with theirs:
            notices_end = self._new_notices() if wants_notices else None
            if notices_end is None:
                self._send({"ok": True}, fds=[theirs.fileno()])
                return
            with notices_end:
                self._send({"ok": True, "mailbox": True}, fds=[theirs.fileno(), notices_end.fileno()])

    def _new_notices(self) -> socket.socket | None:
        """The client's end of new notices; an earlier end may not have arrived. None if the daemon
        is out of descriptors."""
        try:
            notices = Notices()
        except OSError:
            return None
        if self._notices is not None:
            self.read_notices()
            self._notices.close()
        self._notices = notices
        return notices.theirs

    def _release(self, session: Session, request: dict[str, Any]) -> None:
        leases, reservations = requests.numbers(request, "leases"), requests.numbers(request, "reservations")
        is_answered = requests.field(request, "reply", bool)
        try:
            self._owner.sessions.let_go(session, leases=leases, reservations=reservations)
        except TierdError:
            if is_answered:
                raise
            return
        if is_answered:
            self._send({"ok": True})

    def _send(self, reply: dict[str, Any], *, fds: list[int] | None = None) -> None:
        """Sends without waiting for a client that does not read."""
        try:
            socket.send_fds(self._socket, [msgpack.packb(reply)], fds or [])
        except OSError as error:
            log.info("session reply not sent", error=str(error))
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # _read sees the end of file and closes
