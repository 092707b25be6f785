"""Sessions of the cache: who may call, and what each session holds.

It keeps tenants, namespaces, leases and reservations of sessions, in the core and in the session
table. The table names a page's session before the session learns of the page. Gets are in gets.py,
puts in puts.py, connections in server/session/sessions.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from tierd.cache.background import Background
from tierd.cache.directories import Directories
from tierd.cache.flights import Flights
from tierd.cache.holdings import STEP_PAGES, Holdings
from tierd.cache.parts import Parts
from tierd.cache.verification import Verification
from tierd.cache.watch import Watch
from tierd.core.formats.block import Namespace, NamespaceSpec
from tierd.core.formats.model import StructArray
from tierd.core.plan import (
    GroupQuery,
    Ids,
)
from tierd.errors import (
    InvalidArgument,
    NotFound,
    NotPermitted,
    SessionLost,
    StaleHandle,
    Unavailable,
)
from tierd.failpoint import failpoint
from tierd.tiers.arena.holds import FormerHolder, Holder, HoldKind
from tierd.tiers.tier import is_mapped


class Sessions:
    """The sessions of one daemon, as numbers. Every method runs on its event loop."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.core, self.tiers, self.registry = parts.core, parts.tiers, parts.registry
        self.events, self.metrics, self.clock = parts.events, parts.metrics, parts.clock
        self.store_codecs = parts.store_codecs
        self.directories = Directories(parts.tiers, domains_of=parts.registry.domains_of)
        for tier in filter(is_mapped, parts.tiers):
            tier.on_published = self.directories.add
        self.flights = Flights(parts, self.directories)
        self.background, self.health = Background(parts, self.flights), Watch(parts, self.flights)
        self._holdings = Holdings(parts.holds)
        self._tenants: dict[int, str] = {}
        self._verification = Verification(parts)
        self._given_back = 0
        self.process_notices: Callable[[int | None], None] = lambda _session: None
        """Processes pending releases and other notices of clients, which arrive beside calls."""
        self.is_draining = False

    # -- sessions

    def open_session(
        self, session: int, *, tenant: str, holder: Holder | None = None, is_operator: bool = False
    ) -> None:
        """Opens a client's session. holder: its process; None for a session of the daemon's own.
        Raises Unavailable while draining, except for operators, who watch the drain."""
        if self.is_draining and not is_operator:
            raise Unavailable("daemon: draining, no new sessions; connect to another one or try again later")
        if holder is not None:
            self._holdings.begin(holder)
        self._tenants[session] = tenant
        self.core.open_session(session, domain=self.registry.domain_of(tenant))

    def restore_session(self, former: FormerHolder) -> None:
        """Restores a session of an earlier daemon. Its pages stay its own while its process lives."""
        session, now = former.holder.session, self.clock.now()
        taken = self.core.restore(session, pinned=former.leased, reserved=former.reserved, now=now)
        self._holdings.keep(former, leased=taken.pinned, reserved=taken.reserved)

    def stop_session(self, session: int) -> None:
        """Its socket is closed, so it is not served. Its holdings stay until its process is gone."""
        self._tenants.pop(session, None)
        self.events.ring()  # wakes its watchers, so that they end

    def leave_session(self, session: int) -> None:
        """Releases what it held. Its process lives but uses none of it. Its mappings stay recorded
        until `end_session`."""
        self.stop_session(session)
        if self._holdings.return_some(session, self.release, self.abort):
            asyncio.get_running_loop().call_soon(self.leave_session, session)
        else:
            self._holdings.end(session)

    def end_session(self, session: int, *, into: int = 0) -> None:
        """Releases everything that it held, in steps if that is much, since its process is gone.
        Safe to call twice.

        into: set if the process lives and has left both sessions. This other session takes over the
        record of what the two have mapped.
        """
        self.stop_session(session)
        if self._holdings.return_some(session, self.release, self.abort, beyond=STEP_PAGES):
            asyncio.get_running_loop().call_soon(partial(self.end_session, session, into=into))
            return
        failpoint("cache.end.before_return")
        self.flights.start(self.core.end_session(session, now=self.clock.now(), into=into))
        self._holdings.end(session)
        self.background.wake()

    def tenant_of(self, session: int) -> str:
        """Raises SessionLost."""
        tenant = self._tenants.get(session)
        if tenant is None:
            raise SessionLost(f"session {session}: it has ended; open a session again")
        return tenant

    # -- namespaces

    def open_namespace(self, session: int, spec: NamespaceSpec, *, error_limit: float = 0.0) -> Namespace:
        """The current namespace of the session's tenant for this spec. error_limit: that it
        accepts."""
        largest = min((t.spec.segment_bytes - t.spec.slot_overhead_bytes for t in self.tiers), default=0)
        if spec.block_bytes > largest:
            raise InvalidArgument(
                f"namespace.block_bytes: {spec.block_bytes} is above {largest}, the most that fits a segment of every "
                "tier; use fewer tokens per block, or raise the tiers' segment"
            )
        tenant = self.tenant_of(session)
        namespace, _ = self.registry.open(spec, tenant=tenant)
        self.directories.begin(namespace, domain=self.registry.domain_of(tenant))
        if error_limit:
            self.store_codecs.accept(namespace, error_limit)
        return namespace

    def namespace_for(self, session: int, namespace_id: int, digest: bytes = b"") -> Namespace:
        """The namespace, if the session may use it. Raises NotPermitted, StaleHandle, as the
        registry."""
        namespace = self.registry.named(namespace_id, digest) if digest else self.registry.get(namespace_id)
        if namespace.tenant != self.tenant_of(session):
            raise NotPermitted(f"namespace {namespace_id}: belongs to another tenant; open your own with OpenNamespace")
        if not self.registry.is_current(namespace):
            raise StaleHandle(f"namespace {namespace_id}: epoch {namespace.epoch} has ended; open the namespace again")
        return namespace

    def _check_groups(self, session: int, groups: Sequence[GroupQuery]) -> None:
        """Checks tenants, which the core does not know. Raises NotFound, NotPermitted, StaleHandle."""
        for namespace in {n for group in groups for n in group.namespaces}:
            self.namespace_for(session, namespace)

    # -- holdings

    def _hold(self, who: int, kind: HoldKind, pages: Mapping[int, StructArray], *, at: Ids | None = None) -> None:
        """Records a session's pages in the session table before the client learns of them. Raises
        SessionLost, TierFailed, Overloaded."""
        if self._holdings.is_full(who, more=len(pages), pages=sum(map(len, pages.values()))):
            self.process_notices(who)  # process its pending releases first; its end may be among the notices
        if who not in self._tenants:
            raise SessionLost(f"session {who}: it ended during the call; open a session again")
        self._holdings.add(who, kind, pages, at=at)

    def release(self, session: int, leases: Sequence[int]) -> None:
        """Unpins. Ignores unknown leases: a release may be repeated, or come from an ended session."""
        failpoint("cache.release.before_unpin")
        self._given_back += len(leases)
        with contextlib.suppress(NotFound):
            self.flights.start(self.core.release(session, leases=leases, now=self.clock.now()))
        self._holdings.drop_leases(session, leases)
        self.background.note_release()

    def _may_have_room(self, session: int) -> bool:
        """Whether clients had releases pending, which are processed here, or else prefetches kept pages."""
        before = self._given_back
        self.process_notices(session)
        return self._given_back > before or self.flights.prefetches.yield_room()

    def abort(self, session: int, reservation: int) -> None:
        """Frees a reservation's pages unused. An unknown reservation is ignored."""
        with contextlib.suppress(NotFound):  # the session has ended, and its reservations with it
            self.flights.start(self.core.abort(session, reservation=reservation, now=self.clock.now()))
        self._holdings.drop((session, HoldKind.RESERVATION, reservation))
        self.background.wake()

    def page(self, session: int, kind: HoldKind, number: int, extent: np.void) -> memoryview:
        """The bytes of a page of a lease or a reservation, writable until the next await. Raises
        StaleHandle.

        For streams: an abort, or the end of the session's process, may free their pages meanwhile.
        """
        if (session, kind, number) not in self._holdings:
            raise StaleHandle(f"{kind.name.lower()} {number}: it ended during the call; start the call again")
        tier = self.tiers[int(extent["tier"])]
        assert is_mapped(tier), "streams ask for host pages"
        return tier.view(extent)
