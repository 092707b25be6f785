"""The calls that verbs consist of: one call of the daemon each, or none if the blocks are near.

They use the current link, and repeat work if the daemon has gone or room is short. Users' deadlines
and best effort are in verbs.py, long prompts in splitting.py. Every failure is raised. No call
overtakes a put with wait=False.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.client.blocks import one_sided_get, writing
from tierd.client.blocks.background_puts import BackgroundPuts
from tierd.client.blocks.lease import Lease
from tierd.client.blocks.reservation import ReservedPages
from tierd.client.connect.calls import called, left_s
from tierd.client.connect.connection import Connector
from tierd.client.connect.link import Link, Meanwhile
from tierd.client.connect.links import Links
from tierd.client.connect.target import RemoteTarget
from tierd.client.session import gpu_arrays
from tierd.client.session.pins import Hold
from tierd.client.transport import replies, requests, tcp
from tierd.client.transport.replies import Leased, LeasedGroup
from tierd.client.values import (
    Committed,
    Found,
    GetResult,
    Group,
    OpenedNamespace,
    Prefetch,
    PutGroup,
    PutResult,
    Target,
)
from tierd.core.formats.model import BlockStatus, StructArray
from tierd.errors import DeadlineExceeded, NotFound, Overloaded, SessionLost, StaleHandle, Unavailable

T = TypeVar("T")
COMPUTED_LIMIT = 64
"""Decisions of an engine that wait for the next lookup; the oldest go."""


class Asking(Links):
    """The calls of one client. Deadlines are of time.monotonic()."""

    def __init__(
        self, connector: Connector, *, best_effort: bool, is_acknowledged: bool, pages: Callable[..., ReservedPages]
    ) -> None:
        """is_acknowledged: whether an explicit release waits for the daemon. pages: makes a reservation."""
        super().__init__(connector, best_effort=best_effort)
        self._is_acknowledged = is_acknowledged
        self.pages = pages
        self.background_puts = BackgroundPuts()
        self.shrunk = self._best_effort.shrunk
        self._computed: deque[pb.Computed] = deque(maxlen=COMPUTED_LIMIT)

    def note_computed(self, request: str, tokens: int, times: tuple[float, float]) -> None:
        """Keeps an engine's decision until the next lookup sends it. Raises InvalidArgument."""
        self._computed.append(requests.computed_message(request, tokens, times))

    def _take_computed(self) -> list[pb.Computed]:
        taken = list[pb.Computed]()
        with contextlib.suppress(IndexError):  # another thread took the last one
            while self._computed:
                taken.append(self._computed.popleft())
        return taken

    def found(self, groups: Sequence[Group], deadline: float, *, intent: int = 0) -> Found:
        """Looks up as many blocks as fit into one call."""
        if _is_empty(groups):
            self.opened(_spaces(groups), deadline)
            return Found()
        near = self._near(groups[0], one_sided_get.lookup, deadline) if len(groups) == 1 else None
        if near is not None:
            return near
        computed = self._take_computed()

        def lookup() -> tuple[str, pb.LookupRequest]:
            wanted = map(requests.group_message, groups)
            return "Lookup", pb.LookupRequest(groups=wanted, intent=intent, computed=computed)  # type: ignore[arg-type]

        _, reply = self._ask(lookup, groups, deadline)
        return replies.found(reply, groups)

    def begun(self, groups: Sequence[Group], target: str | Target, deadline: float) -> Prefetch:
        """Starts a prefetch."""
        wanted = requests.target(target)
        if _is_empty(groups):
            return Prefetch()
        _, reply = self._ask(
            lambda: ("Prefetch", pb.PrefetchRequest(groups=map(requests.group_message, groups), **wanted)),
            groups,
            deadline,
        )
        return Prefetch.of(reply.started, [reply.prefetch])

    def cancelled(self, prefetch: Prefetch, deadline: float) -> None:
        """Cancels a prefetch of this link's session; another daemon or session does not know it."""
        link = self.connected(deadline)
        if prefetch.numbers:
            called(link, "Release", pb.ReleaseRequest(prefetches=prefetch.numbers), deadline)

    def leased(
        self,
        groups: Sequence[Group],
        tier: str,
        deadline: float,
        *,
        doubted: bytes | None = None,
        by_layer: bool = False,
    ) -> Lease:
        """A lease, with its segments mapped. doubted: generations of pages with wrong sums.
        by_layer: before its pages are filled."""
        self._check_local("acquire")
        wanted = requests.wanted_tier(tier) | ({"by_layer": True} if by_layer else {})
        if _is_empty(groups):
            self.opened(_spaces(groups), deadline)
            return Lease(None, Leased())
        self._check_device(tier, deadline)
        link, lease = self._leased(groups, wanted, deadline, doubted=doubted)
        if not lease.whole and self._without_spare(link, deadline):
            with contextlib.suppress(StaleHandle):  # their epoch has ended meanwhile; the first answer stands
                link, lease = self._leased(groups, wanted, deadline)  # pages of both leases count once
        if lease and link.session is not None and not link.session.segments.has(place for place, _ in lease.parts):
            try:
                self._map(link, lease.handles, deadline)
            except NotFound:
                if not by_layer:
                    raise
                lease.detach()  # the reads have failed already, and its pages are gone
                return self.leased(groups, tier, deadline)
            except SessionLost:  # the daemon ended after its answer, and the lease with it
                link, lease = self._leased(groups, wanted, deadline)
                self._map(link, lease.handles, deadline)
        return lease

    def _leased(
        self,
        groups: Sequence[Group],
        wanted: dict[str, Any],
        deadline: float,
        *,
        doubted: bytes | None = None,
    ) -> tuple[Link, Lease]:
        if doubted is not None:
            wanted = wanted | {"copies": True, "doubted": doubted}
        link, reply = self._ask(
            lambda: ("Acquire", pb.AcquireRequest(groups=map(requests.group_message, groups), **wanted)),
            groups,
            deadline,
        )
        leased = replies.leased(reply, groups)
        hold = Hold(link, lease=leased.lease) if leased.lease else None
        return link, Lease(hold, leased, is_acknowledged=self._is_acknowledged)

    def got(self, group: Group, out: Any, deadline: float) -> tuple[GetResult, Any]:
        """The servable prefix of a group, and the lengths of the copied blocks."""
        if isinstance(self.connector.target, RemoteTarget):
            _, (got, lengths) = self._over(
                lambda link: tcp.get(link, group, out, deadline), [group.namespace], deadline
            )
            return got, lengths
        if out is None:
            return self._viewed(group, deadline), ()
        is_on_gpu = gpu_arrays.is_on_gpu(out)  # such copies are done only later, so a lease holds the pages
        done = None if is_on_gpu else self._near(group, partial(one_sided_get.get, out=out), deadline)
        if is_on_gpu:
            self._settle(len(group.hashes) * len(group.ranks) * group.namespace.spec.block_bytes, deadline)
        return self._copied(group, out, deadline) if done is None else done

    def _near(self, group: Group, look: Callable[..., T | None], deadline: float) -> T | None:
        """Tries look(session, group, timeout_s=), again after pending puts. None: call the daemon."""
        link = self.connected(deadline)
        if link.session is None or not self.knows(group.namespace, link):
            return None
        near = look(link.session, group, timeout_s=left_s(deadline))
        if near is None and self.background_puts:
            self.background_puts.settle(deadline)
            near = look(link.session, group, timeout_s=left_s(deadline))
        return near

    def _viewed(self, group: Group, deadline: float) -> GetResult:
        """The prefix as views, which hold a lease."""
        lease = self.leased([group], "host", deadline)
        try:
            views = tuple(lease.views()) if lease else ()
            return GetResult(lease.tokens, len(views), views, lease.tier_tokens) if lease else GetResult()
        finally:
            lease.detach()

    def _copied(self, group: Group, out: Any, deadline: float) -> tuple[GetResult, Any]:
        """Copies the prefix under a lease. If a page does not hold its block, reports it and asks
        the daemon once more: a farther tier may have the block intact. If that answer does not
        come, the blocks before it are the prefix."""
        doubted: Any = np.zeros(0, "<u8")
        got, lengths = GetResult(), np.zeros(0, np.uint32)
        while True:
            try:
                lease = self.leased([group], "host", deadline, doubted=doubted.tobytes())
            except (DeadlineExceeded, Overloaded, Unavailable):
                if not got:
                    raise
                return got, lengths
            if not lease:
                return got, lengths
            try:
                good = lease.copied(out, trusted=doubted, deadline=deadline)
                bad, blocks = lease.handles["generation"][~good], replies.valid_blocks(lease.groups, good)
                got, lengths = (
                    GetResult(lease.tokens_of(blocks), blocks, (), lease.tier_tokens),
                    lease.handles["length"],
                )
                if not len(bad) or len(doubted):
                    return got, lengths
                doubted = bad.astype("<u8")
            finally:
                lease.detach()

    def reserved(
        self, groups: Sequence[PutGroup], tier: str, deadline: float, *, durable: bool = False
    ) -> ReservedPages:
        """Reserves pages. Raises all failures. durable: the commit will ask for durability."""
        self._check_local("reserve")
        self._check_device(tier, deadline)
        link, reply = self._ask(
            lambda: ("Reserve", requests.reserve_request(groups, tier, durable=durable, with_names=self.tells_events)),
            groups,
            deadline,
        )
        given = [
            replies.handles_of(data, count=len(group.hashes))
            for data, group in zip(reply.handles, groups, strict=False)
        ]
        handles = replies.joined(given)
        hold = Hold(link, reservation=reply.reservation) if reply.reservation else None
        pages = self.pages(hold, handles)
        if (handles["status"] == BlockStatus.NO_ROOM).any() and self._without_spare(link, deadline):
            self.aborted(pages, deadline)
            return self.reserved(groups, tier, deadline, durable=durable)
        self._map(link, handles[handles["status"] == BlockStatus.RESERVED], deadline)
        return pages

    def stored(self, write: writing.Write) -> PutResult:
        """Puts the blocks of one call."""
        if isinstance(self.connector.target, RemoteTarget):
            group, by = write.group, write.deadline
            put = partial(tcp.put, group=group, sources=write.sources, deadline=by, durable=write.durable)
            return self._over(put, [group.namespace], by)[1]
        link = self.connected(write.deadline)
        if gpu_arrays.is_on_gpu(write.sources):
            self._settle(write.bytes, write.deadline)
        return writing.put(self, link, write)

    def _settle(self, nbytes: int, deadline: float) -> None:
        """Waits for copies on a GPU whose leases leave the session no room for so many bytes."""
        link = self.connected(deadline)
        gpu_arrays.copies().flights.settle(max(0, link.share_bytes - nbytes), deadline)

    def committed(
        self,
        pages: ReservedPages,
        request: pb.CommitRequest,
        deadline: float,
        *,
        meanwhile: Meanwhile | None = None,
    ) -> Committed:
        """Commits a reservation. Raises all failures."""
        hold = pages.held()
        pages.seal(requests.named_indices(request) if request.keep_open else None)
        reply = self._ask_holder(hold, "Commit", request, deadline, meanwhile=meanwhile)
        if not request.keep_open:
            hold.settle()
        handles = replies.handles_of(reply.handles)
        lease = None
        if reply.lease:
            held = handles[handles["status"] != BlockStatus.FAILED]
            leased = Leased(reply.lease, int(held["tokens"].sum()), groups=(LeasedGroup(0, held[None]),))
            lease = Lease(Hold(hold.link, lease=reply.lease), leased, is_acknowledged=self._is_acknowledged)
            self._map(hold.link, held, deadline)
        return Committed(handles["status"].astype(np.uint16), handles, lease)

    def aborted(self, pages: ReservedPages, deadline: float) -> None:
        """Aborts a reservation. Raises all failures."""
        hold = pages.hold
        if hold is None or hold.is_done:
            return
        pages.seal()
        self._ask_holder(hold, "Abort", pb.AbortRequest(reservation=hold.reservation), deadline)
        hold.settle()

    def _without_spare(self, link: Link, deadline: float) -> bool:
        """Releases page grants, which count towards the session's limit; whether there were any."""
        page_grants, session = link.page_grants, link.session
        if page_grants is None or session is None:
            return False
        numbers = page_grants.reservations(deadline=deadline)
        try:
            if numbers:
                session.abort(numbers, timeout_s=left_s(deadline))
        except BaseException:
            session.let_go(reservations=numbers)
            raise
        return bool(numbers)

    def mapped(self, pages: ReservedPages, deadline: float) -> None:
        """Maps the segments of reserved pages."""
        self._map(pages.held().link, pages.handles, deadline)

    def _map(self, link: Link, handles: StructArray, deadline: float) -> None:
        session = link.session
        if session is not None and session.segments.unmapped(handles):
            try:
                session.map(handles, timeout_s=left_s(deadline))
            except SessionLost:
                link.is_broken = True
                raise

    # -- calls

    def _ask(
        self,
        make: Callable[[], tuple[str, Any]],
        groups: Sequence[Group] | Sequence[PutGroup],
        deadline: float,
    ) -> tuple[Link, Any]:
        """One call, after pending puts. make: method and message, once the namespaces are open."""
        self.background_puts.settle(deadline)
        return self._over(lambda link: called(link, *make(), deadline), _spaces(groups), deadline)

    def _ask_holder(
        self, hold: Hold, method: str, request: Any, deadline: float, *, meanwhile: Meanwhile | None = None
    ) -> Any:
        """A call about a hold, which only its own link's daemon knows. Raises StaleHandle, ForkedClient."""
        hold.check()
        self.background_puts.settle(deadline)
        try:
            return called(hold.link, method, request, deadline, meanwhile=meanwhile)
        except (SessionLost, Unavailable) as error:
            if not isinstance(error, SessionLost) and hold.link.is_usable:
                raise
            hold.link.is_broken = True
            raise StaleHandle(f"{method.lower()}: the daemon has gone ({error}); acquire or reserve again") from error


def _spaces(groups: Sequence[Group] | Sequence[PutGroup]) -> list[OpenedNamespace]:
    return [group.namespace for group in groups]


def _is_empty(groups: Sequence[Group]) -> bool:
    """Whether no hashes are given. The call may still open an unopened namespace."""
    return not any(len(group.hashes) for group in groups)
