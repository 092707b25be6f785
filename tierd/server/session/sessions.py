"""Sessions: the connected clients, their tokens, and the time when their holdings may be reused.

    open ──socket closed──▶ stopped ──process gone──▶ ended
      ├────────────process gone─────────────────────▶ ended
      └─its process uses nothing more──▶ left ──process gone──▶ ended
    restored (of an earlier daemon) ──process gone, or it uses nothing more──▶ ended

The table calls `on_stop` and `on_end` exactly once for each session, in this order; a restored one
only ends. It calls `on_leave` at most once between them. The call of `on_end` waits for the
process, never for a time: a living process may still access its memory.

A session that has left holds nothing. Its mappings are remembered until its process has gone. They
count for the first session that left, of the same process and domain, so a process may open and
close a million. All runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hmac
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import structlog

from tierd.errors import NotFound, NotPermitted, Overloaded, SessionLost, TierdError, Unavailable
from tierd.linux.processes import open_process
from tierd.server.session.identity import Identity, Peer

log = structlog.get_logger(__name__)

TOKEN_BYTES = 16
LINGERING_FACTOR = 4
"""Sessions in all for each that may be open. Includes closed ones with a living process."""


class SessionState(enum.Enum):
    """States of a session. Operators see the values."""

    OPEN = "open"
    STOPPED = "ended"
    RESTORED = "restored"


class MappedFiles(NamedTuple):
    """A segment for a client: descriptors, which the session socket closes after sending, and
    lengths in bytes."""

    data_fd: int
    data_bytes: int
    is_writable: bool
    catalogue_fd: int
    catalogue_bytes: int


@dataclass(eq=False)
class Session:
    """One client process. engine: its data of the engine that it serves. secret: proves its token.
    opened: monotonic seconds."""

    id: int
    identity: Identity
    peer: Peer
    pidfd: int
    name: str = ""
    sdk: str = ""
    engine: dict[str, str] = field(default_factory=dict)
    state: SessionState = SessionState.OPEN
    has_mapped: bool = False
    secret: str = field(default_factory=lambda: secrets.token_hex(TOKEN_BYTES), repr=False)
    opened: float = field(default_factory=time.monotonic)
    ended_because: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it is served."""
        return self.state is SessionState.OPEN

    @property
    def token(self) -> str:
        """Sent with the client's calls: the id, and 128 secret bits."""
        return f"{self.id:x}.{self.secret}"


class Connected(Protocol):
    """A client's socket, while it is open."""

    def close(self, why: TierdError | None = None) -> None:
        """Ends it, with a reason if given."""
        ...

    def read_messages(self) -> None:
        """Processes the client's waiting messages."""
        ...

    def read_notices(self) -> None:
        """Processes the client's waiting notices."""
        ...


@dataclass(frozen=True, slots=True)
class SessionCalls:
    """The daemon's actions on sessions. on_open may raise a TierdError to refuse; on_stop and
    on_end must not fail.

    - map_segment(session, tier, segment): the segment's files. Raises NotFound, NotPermitted,
      TierFailed.
    - on_release(session id, leases), on_abort(session id, reservation): as Release and Abort over
      gRPC. A client's garbage collector uses them, since it cannot wait for a reply.
    - on_leave(session id): releases all that it holds; its mappings stay recorded.
    - on_revoke(session id, request id): takes back what one call gave or will give.
    - on_join(session id, into=another): replaces on_end while the process lives and has left both.
      The other session takes over the record of what the two have mapped.
    - on_hit_report(session id, a notice): a get or a lookup that it made without a call.
    - directory(session): the directory of its domain.
    """

    on_open: Callable[[Session], None]
    on_stop: Callable[[int], None]
    on_end: Callable[[int], None]
    map_segment: Callable[[Session, int, int], MappedFiles]
    on_release: Callable[[int, Sequence[int]], None] = lambda _session, _leases: None
    on_abort: Callable[[int, int], None] = lambda _session, _reservation: None
    on_leave: Callable[[int], None] = lambda _session: None
    on_revoke: Callable[[int, str], None] = lambda _session, _request: None
    on_join: Callable[..., None] = lambda _session, **_into: None
    on_hit_report: Callable[[int, bytes], None] = lambda _session, _report: None
    directory: Callable[[Session], tuple[int, int] | None] = lambda _session: None


