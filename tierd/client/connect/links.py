"""The link that verbs go over: usable, with namespaces open, once more where its daemon has gone.

Purpose: connecting again, opening again, a sign of life of a daemon that was silent. Non-purpose: how a link is made
(connection.py), what goes over it (asking.py). Invariant: what is done over a
link is done once more over another at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tierd._proto import cache_pb2 as pb
from tierd.client.best_effort import PROBE_S, BestEffort
from tierd.client.connect.calls import called, left_s
from tierd.client.connect.connection import Connector
from tierd.client.connect.link import Link
from tierd.client.connect.target import RemoteTarget
from tierd.client.transport import replies, requests
from tierd.client.transport.local_rpc import LineLost
from tierd.client.values import OpenedNamespace
from tierd.errors import DeadlineExceeded, SessionLost, TierdError, Unavailable, Unsupported

T = TypeVar("T")

PROBE_PAUSE_S = 1.0
"""With best_effort: after a call that ended at its deadline the daemon is asked for a sign of life so often."""


class Links:
    """Those of one client, one after another."""

    def __init__(self, connector: Connector, *, best_effort: bool) -> None:
        self.connector = connector
        self._best_effort = BestEffort(str(connector.target), best_effort=best_effort)
        self._probe_at = 0.0

    def _over(
        self,
        work: Callable[[Link], T],
        namespaces: Sequence[OpenedNamespace],
        deadline: float,
    ) -> tuple[Link, T]:
        """Runs work over the current link, where its namespaces are open; once more over a new link if the daemon
        has gone."""
        is_first = True
        while True:
            link = self.connected(deadline)
            try:
                for namespace in namespaces:
                    self._open(namespace, link, deadline)
                return link, work(link)
            except SessionLost:
                link.is_broken = True
                if not is_first:
                    raise
            except Unavailable as error:
                if not is_first or (link.is_usable and not isinstance(error, LineLost)):
                    raise
            is_first = False

    def opened(self, namespaces: Sequence[OpenedNamespace], deadline: float) -> Link:
        """A usable link, over which they are open."""
        return self._over(void, namespaces, deadline)[0]

    def _named(self, namespace: OpenedNamespace, deadline: float) -> None:
        """A namespace that can hash. The call that follows opens it again where a new daemon is to know it."""
        if not namespace.is_open or isinstance(self.connector.target, RemoteTarget):
            self.opened([namespace], deadline)

    def connected(self, deadline: float) -> Link:
        """A usable link, best effort or not."""
        link = self.connector.current()
        if link is None:
            seen = self.connector.link
            link = self.connector.connect(instead_of=seen, timeout_s=left_s(deadline))
        elif self.connector.forgettable:
            self.connector.forget()
        if link.page_grants is not None and link.page_grants.is_stale:
            link.page_grants.give_back(deadline)
        if self._best_effort.is_silent:
            self._probe(link)
        return link

    def _probe(self, link: Link) -> None:
        """A daemon that hangs costs a deadline once, not with every call. Raises DeadlineExceeded while it does."""
        now = time.monotonic()
        if now < self._probe_at:
            raise DeadlineExceeded("daemon: it has not answered since a deadline passed; a miss until it does")
        self._probe_at = now + PROBE_PAUSE_S
        try:
            link.transport.call("Release", pb.ReleaseRequest(), timeout_s=PROBE_S)
        except (DeadlineExceeded, Unavailable):
            raise
        except TierdError:
            pass  # a refusal is a sign of life
        self._best_effort.is_silent = False

    def _open(self, namespace: OpenedNamespace, link: Link, deadline: float) -> None:
        if not self.knows(namespace, link):
            reply = called(link, "OpenNamespace", requests.open_namespace_request(namespace.spec), deadline)
            replies.take_namespace(namespace, reply, link=link.number)
            link.codec = replies.agreed_codec(self.connector.codec, reply)
            link.batch_blocks = reply.batch_blocks or 1 << 16  # a daemon from before this does not say
            link.share_bytes = reply.share_bytes
            namespace.owner = self

    @property
    def tells_events(self) -> bool:
        """Whether the daemon tells routers of blocks, and wants to know what engines call them."""
        link = self.connector.link
        return link is not None and link.session is not None and link.session.tells_events

    def _check_local(self, verb: str) -> None:
        if isinstance(self.connector.target, RemoteTarget):
            raise Unsupported(
                f"{verb}: handles need shared memory, and {self.connector.target} is remote; use put and get"
            )

    def _check_device(self, tier: str, deadline: float) -> None:
        """Before anything is taken for a process that could not map it. Raises Unsupported."""
        if tier.startswith("device"):
            session = self.connected(deadline).session
            if session is not None and session.gpus:
                session.check_gpus(tier)

    def knows(self, namespace: OpenedNamespace, link: Link) -> bool:
        """Whether its number is one that the link's daemon has given it."""
        return namespace.link == link.number and namespace.owner is self


def void(*_: object) -> None:
    """Nothing, of whatever is worked out for it."""
