"""The connection to a daemon: made on the first call, and again after a restart or a fork.

The connector keeps one usable link and closes old ones. Retries are in links.py. A lost link's
mappings live as long as views into them. When the last view is gone, the connector tells the
current daemon, so that it need not keep those pages until this process ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tierd.client.connect import forks
from tierd.client.connect.link import Link, Transport
from tierd.client.connect.target import RemoteTarget, Target
from tierd.client.session.session import connect_session
from tierd.client.transport.requests import CREDENTIAL_KEY, SESSION_KEY
from tierd.errors import ConfigError, DeadlineExceeded, RetryError, TierdError, Unavailable
from tierd.tcp.bearer import read_bearer
from tierd.tcp.codecs import open_codec

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
"""Pauses between attempts to connect; they double. Calls of a best-effort client fail meanwhile."""
FORGET_TIMEOUT_S = 1.0

_forgettable: dict[str, deque[int]] = {}
"""By target: lost and unused sessions of this process. Any client's next call reports them."""
_closed: dict[str, deque[int]] = {}
"""By target: sessions of closed clients, reported again in case the daemon was dying."""


OpenTransport = Callable[..., Transport]
"""Makes the transport of a link to a gRPC address: (link, address)."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to connect. name, engine: shown to operators.

    is_patient: each call tries to connect, even right after a failure.
    """

    name: str = ""
    credential_file: str = ""
    connect_timeout_s: float = 5.0
    is_patient: bool = True
    engine: Mapping[str, str] = field(default_factory=dict)