class Sessions:
    """Every session that has not ended. session_limit: open ones at one time; `limit` may change."""

    def __init__(self, calls: SessionCalls, *, session_limit: int) -> None:
        self._calls = calls
        self.limit = session_limit
        self._by_id: dict[int, Session] = {}
        self._connections: dict[int, Connected] = {}
        self._left: dict[tuple[Peer, int], Session] = {}  # by process and domain: the first one stands for all
        self.is_refusing = False

    def authenticate(self, token: str) -> Session:
        """The open session of a token. Raises SessionLost."""
        text, _, secret = token.partition(".")
        session = self._by_id.get(_number(text))
        # Compares in either case, so the time reveals nothing about ids.
        known = session.secret if session else "0" * (2 * TOKEN_BYTES)
        matches = hmac.compare_digest(known.encode(), secret.encode())
        if session is None or not matches or session.state is not SessionState.OPEN:
            why = session.ended_because if session and matches else ""
            raise SessionLost(why or "session: it has ended, or the daemon was restarted; open a session again")
        return session

    def list(self) -> list[Session]:
        """All sessions in the table, oldest first."""
        return list(self._by_id.values())

    def check_room(self) -> None:
        """Raises Overloaded if one more session would be too many."""
        is_open = sum(session.state is SessionState.OPEN for session in self._by_id.values())
        if is_open >= self.limit:
            raise Overloaded(f"sessions: {self.limit} are open (server.session_limit); close one or raise the limit")
        if len(self._by_id) >= self.limit * LINGERING_FACTOR:
            raise Overloaded(
                f"sessions: {len(self._by_id)}, most of them closed by processes that still run; end these or raise"
                " server.session_limit"
            )

    def open(self, session: Session, *, connection: Connected) -> None:
        """Takes a session in. Its pidfd belongs to it from now on, unless this raises.

        connection: closed when its process ends, or, with the reason, when it is cut off. Raises
        Overloaded, and what `on_open` raises.
        """
        self.check_room()
        self._calls.on_open(session)
        self._connections[session.id] = connection
        self._watch(session)

    def restore(self, session_id: int, *, peer: Peer, identity: Identity) -> bool:
        """Restores a session of an earlier daemon if its process lives. Otherwise False, without a
        callback."""
        pidfd = open_process(peer.pid, start_time=peer.start_time)
        if pidfd is None:
            return False
        self._watch(Session(session_id, identity, peer, pidfd, state=SessionState.RESTORED))
        return True

    def stop(self, session: Session) -> None:
        """Refuses its token: its socket is closed. Its holdings stay until its process has gone."""
        if session.state is SessionState.OPEN:
            session.state = SessionState.STOPPED
            self._call(self._calls.on_stop, session)

    def cut_off(self, session_id: int, why: TierdError) -> None:
        """Stops a session that breaks the rules, and sends the reason. Its holdings stay until its
        process has gone."""
        session, connection = self._by_id.get(session_id), self._connections.get(session_id)
        if session is None or connection is None:
            return
        log.warning("session cut off", session=session_id, pid=session.peer.pid, name=session.name, reason=str(why))
        session.ended_because = str(why)
        connection.close(why)

    def read_messages(self, session_id: int) -> None:
        """Processes the client's waiting messages on the session socket."""
        if connection := self._connections.get(session_id):
            connection.read_messages()

    def read_notices(self, session_id: int) -> None:
        """Processes the client's waiting notices."""
        if connection := self._connections.get(session_id):
            connection.read_notices()

    def leave(self, session: Session) -> None:
        """Releases all holdings and closes the connection, since its process uses neither."""
        del self._by_id[session.id]
        asyncio.get_running_loop().remove_reader(session.pidfd)
        self._connections.pop(session.id).close()
        self.stop(session)
        self._call(self._calls.on_leave, session)
        place = session.peer, session.identity.domain
        # Without a mapping there is no page that it could access.
        first = self._left.setdefault(place, session) if session.has_mapped else None
        if first is session:
            asyncio.get_running_loop().add_reader(session.pidfd, self._end_left, place)
            return
        os.close(session.pidfd)
        if first is None:
            self._call(self._calls.on_end, session)
        else:
            self._call(partial(self._calls.on_join, into=first.id), session)

    def forget(self, session_id: int, *, by: Session) -> None:
        """Ends a restored or a stopped session that its process does not use. Raises NotFound,
        NotPermitted, Unavailable."""
        session = self._by_id.get(session_id)
        if session is not None and session.is_open and session is not by and session.peer == by.peer:
            # Its process has closed it, but earlier messages are still being read.
            raise Unavailable(f"session {session_id}: the daemon has not processed its end yet; try again")
        if session is None or session.state is SessionState.OPEN:
            raise NotFound(f"session {session_id}: no cut-off session has this id; only those can be forgotten")
        if session.peer != by.peer:
            raise NotPermitted(f"session {session_id}: belongs to another process; only that process may forget it")
        if session.state is SessionState.RESTORED:
            self._end(session)
        else:
            self.leave(session)

    def close(self) -> None:
        """Stops watching. No session ends: the next daemon keeps their holdings."""
        for session in (*self._by_id.values(), *self._left.values()):
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
        self._by_id.clear()
        self._left.clear()
        self._connections.clear()

    def map_segment(self, session: Session, *, tier: int, segment: int) -> MappedFiles:
        """The files of a segment. Raises NotFound, NotPermitted, TierFailed."""
        session.has_mapped = True
        return self._calls.map_segment(session, tier, segment)

    def let_go(self, session: Session, *, leases: Sequence[int], reservations: Sequence[int]) -> None:
        """Ends leases and reservations. Those ended already are no error. Raises SessionLost."""
        if leases:
            self._calls.on_release(session.id, leases)
        for reservation in reservations:
            with contextlib.suppress(NotFound):
                self._calls.on_abort(session.id, reservation)

    def revoke(self, session: Session, request: str) -> None:
        """Takes back what a call gave. Its client gave the call up."""
        self._calls.on_revoke(session.id, request)

    def note_hit_report(self, session: Session, report: bytes) -> None:
        """Passes on a notice of a one-sided get or lookup."""
        self._calls.on_hit_report(session.id, report)

    def directory(self, session: Session) -> tuple[int, int] | None:
        """The directory of its trust domain: a descriptor, which the session socket closes after
        sending, and its length. None if there is none."""
        try:
            return self._calls.directory(session)
        except OSError as error:  # the daemon is out of descriptors, or of memory
            log.warning("no directory: each get of the session calls the daemon", session=session.id, error=str(error))
            return None

    def new_id(self) -> int:
        """An id below 2**63, never 0, that no session has, restored ones included."""
        while (number := secrets.randbits(63)) in self._by_id or not number:
            pass
        return number

    def _watch(self, session: Session) -> None:
        self._by_id[session.id] = session
        asyncio.get_running_loop().add_reader(session.pidfd, self._end, session)

    def _end(self, session: Session) -> None:
        """Ends a session: its process has gone, or does not use a restored one."""
        del self._by_id[session.id]
        asyncio.get_running_loop().remove_reader(session.pidfd)
        os.close(session.pidfd)
        if connection := self._connections.pop(session.id, None):
            connection.close()
        self.stop(session)
        self._call(self._calls.on_end, session)

    def _end_left(self, place: tuple[Peer, int]) -> None:
        """Ends a session that was left, since its process has gone."""
        session = self._left.pop(place)
        asyncio.get_running_loop().remove_reader(session.pidfd)
        os.close(session.pidfd)
        self._call(self._calls.on_end, session)

    def _call(self, call: Callable[[int], None], session: Session) -> None:
        try:
            call(session.id)
        except Exception:
            log.exception("session callback failed", session=session.id, call=getattr(call, "__name__", str(call)))


def _number(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
