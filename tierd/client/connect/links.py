"""Runs verbs over a usable link with open namespaces, once more if the daemon has gone.

This covers reconnecting, reopening namespaces, and probing a daemon that was silent. connection.py
makes links; asking.py has the calls. Work is repeated over at most one other link.
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
"""With best_effort, after a timeout, the client probes the daemon at this interval."""


class Links:
    """The links of one client, one after another."""

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
        """Runs work over the current link with open namespaces; repeats it if the daemon has gone."""
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
        """A usable link over which the namespaces are open."""
        return self._over(void, namespaces, deadline)[0]

    def _named(self, namespace: OpenedNamespace, deadline: float) -> None:
        """Makes sure that the namespace can hash. The next call opens it again at a new daemon."""
        if not namespace.is_open or isinstance(self.connector.target, RemoteTarget):
            self.opened([namespace], deadline)

    def connected(self, deadline: float) -> Link:
        """A usable link, with best effort or without."""
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
        """Probes the daemon, so that a hanging daemon costs one timeout and not one for each
        call. Raises DeadlineExceeded while it hangs."""
        now = time.monotonic()
        if now < self._probe_at:
            raise DeadlineExceeded("daemon: no answer since a call timed out; calls miss until it answers")
        self._probe_at = now + PROBE_PAUSE_S
        try:
            link.transport.call("Release", pb.ReleaseRequest(), timeout_s=PROBE_S)
        except (DeadlineExceeded, Unavailable):
            raise
        except TierdError:
            pass  # an error from the daemon proves that it answers
        self._best_effort.is_silent = False

    def _open(self, namespace: OpenedNamespace, link: Link, deadline: float) -> None:
        if not self.knows(namespace, link):
            reply = called(link, "OpenNamespace", requests.open_namespace_request(namespace), deadline)
            replies.take_namespace(namespace, reply, link=link.number)
            link.codec = replies.agreed_codec(self.connector.codec, reply)
            link.batch_blocks = reply.batch_blocks or 1 << 16  # older daemons send none
            link.share_bytes = reply.share_bytes
            namespace.owner = self

    @property
    def tells_events(self) -> bool:
        """Whether the daemon publishes events and so wants the engine's names of blocks."""
        link = self.connector.link
        return link is not None and link.session is not None and link.session.tells_events

    def _check_local(self, verb: str) -> None:
        if isinstance(self.connector.target, RemoteTarget):
            raise Unsupported(
                f"{verb}: handles need shared memory, and {self.connector.target} is remote; use put and get"
            )

    def _check_device(self, tier: str, deadline: float) -> None:
        """Checks the GPU before anything is reserved that this process could not map. Raises Unsupported."""
        if tier.startswith("device"):
            session = self.connected(deadline).session
            if session is not None and session.gpus:
                session.check_gpus(tier)

    def knows(self, namespace: OpenedNamespace, link: Link) -> bool:
        """Whether the namespace's id is from the link's daemon."""
        return namespace.link == link.number and namespace.owner is self


def void(*_: object) -> None:
    """Returns nothing, whatever its arguments."""
