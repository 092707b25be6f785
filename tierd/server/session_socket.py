"""The session socket: identity, descriptors and life, beside gRPC, which can carry none of them.

AF_UNIX, SOCK_SEQPACKET; msgpack maps; one request, one reply (`release` may ask for none; `revoke` and `bye` get
none). An accept loop of its own, because asyncio's servers refuse SEQPACKET.

    hello  {op, proto, format, sdk, name, credential, engine} -> {ok, session, token, daemon, instance, tiers, ...}; what else this daemon takes, as `greeting` of listeners.py has it
    map    {op, tier, segment} -> {ok, bytes, writable, catalogue_bytes} and two descriptors: data, catalogue; data
    is a file, or the slab of a GPU
           where hello's row of the tier has gpu: {ordinal, uuid}
    line   {op, mailbox} -> {ok, mailbox} and one descriptor: a stream for calls, one after another (lines.py). With mailbox, for who has none, another: SEQPACKET, each message u8 numbers,
           little-endian, of leases that end, or a 0 and a Group that its client has got by itself (2^64 - 1: looked
           up), where hello says `one_sided`; nobody is woken by it (mailboxes.py)
    release {op, leases, reservations, reply} -> {ok} if reply: ends leases, aborts reservations
    forget {op, session} -> {ok}: a session that was cut off, of a former daemon perhaps, that this process uses nothing of any more
    revoke {op, request}, no answer: what the call with this `tierd-request` gave, or is still to give, is not wanted
    bye    {op}, no answer but the end: this process uses nothing of this session any more
    ping   {op} -> {ok}
    refused: {ok: false, error: class of tierd.errors, message}

Purpose: messages in, calls on `Sessions`. Invariants: nothing is answered before hello but a refusal; what is not a well-formed
request gets one error reply and its connection is closed; no client can make the daemon wait, for reading or for writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import structlog

import tierd
from tierd.core.versions import FORMAT_VERSION, PROTO_VERSION
from tierd.errors import ConfigError, InvalidArgument, Overloaded, TierdError, Unavailable, VersionMismatch
from tierd.failpoint import failpoint
from tierd.server import peers
from tierd.server.hearsay import LOOKED_UP, USED
from tierd.server.identity import Identity, Peer
from tierd.server.sessions import Session, Sessions

log = structlog.get_logger(__name__)

MESSAGE_MAX_BYTES = 4096
BACKLOG = 128
GREETING_LIMIT = 64
"""Connections at one time that have not said hello."""
HELLO_TIMEOUT_S = 5.0
ENGINE_WORDS, ENGINE_WORD_CHARS = 16, 128
"""What a hello may say of the engine that the client serves: so many pairs of text, so long."""
HEARD_AT_ONCE = 1024
"""Messages: more than the kernel keeps for a socket."""
MAILBOX_MESSAGE_BYTES = 20 << 10
"""Of one in a mailbox: the names of 512 blocks, and what else a Group says."""
MAILBOX_BYTES = 64 << 10
"""Linux doubles it and counts its own bookkeeping: a mailbox holds 4 of the longest messages, or 170 short ones. One
read takes what it holds, so a client that fills it meanwhile delays nobody."""
MAILBOX_HEARD_AT_ONCE = 128
_LEASE = struct.Struct("<Q")
ACCEPT_PAUSE_S = 0.2
"""Before the next try to accept when the process is out of descriptors."""

Identify = Callable[[Peer, str | None], Identity]
"""Peer and credential to identity. Raises NotPermitted."""


class SessionSocket:
    """The listener. greeting: what every accepted hello is told (daemon, instance, tiers, ...); mode: of the socket's file."""

    def __init__(
        self,
        path: str | Path,
        *,
        sessions: Sessions,
        identify: Identify,
        greeting: Mapping[str, Any],
        mode: int = 0o660,
    ) -> None:
        self.path = str(path)
        self.sessions = sessions
        self.identify = identify
        self.open_line: Callable[[Session], socket.socket] | None = None
        """Makes the client's end of a new line."""
        self.greeting = greeting
        self._mode = mode
        self._listener: socket.socket | None = None
        self._connections: dict[Connection, None] = {}  # in the order in which they came
        self._resume: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Binds and listens. A file in the way is taken for stale: call this under the instance's lock. Raises ConfigError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            Path(self.path).unlink(missing_ok=True)
            listener.bind(self.path)
            Path(self.path).chmod(self._mode)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"session socket: {self.path} cannot be bound ({error}); choose another server.runtime_dir"
            ) from error
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def refuse_new(self) -> None:
        """From now on a hello is answered with Unavailable."""
        self.sessions.is_refusing = True

    def close(self) -> None:
        """Closes every connection and the listener, and removes the socket's file. Sessions stay; see `Sessions.close`."""
        if self._resume:
            self._resume.cancel()
        for connection in list(self._connections):
            connection.close()
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            Path(self.path).unlink(missing_ok=True)

    def drop(self, connection: Connection) -> None:
        """A connection has closed itself."""
        self._connections.pop(connection, None)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError, InterruptedError):
            return
        except OSError as error:
            self._pause(error)
            return
        accepted.setblocking(False)
        connection = Connection(accepted, self)
        self._connections[connection] = None
        waiting = [c for c in self._connections if c.session is None]
        if len(waiting) > GREETING_LIMIT:
            # The one that has been silent for longest: whoever means to say hello does so at once.
            waiting[0].refuse(
                Overloaded(f"session socket: {GREETING_LIMIT} younger connections wait to say hello; connect again")
            )

    def _pause(self, error: OSError) -> None:
        """Out of descriptors or memory: accepting again at once would only spin."""
        log.error("session socket cannot accept", error=str(error))
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        loop.remove_reader(self._listener)
        self._resume = loop.call_later(ACCEPT_PAUSE_S, loop.add_reader, self._listener, self._accept)


