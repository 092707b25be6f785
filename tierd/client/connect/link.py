"""A link: one daemon, one session, one process, and the transport of its calls.

The link opens its transport (local.py, grpc_calls.py) on first use. connection.py makes links and
replaces lost ones. A link is used only in the process that made it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from tierd.client.blocks.page_grants import PageGrants
from tierd.client.connect.credits import Credits
from tierd.client.session.session import Session
from tierd.tcp.codecs import WireCodec


class Meanwhile(Protocol):
    """Work during a call; the call waits for it and then sends a second message."""

    def run(self) -> None:
        """Runs once the request has been sent."""
        ...

    def rest(self) -> bytes:
        """The second message, sent when the work is done."""
        ...

    def complete(self, request: Any) -> None:
        """Completes the request if the work was done before it is sent; no message follows then."""
        ...


class Transport(Protocol):
    """The way to one daemon. All methods raise TierdErrors."""

    def call(self, method: str, request: Any, *, timeout_s: float, meanwhile: Meanwhile | None = None) -> Any:
        """One request, one reply. meanwhile: work during the call, or before it if that is impossible."""
        ...

    def begin(self, method: str, request: Any, timeout_s: float, lines: int) -> Any:
        """Sends a request whose reply is taken later, over one of at most `lines` lines.

        None: this is impossible now.
        """
        ...

    def pull(self, method: str, request: Any, *, timeout_s: float, take: Callable[[Any], None]) -> Any:
        """One request; `take` gets each reply."""
        ...

    def push(self, method: str, requests: Any, *, timeout_s: float) -> Any:
        """An iterator of requests, one reply."""
        ...

    def stream(self, method: str, request: Any) -> Any:
        """Yields replies until closed."""
        ...

    def close(self) -> None:
        """Closes the channel."""
        ...


class Link:
    """One daemon, one session, one process. number: tells links apart; session: None over TCP."""

    def __init__(
        self,
        number: int,
        session: Session | None,
        *,
        metadata: tuple[tuple[str, str], ...],
        open_transport: Callable[[Link], Transport],
    ) -> None:
        self.number = number
        self.session = session
        self.metadata = metadata
        self.credits = Credits(session.credits if session else 0)
        self.pid = os.getpid()
        self.opened: Transport | None = None
        """The transport, once a call was made."""
        self.page_grants: PageGrants | None = None
        """Only for a transport that can send a call and take its reply later."""
        self.patience_s = math.inf
        """After this long without an answer, the client probes the daemon."""
        self.codec: WireCodec | None = None
        """The codec for chunks, once the daemon has said that it supports it."""
        self.batch_blocks = 0
        """Maximum blocks of a call, over ranks and groups; 0 until the first namespace is opened."""
        self.share_bytes = 0
        """Bytes that the session may hold in host tiers at once; 0: the daemon has not said."""
        self.pins: set[object] = set()
        """Live views into its segments."""
        self.is_broken = False
        """A call failed without an answer from the daemon."""
        self.is_lost = False
        """The connector has closed it; another link takes its place."""
        self.on_idle: Callable[[Link], None] = lambda _link: None
        self._open_transport = open_transport
        self._opening = threading.Lock()

    @property
    def is_usable(self) -> bool:
        """Whether a call may use it."""
        if self.is_broken or self.is_lost or self.pid != os.getpid():
            return False
        return self.session is None or self.session.is_alive

    @property
    def transport(self) -> Transport:
        """The transport, made on first use."""
        if self.opened is None:
            with self._opening:
                self.opened = self.opened or self._open_transport(self)
        return self.opened

    def unpin(self, pin: object) -> None:
        """The last array of a view is gone."""
        self.pins.discard(pin)
        if self.is_lost and not self.pins:
            self.on_idle(self)