class Connector:
    """The current link of a client. Threads may share it."""

    def __init__(self, target: Target, options: Options, open_transport: OpenTransport) -> None:
        """Raises InvalidArgument for an unknown codec, Unsupported for one that is not installed."""
        self.target = target
        self.codec = open_codec(target.codec, whose="this process") if isinstance(target, RemoteTarget) else None
        """The codec that this client wants for chunks."""
        self.forgettable = _forgettable.setdefault(str(target), deque())
        self._closed = _closed.setdefault(str(target), deque())
        self._options, self._open_transport = options, open_transport
        self._link: Link | None = None
        self._turn = threading.Lock()
        self._numbers = 0
        self._pause_s = FIRST_PAUSE_S
        self._next_try = 0.0
        self._last_error: TierdError | None = None
        self._is_closed = False
        self._opening: Future[Link] | None = None
        forks.register(self)

    def introduce(self, engine: Mapping[str, str]) -> None:
        """Sets the engine named in the next hello. A link that named another one is closed."""
        if engine != self._options.engine:
            with self._turn:
                self._options = replace(self._options, engine=dict(engine))
                self.lose(self._link)

    @property
    def link(self) -> Link | None:
        """The last link, usable or not."""
        return self._link

    def current(self) -> Link | None:
        """The link if it is usable. Raises Unavailable after close, and for a best-effort client in a pause."""
        link = self._link
        if link is not None and link.is_usable:
            return link
        if self._is_closed:
            raise Unavailable("client: it is closed; make a new one")
        if self._last_error is not None and not self._options.is_patient and time.monotonic() < self._next_try:
            raise Unavailable(str(self._last_error))
        return None

    def connect(self, *, instead_of: Link | None, timeout_s: float) -> Link:
        """Replaces an unusable link, unless another thread has. Blocks. Raises as connecting does."""
        with self._turn:
            link = self.current() if self._link is not instead_of else None
            if link is None:
                self.lose(self._link)
                link = self._link = self._try(timeout_s)
                with contextlib.suppress(IndexError):  # the deque is empty, or another thread empties it
                    while True:
                        self.forgettable.append(self._closed.popleft())
        self.forget()
        return link

    def _try(self, timeout_s: float) -> Link:
        most_s = self._options.connect_timeout_s
        try:
            link = self._open(min(timeout_s, most_s)) if self._options.is_patient else self._opened(timeout_s, most_s)
        except RetryError as error:
            if self._opening is not None:
                raise  # connecting goes on
            self._last_error = error
            self._next_try = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            raise
        self._pause_s, self._last_error = FIRST_PAUSE_S, None
        return link

    def _opened(self, timeout_s: float, most_s: float) -> Link:
        """Opens a link in a thread of its own. If this call times out, a later call takes the link."""
        opening = self._opening
        if opening is None:
            opening = self._opening = Future()
            threading.Thread(target=_fulfil, args=(opening, lambda: self._open(most_s)), daemon=True).start()
        try:
            link = opening.result(timeout_s)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"daemon at {self.target}: not connected within {timeout_s:.3g} s; try again later"
            ) from None
        finally:
            if opening.done():
                self._opening = None
        return link

    def lose(self, link: Link | None) -> None:
        """Closes a link. Its mappings stay for live views."""
        if link is None or link.is_lost:
            return
        link.is_lost = True
        if link.session and link.pins:
            link.session.unmap()  # the last view ends the session
        elif link.session:
            self._idle(link)
        if link.opened:
            link.opened.close()

    def forget(self) -> None:
        """Tells the daemon which sessions, also of a previous run, this process no longer uses."""
        link = self._link
        while self.forgettable and link is not None and link.session:
            try:
                session = self.forgettable.popleft()
            except IndexError:  # another thread reports it
                return
            try:
                link.session.ask({"op": "forget", "session": session}, timeout_s=FORGET_TIMEOUT_S)
            except RetryError:  # no answer: report it with a later call, or the pages stay held
                self.forgettable.append(session)
                return
            except TierdError:
                pass  # the daemon knows no such session

    def close(self) -> None:
        """Ends the session. Views that are alive stay readable."""
        self._is_closed = True
        self.lose(self._link)

    def forked(self) -> None:
        """In a child process: abandons the parent's link."""
        forks.abandon(self._link)
        if self._link and self._link.session:
            # This closes only this process's copy of the descriptor; the parent's session goes on.
            self._link.session.close()
        self._turn = threading.Lock()
        self._link, self._last_error, self._opening = None, None, None
        self.forgettable.clear()
        self._closed.clear()

    def _open(self, timeout_s: float) -> Link:
        self._numbers += 1
        options = self._options
        if isinstance(self.target, RemoteTarget):
            link = self._open_remote(self.target, options.credential_file, timeout_s=timeout_s)
            link.patience_s = math.inf if options.is_patient else options.connect_timeout_s
            return link
        credential = _read_credential(options.credential_file)
        session = connect_session(
            self.target, name=options.name, engine=options.engine, credential=credential, timeout_s=timeout_s
        )
        if not options.is_patient:
            session.patience_s = options.connect_timeout_s
        address, metadata = f"unix:{self.target.rpc_path}", ((SESSION_KEY, session.token),)
        link = Link(
            self._numbers, session, metadata=metadata, open_transport=partial(self._open_transport, address=address)
        )
        link.on_idle = self._idle
        return link

    def _open_remote(self, target: RemoteTarget, credential_file: str, *, timeout_s: float) -> Link:
        credential = read_bearer(credential_file, setting="credential_file") if credential_file else ""
        # gRPC reports a missing listener late; a plain connection fails at once.
        try:
            socket.create_connection((target.host, target.port), timeout=max(timeout_s, 0.001)).close()
        except OSError as error:
            raise Unavailable(
                f"no daemon at {target} ({error}); is its server.tcp_listen set, and a tunnel open?"
            ) from error
        metadata = ((CREDENTIAL_KEY, f"Bearer {credential}"),) if credential else ()
        return Link(
            self._numbers, None, metadata=metadata, open_transport=partial(self._open_transport, address=target.address)
        )

    def _idle(self, link: Link) -> None:
        """The last use of a lost link has ended. Safe in finalisers: no lock, no waiting. The
        next daemon is told too, because a dying one may ignore the farewell."""
        if link.session and link.pid == os.getpid():
            link.session.leave()
            (self._closed if self._is_closed else self.forgettable).append(link.session.id)


def _fulfil(future: Future[Link], make: Callable[[], Link]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        future.set_exception(error)


def _read_credential(path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"credential_file: {path} cannot be read ({error}); give the path of a text file") from error
