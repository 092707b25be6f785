"""The verbs of a client, each written once. They run in the caller's thread or in AsyncClient's.

Verbs handle links, retries, deadlines and best effort. Messages are in requests.py and replies.py,
transports in local.py and grpc_calls.py. Every verb ends within its deadline. A part of a get or
put is a constant number of calls. After the daemon has gone, verbs retry puts, and calls that
change nothing. They also retry calls that were refused for lack of room. With best_effort only the
use of a handle raises; other failures become smaller hits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from tierd import tracing
from tierd._proto import cache_pb2 as pb
from tierd.client import splitting
from tierd.client.blocks import buffers, writing
from tierd.client.blocks.asking import Asking
from tierd.client.blocks.lease import Lease
from tierd.client.blocks.reservation import ReservedPages
from tierd.client.connect.calls import Deadline, due
from tierd.client.connect.links import void
from tierd.client.connect.target import RemoteTarget
from tierd.client.session import gpu_arrays
from tierd.client.transport import replies, requests
from tierd.client.transport.replies import Leased
from tierd.client.values import (
    Committed,
    Found,
    GetResult,
    Lost,
    OpenedNamespace,
    Prefetch,
    PutGroup,
    PutResult,
    Target,
)
from tierd.core.formats.block import NamespaceSpec
from tierd.core.formats.model import HANDLE, BlockStatus
from tierd.errors import Unavailable, Unsupported

T = TypeVar("T")


class Verbs(Asking):
    """The verbs of one client. Deadlines are of time.monotonic()."""

    def _verb(self, deadline: Deadline, work: Callable[[float], T], nothing: Callable[[], T], *, name: str = "") -> T:
        """Runs a verb until its deadline. nothing: makes the result of a failure with best_effort.
        name: of its span in the caller's trace; empty: none."""
        if name and tracing.is_possible():
            return self.shrunk(lambda: tracing.verb(name, lambda: work(due(deadline))), nothing)
        return self.shrunk(lambda: work(due(deadline)), nothing)

    def connect(self, deadline: Deadline) -> None:
        """Connects if there is no connection."""
        self._verb(deadline, lambda by: void(self.connected(by)), void)

    # -- namespaces

    def open_namespace(self, spec: NamespaceSpec, error_limit: float, deadline: Deadline) -> OpenedNamespace:
        """The namespace. With best_effort it may stay unopened; the next call that succeeds opens it."""
        namespace = OpenedNamespace(spec, error_limit=error_limit)
        self._verb(deadline, lambda by: void(self.opened([namespace], by)), void)
        return namespace

    # -- gets. asked: arguments of `requests.groups_of`

    def lookup(self, asked: Any, intent: str, deadline: Deadline) -> Found:
        """How much could be served."""

        def work(by: float) -> Found:
            return splitting.lookup(self, requests.groups_of(*asked), by, intent=requests.intent(intent))

        return self._verb(deadline, work, Found, name="lookup")

    def prefetch(self, asked: Any, target: str | Target, deadline: Deadline) -> Prefetch:
        """Starts a prefetch."""
        groups = requests.groups_of
        return self._verb(
            deadline, lambda by: splitting.prefetch(self, groups(*asked), target, by), Prefetch, name="prefetch"
        )

    def cancel(self, prefetch: Prefetch, deadline: Deadline) -> None:
        """Cancels a prefetch."""
        self._verb(deadline, lambda by: self.cancelled(prefetch, by), void)

    def acquire(self, asked: Any, tier: str, deadline: Deadline, *, by_layer: bool = False) -> Lease:
        """A lease on the longest servable prefix, with its segments mapped."""
        return self._verb(
            deadline,
            lambda by: splitting.acquire(self, requests.groups_of(*asked), tier, by, by_layer=by_layer),
            lambda: Lease(None, Leased()),
            name="acquire",
        )

    def get(self, namespace: OpenedNamespace, what: Any, out: Any, deadline: Deadline, *, request: str) -> GetResult:
        """The servable prefix of a sequence, as views or copied into out."""
        return self._verb(
            deadline, lambda by: self._get(namespace, what, out, by, request=request), GetResult, name="get"
        )

    def report_attention(self, lease: Lease, mass: Any, group: int, deadline: Deadline) -> None:
        """Reports attention mass per rank and block of a lease's group."""

        def work(by: float) -> None:
            with np.errstate(all="ignore"):
                data = np.ascontiguousarray(mass, dtype="<f4").tobytes()
            if lease.hold is not None:
                request = pb.ReportAttentionRequest(lease=lease.id, group=group, mass=data)
                self._ask_holder(lease.hold, "ReportAttention", request, by)

        self._verb(deadline, work, void)

    # -- puts

    def reserve(self, groups: Any, tier: str, deadline: Deadline) -> ReservedPages:
        """Reserves pages to write and maps their segments."""
        wanted: list[PutGroup] = []

        def work(by: float) -> ReservedPages:
            wanted.extend(requests.listed(groups, PutGroup))
            return self.reserved(wanted, tier, by)

        def nothing() -> ReservedPages:
            handles = np.zeros(sum(len(group.hashes) for group in wanted), dtype=HANDLE)
            handles["status"] = BlockStatus.NO_ROOM
            return self.pages(None, handles)

        return self._verb(deadline, work, nothing, name="reserve")

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
            name="put",
        )

    def flush(self, deadline: Deadline) -> Lost:
        """Waits for the answers to puts with wait=False; counts blocks not stored since the last flush."""
        return self._verb(deadline, self.background_puts.flush, self.background_puts.lost)

    def finish(self, deadline: Deadline) -> None:
        """Waits for puts with wait=False before the session ends. Logs lost blocks."""
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
        return self._verb(deadline, lambda by: self.committed(pages, make(), by), pages.not_committed, name="commit")

    def abort(self, pages: ReservedPages, deadline: Deadline) -> None:
        """Releases a reservation's pages."""

        self._verb(deadline, lambda by: self.aborted(pages, by), void)

    # -- inside

    def _get(self, namespace: OpenedNamespace, what: Any, out: Any, deadline: float, *, request: str) -> GetResult:
        self._named(namespace, deadline)
        group = requests.sequence_group(namespace, what)
        group = replace(group, request=request) if request else group
        if not len(group.hashes):
            return GetResult()
        return splitting.get(self, group, self._seen(out), deadline)

    def _put(
        self, namespace: OpenedNamespace, what: Any, blocks: Any, deadline: float, *, until: writing.Until
    ) -> PutResult:
        sources = [buffers.flat(block) for block in self._seen(list(blocks))]
        self._named(namespace, deadline)
        group = requests.sequence_put(namespace, what, lengths=[len(source) for source in sources])
        lengths = requests.put_lengths(group)
        sources = buffers.pieces(sources, lengths.tolist())
        if not sources:
            return PutResult(replies.all_statuses(0, BlockStatus.READY))
        return splitting.put(self, writing.Write(group, sources, deadline, until))

    def _seen(self, given: Any) -> Any:
        """Buffers, with arrays on a GPU as GpuBytes. Raises InvalidArgument and Unsupported for these
        before anything is asked of the daemon."""
        seen = gpu_arrays.all_seen(given)
        arrays = seen if isinstance(seen, list) else [seen]
        if gpu_arrays.are_on_gpu(arrays):
            if isinstance(self.connector.target, RemoteTarget):
                raise Unsupported(f"arrays on a GPU: {self.connector.target} is remote; pass copies in host memory")
            gpu_arrays.copies().side_of(arrays)
        return seen


def _dropped(blocks: Any) -> PutResult:
    return PutResult(replies.all_statuses(operator.length_hint(blocks), BlockStatus.FAILED))
