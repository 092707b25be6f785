"""The verbs: everything that a client does, once, in the caller's thread or in one of AsyncClient's.

Purpose: links, retries, deadlines, what is shrunk to a miss. Non-purpose: messages (requests.py, replies.py), transports
(local.py, grpc_calls.py). Invariants: every verb ends
within its deadline; a get or a put of any number of blocks is a constant number of calls; only what changes nothing is called again after
a daemon has gone (but a put, whose blocks either exist then or do not), and what was refused for want of room; with best_effort nothing raises but a use of a handle, and each failure is a smaller hit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.client import splitting
from tierd.client.blocks import buffers, writing
from tierd.client.blocks.asking import Asking
from tierd.client.blocks.lease import Lease
from tierd.client.blocks.reservation import ReservedPages
from tierd.client.connect.calls import Deadline, due
from tierd.client.connect.links import void
from tierd.client.transport import replies, requests
from tierd.client.transport.replies import Leased
from tierd.client.values import Committed, Found, GetResult, Lost, OpenedNamespace, PutGroup, PutResult
from tierd.core.formats.block import NamespaceSpec
from tierd.core.formats.model import HANDLE, BlockStatus
from tierd.errors import Unavailable

T = TypeVar("T")


class Verbs(Asking):
    """One client's verbs. Values in, values out; deadlines are of time.monotonic()."""

    def _verb(self, deadline: Deadline, work: Callable[[float], T], nothing: Callable[[], T]) -> T:
        """Runs a verb until its deadline. nothing: gives the result of a verb that fails with best_effort."""
        return self.shrunk(lambda: work(due(deadline)), nothing)

    def connect(self, deadline: Deadline) -> None:
        """Connects, where there is no connection."""
        self._verb(deadline, lambda by: void(self.connected(by)), void)

    # -- namespaces

    def open_namespace(self, spec: NamespaceSpec, deadline: Deadline) -> OpenedNamespace:
        """The namespace; with best_effort and no daemon an unopened one, which opens itself with the first call that gets through."""
        namespace = OpenedNamespace(spec)
        self._verb(deadline, lambda by: void(self.opened([namespace], by)), void)
        return namespace

    # -- gets. asked: what `requests.groups_of` makes groups of

    def lookup(self, asked: Any, deadline: Deadline) -> Found:
        """What could be served."""
        return self._verb(deadline, lambda by: splitting.lookup(self, requests.groups_of(*asked), by), Found)

    def prefetch(self, asked: Any, tier: str, deadline: Deadline) -> int:
        """Blocks that are on their way because of this."""
        return self._verb(deadline, lambda by: splitting.prefetch(self, requests.groups_of(*asked), tier, by), int)

    def acquire(self, asked: Any, tier: str, deadline: Deadline) -> Lease:
        """A lease on the longest servable prefix, its segments mapped."""
        return self._verb(
            deadline,
            lambda by: splitting.acquire(self, requests.groups_of(*asked), tier, by),
            lambda: Lease(None, Leased()),
        )

    def get(self, namespace: OpenedNamespace, what: Any, out: Any, deadline: Deadline) -> GetResult:
        """The servable prefix of a sequence, as views or copied into out."""
        return self._verb(deadline, lambda by: self._get(namespace, what, out, by), GetResult)

    def report_attention(self, lease: Lease, mass: Any, group: int, deadline: Deadline) -> None:
        """Attention mass per rank and block of a lease's group."""

        def work(by: float) -> None:
            with np.errstate(all="ignore"):
                data = np.ascontiguousarray(mass, dtype="<f4").tobytes()
            if lease.hold is not None:
                request = pb.ReportAttentionRequest(lease=lease.id, group=group, mass=data)
                self._ask_holder(lease.hold, "ReportAttention", request, by)

        self._verb(deadline, work, void)

    # -- puts

    def reserve(self, groups: Any, tier: str, deadline: Deadline) -> ReservedPages:
        """Pages to write, their segments mapped."""
        wanted: list[PutGroup] = []

        def work(by: float) -> ReservedPages:
            wanted.extend(requests.listed(groups, PutGroup))
            return self.reserved(wanted, tier, by)

        def nothing() -> ReservedPages:
            handles = np.zeros(sum(len(group.hashes) for group in wanted), dtype=HANDLE)
            handles["status"] = BlockStatus.NO_ROOM
            return self.pages(None, handles)

        return self._verb(deadline, work, nothing)

    def put(
        self,
        namespace: OpenedNamespace,
        what: Any,
        blocks: Any,
        deadline: Deadline,
        *,
        until: Callable[[], writing.Until],
    ) -> PutResult:
        """Stores blocks: reserve, copy, commit."""
        return self._verb(
            deadline,
            lambda by: self._put(namespace, what, blocks, by, until=until()),
            lambda: _dropped(blocks),
        )

    def flush(self, deadline: Deadline) -> Lost:
        """Waits for the answers of puts that waited for nobody; which of their blocks were not
        stored since the
        last time."""
        return self._verb(deadline, self.background_puts.flush, self.background_puts.lost)

    def finish(self, deadline: Deadline) -> None:
        """Before the session ends: the same. What was lost is logged."""
        self.background_puts.settle(due(deadline))
        lost, unknown = self.background_puts.lost(), len(self.background_puts)
        if lost or unknown:
            self._best_effort.note(
                Unavailable(
                    f"close: {lost} blocks of puts with wait=False were not stored, {unknown} puts not answered"
                    f" ({'; '.join(lost.reasons) or 'in time'})"
                )
            )

    def commit(self, pages: ReservedPages, make: Callable[[], pb.CommitRequest], deadline: Deadline) -> Committed:
        """Publishes a reservation's pages."""
        return self._verb(deadline, lambda by: self.committed(pages, make(), by), pages.not_committed)

    def abort(self, pages: ReservedPages, deadline: Deadline) -> None:
        """Gives a reservation's pages back."""

        self._verb(deadline, lambda by: self.aborted(pages, by), void)

    # -- inside

    def _get(self, namespace: OpenedNamespace, what: Any, out: Any, deadline: float) -> GetResult:
        self._named(namespace, deadline)
        group = requests.sequence_group(namespace, what)
        if not len(group.hashes):
            return GetResult()
        return splitting.get(self, group, out, deadline)

    def _put(
        self, namespace: OpenedNamespace, what: Any, blocks: Any, deadline: float, *, until: writing.Until
    ) -> PutResult:
        sources = [buffers.flat(block) for block in blocks]
        self._named(namespace, deadline)
        group = requests.sequence_put(namespace, what, lengths=[len(source) for source in sources])
        lengths = requests.put_lengths(group)
        sources = buffers.pieces(sources, lengths.tolist())
        if not sources:
            return PutResult(replies.all_statuses(0, BlockStatus.READY))
        return splitting.put(self, writing.Write(group, sources, deadline, until))


def _dropped(blocks: Any) -> PutResult:
    return PutResult(replies.all_statuses(operator.length_hint(blocks), BlockStatus.FAILED))
