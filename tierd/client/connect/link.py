"""A link: one daemon, one session, one process, and the way that calls go over it.

Calls are made by a transport (local.py, grpc_calls.py) that the link opens on first use. Making links and replacing lost
ones is connection.py's. A link is used only in the process that made it.
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
    """Work beside a call, which waits for it and for what follows it then."""

    def run(self) -> None:
        """The request has gone."""
        ...

    def rest(self) -> bytes:
        """The message that follows the request when the work is done."""
        ...

    def complete(self, request: Any) -> None:
        """The work is done before: no message follows the request."""
        ...


class Transport(Protocol):
    """The way to one daemon. All raise TierdErrors."""

    def call(self, method: str, request: Any, *, timeout_s: float, meanwhile: Meanwhile | None = None) -> Any:
        """One request, one reply. meanwhile: work while it is under way, or before it where that cannot be."""
        ...

    def begin(self, method: str, request: Any, timeout_s: float, lines: int) -> Any:
        """Sends a request whose reply is taken later, over one of so many lines; None where that cannot be now."""
        ...

    def pull(self, method: str, request: Any, *, timeout_s: float, take: Callable[[Any], None]) -> Any:
        """One request; every reply goes to take."""
        ...

    def push(self, method: str, requests: Any, *, timeout_s: float) -> Any:
        """An iterator of requests, one reply."""
        ...

    def stream(self, method: str, request: Any) -> Any:
        """Replies for as long as they are wanted, until closed."""
        ...

    def close(self) -> None:
        """Lets go of the channel."""
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
        """Its transport, once a call was made."""
        self.page_grants: PageGrants | None = None
        """Of a transport whose calls can be sent without waiting."""
        self.patience_s = math.inf
        """After so long without an answer the daemon is asked for a sign of life."""
        self.codec: WireCodec | None = None
        """By which chunks may be encoded, once the daemon has told that it knows it too."""
        self.batch_blocks = 0
        """How many a call may have, counted over ranks and groups; 0: not told yet, as it is with the first namespace that is opened."""
        self.share_bytes = 0
        """What the session may hold in host tiers at once; 0: not told."""
        self.pins: set[object] = set()
        """Views into its segments that are alive."""
        self.is_broken = False
        """A call failed without a word from the daemon."""
        self.is_lost = False
        """Closed by the connector; another link takes its place."""
        self.on_idle: Callable[[Link], None] = lambda _link: None
        self._open_transport = open_transport
        self._opening = threading.Lock()

    @property
    def is_usable(self) -> bool:
        """Whether a call may go over it."""
        if self.is_broken or self.is_lost or self.pid != os.getpid():
            return False
        return self.session is None or self.session.is_alive

    @property
    def transport(self) -> Transport:
        """Its transport, made on first use and where it is used."""
        if self.opened is None:
            with self._opening:
                self.opened = self.opened or self._open_transport(self)
        return self.opened

    def unpin(self, pin: object) -> None:
        """The last array of a view is gone."""
        self.pins.discard(pin)
        if self.is_lost and not self.pins:
            self.on_idle(self)