class Connection:
    """One client's socket, from accept to close."""

    def __init__(self, accepted: socket.socket, owner: SessionSocket) -> None:
        self.session: Session | None = None
        self._socket = accepted
        self._mailbox: socket.socket | None = None
        self._owner = owner
        loop = asyncio.get_running_loop()
        loop.add_reader(accepted, self._read)
        self._hello_timeout = loop.call_later(
            HELLO_TIMEOUT_S,
            lambda: self.refuse(Unavailable(f"session: no hello within {HELLO_TIMEOUT_S:g} s; connect again")),
        )

    def refuse(self, error: TierdError) -> None:
        """Says why, and closes."""
        self.close(error)

    def close(self, why: TierdError | None = None) -> None:
        """Ends the connection, with a reason if there is one; a session stops being served. Safe to call twice."""
        if self._socket.fileno() < 0:
            return
        self.read_mailbox()
        if why is not None:
            self._send(_refusal(why))
        self._hello_timeout.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._mailbox is not None:
            self._mailbox.close()
        self._owner.drop(self)
        if self.session:
            self._owner.sessions.stop(self.session)

    def hear(self) -> None:
        """Takes what has come already. Bounded: a client that says more meanwhile is heard in its turn."""
        for _ in range(HEARD_AT_ONCE):
            if not self._read():
                break
        self.read_mailbox()

    def read_mailbox(self) -> None:
        """Takes what was there. What is no whole number says nothing; at its end there is nothing more to hear."""
        if self._mailbox is None or self.session is None:
            return
        heard_bytes = 0
        for _ in range(MAILBOX_HEARD_AT_ONCE):
            if heard_bytes > 2 * MAILBOX_BYTES:
                return
            try:
                data = self._mailbox.recv(MAILBOX_MESSAGE_BYTES)
            except OSError:
                return
            if not data:
                return
            heard_bytes += len(data)
            if data.startswith((USED, LOOKED_UP)):
                self._owner.sessions.note_told(self.session, data)
                continue
            leases = [lease for (lease,) in _LEASE.iter_unpack(data[: len(data) // _LEASE.size * _LEASE.size])]
            try:
                self._owner.sessions.let_go(self.session, leases=leases, reservations=())
            except TierdError:
                pass
            except Exception:  # another session's call may read this mailbox, and it is no fault of that call
                log.exception("release failed", session=self.session.id, leases=len(leases))

    def _read(self) -> bool:
        """One message, if there is one; whether there was."""
        try:
            data = self._socket.recv(MESSAGE_MAX_BYTES + 1)
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
            self._answer(_request(data))
        except InvalidArgument as error:
            self.refuse(error)
        except TierdError as error:
            if self.session is None:
                self.refuse(error)
            else:
                self._send(_refusal(error))
        except Exception as error:  # an accident with one client must not end the others
            log.exception("session request failed")
            self.refuse(
                Unavailable(f"session: internal fault ({type(error).__name__}), see the daemon's log; connect again")
            )

    def _answer(self, request: dict[str, Any]) -> None:
        op = request.get("op")
        if self.session is None:
            if op != "hello":
                raise InvalidArgument(f"session socket: {op!r:.80} before hello; send hello first")
            self._hello(request)
        elif op == "map":
            place = {name: _field(request, name, int) for name in ("tier", "segment")}
            self._map(self.session, **place)
        elif op == "line":
            self._line(self.session, wants_mailbox=request.get("mailbox") is True)
        elif op == "release":
            self._release(self.session, request)
        elif op == "forget":
            self._owner.sessions.forget(_field(request, "session", int), by=self.session)
            self._send({"ok": True})
        elif op == "revoke":
            self._owner.sessions.revoke(self.session, _field(request, "request", str)[:64])
        elif op == "bye":
            self._owner.sessions.leave(self.session)
        elif op == "ping":
            self._send({"ok": True})
        else:
            raise InvalidArgument(
                f"session socket: unknown op {op!r:.80}; known are hello, map, line, release, forget, revoke, bye, ping"
            )

    def _hello(self, request: dict[str, Any]) -> None:
        _check_versions(request)
        if self._owner.sessions.is_refusing:
            raise Unavailable("daemon: draining, no new sessions; connect to another one or try again later")
        self._owner.sessions.check_room()
        peer, pidfd = peers.peer_of(self._socket)
        try:
            session = Session(
                id=self._owner.sessions.new_id(),
                identity=self._owner.identify(peer, _credential(request)),
                peer=peer,
                pidfd=pidfd,
                name=_field(request, "name", str)[:128],
                sdk=_field(request, "sdk", str)[:64],
                engine=_engine(request),
            )
            self._owner.sessions.open(session, connection=self)
        except BaseException:
            os.close(pidfd)
            raise
        self._hello_timeout.cancel()
        self.session = session
        log.info(
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
                with contextlib.suppress(OSError):  # it is closed all the same, and its client has one of its own
                    os.close(fd)

    def _line(self, session: Session, *, wants_mailbox: bool) -> None:
        if self._owner.open_line is None:
            raise Overloaded("line: this daemon gives none; call over gRPC")
        try:
            theirs = self._owner.open_line(session)
        except OSError as error:  # the daemon is out of descriptors
            raise Overloaded(f"line: none can be made now ({error}); call over gRPC, or try again later") from error
        with theirs:
            mailbox = self._new_mailbox() if wants_mailbox else None
            if mailbox is None:
                self._send({"ok": True}, fds=[theirs.fileno()])
                return
            with mailbox:
                self._send({"ok": True, "mailbox": True}, fds=[theirs.fileno(), mailbox.fileno()])

    def _new_mailbox(self) -> socket.socket | None:
        """The client's end, in place of one that did not reach it; none, where the daemon is out of descriptors."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        if self._mailbox is not None:
            self.read_mailbox()
            self._mailbox.close()
        self._mailbox = ours
        ours.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAILBOX_BYTES)
        return theirs

    def _release(self, session: Session, request: dict[str, Any]) -> None:
        leases, reservations = _numbers(request, "leases"), _numbers(request, "reservations")
        is_answered = _field(request, "reply", bool)
        try:
            self._owner.sessions.let_go(session, leases=leases, reservations=reservations)
        except TierdError:
            if is_answered:
                raise
            return
        if is_answered:
            self._send({"ok": True})

    def _send(self, reply: dict[str, Any], *, fds: list[int] | None = None) -> None:
        """A client that does not read its replies is not waited for."""
        try:
            socket.send_fds(self._socket, [msgpack.packb(reply)], fds or [])
        except OSError as error:
            log.info("session reply not sent", error=str(error))
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # read as end of file by _read, which closes


def _request(data: bytes) -> dict[str, Any]:
    if len(data) > MESSAGE_MAX_BYTES:
        raise InvalidArgument(f"session socket: a message above {MESSAGE_MAX_BYTES} bytes; send less")
    try:
        request = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise InvalidArgument(
            f"session socket: not a msgpack map ({type(error).__name__}); send one request a message"
        ) from error
    if not isinstance(request, dict):
        raise InvalidArgument(
            f"session socket: a {type(request).__name__} instead of a map; send one request a message"
        )
    return request


def _numbers(request: dict[str, Any], name: str) -> list[int]:
    value = request.get(name, [])
    if not isinstance(value, list) or not all(type(number) is int and 0 <= number < 1 << 64 for number in value):
        raise InvalidArgument(f"session socket: {name} is {value!r:.80}, not a list of ids; correct the request")
    return value


def _field(request: dict[str, Any], name: str, kind: type) -> Any:
    value = request.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidArgument(f"session socket: {name} is {value!r:.80}, not {kind.__name__}; correct the request")
    return value


def _engine(request: dict[str, Any]) -> dict[str, str]:
    words = request.get("engine", {})
    if not isinstance(words, dict) or len(words) > ENGINE_WORDS:
        raise InvalidArgument(f"session socket: engine is not a map of at most {ENGINE_WORDS} texts; say less")
    if not all(isinstance(word, str) and len(word) <= ENGINE_WORD_CHARS for pair in words.items() for word in pair):
        raise InvalidArgument(
            f"session socket: engine has what is no text of {ENGINE_WORD_CHARS} characters; shorten it"
        )
    return words


def _credential(request: dict[str, Any]) -> str | None:
    return None if request.get("credential") is None else str(_field(request, "credential", str))


def _check_versions(request: dict[str, Any]) -> None:
    theirs, ours = (request.get("proto"), request.get("format")), (PROTO_VERSION, FORMAT_VERSION)
    if theirs == ours:
        return
    remedy = "use one tierd on both sides"
    if all(isinstance(number, int) for number in theirs):
        remedy = f"upgrade the {'client' if theirs < ours else 'daemon'}'s tierd"
    raise VersionMismatch(
        f"session: the client speaks protocol {theirs[0]!s:.20}, format {theirs[1]!s:.20}"
        f" (SDK {request.get('sdk')!s:.40}), the daemon protocol {PROTO_VERSION}, format {FORMAT_VERSION}"
        f" (tierd {tierd.__version__}); {remedy}"
    )


def _refusal(error: TierdError) -> dict[str, Any]:
    return {"ok": False, "error": type(error).__name__, "message": str(error)}
