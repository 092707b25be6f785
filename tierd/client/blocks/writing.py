"""A put by shared memory: pages, a copy, one commit.

    pages reserved now, or granted before
     ├─▶ large: Commit is sent ──▶ summed and copied, while the daemon prepares it ──▶ sums follow
     └─▶ small: summed and copied ──▶ Commit is sent with the sums
    then its answer ──▶ page grants for the next put

This module finds pages for a put and fills them. Calls and errors are in asking.py, grants in
page_grants.py, TCP in tcp.py. A put answers with the daemon's status for each block. If the daemon
cannot commit granted pages, or has gone meanwhile, the put is made once more with its own pages.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.client.blocks import buffers, copying
from tierd.client.blocks.page_grants import PageGrants
from tierd.client.blocks.reservation import Addresses, ReservedPages
from tierd.client.connect.calls import left_s
from tierd.client.connect.link import Link
from tierd.client.session import gpu_arrays
from tierd.client.session.pins import Hold
from tierd.client.transport import replies, requests
from tierd.client.values import PutGroup, PutResult
from tierd.core.arrays.sets import every
from tierd.core.formats.block import size_class
from tierd.core.formats.model import HASH_BYTES, BlockStatus, StructArray
from tierd.errors import NotFound, SessionLost, StaleHandle

if TYPE_CHECKING:
    from tierd.client.blocks.asking import Asking

EARLY_BYTES = 1 << 20
"""From this size on, a put sends its commit before its copy; a smaller copy ends sooner."""
MORE_TRIES = 8
"""Attempts to bring blocks onto NVMe if tiers evict them meanwhile."""
POSITION_LIMIT = 1 << 32
"""Of blocks; no message can hold a greater one."""


class Until(enum.Enum):
    """When a put returns: the commit is sent, clients find the blocks, or the blocks are on NVMe."""

    SENT = "sent"
    STORED = "stored"
    DURABLE = "durable"

    @classmethod
    def of(cls, *, durable: bool, wait: bool) -> Until:
        """From the arguments of `put`."""
        return cls.DURABLE if durable else cls.STORED if wait else cls.SENT


@dataclass(frozen=True, slots=True)
class Write:
    """A put: a source for each block of a group, its deadline, and when it returns."""

    group: PutGroup
    sources: Sequence[buffers.Bytes]
    deadline: float
    until: Until = Until.STORED

    @property
    def durable(self) -> bool:
        """Whether the put waits for NVMe."""
        return self.until is Until.DURABLE

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(map(len, self.sources))

    @property
    def needs_names(self) -> bool:
        """Whether a reserve must carry fields that a commit cannot."""
        group = self.group
        says_more = group.priority is not None or group.retention_s is not None
        is_odd = len(group.parent) != HASH_BYTES or not 0 <= group.position < POSITION_LIMIT
        return self.durable or says_more or is_odd


def put(verbs: Asking, link: Link, write: Write) -> PutResult:
    """Stores blocks."""
    group, page_grants = write.group, link.page_grants
    is_plain = not (write.needs_names or verbs.tells_events) and verbs.knows(group.namespace, link)
    lengths = set(map(len, write.sources))
    if page_grants is None or not is_plain or len({size_class(length) for length in lengths}) != 1 or 0 in lengths:
        return PutResult(_into_reserved(verbs, write))
    length = max(lengths)
    pages = _spare(verbs, link, page_grants, write)
    statuses = _into_spare(verbs, pages, write) if pages else None
    if statuses is None:
        statuses = _into_reserved(verbs, write)
    if every((statuses == BlockStatus.READY) | (statuses == BlockStatus.PENDING)):
        page_grants.order(group, length=length, deadline=write.deadline)
    else:
        page_grants.pause(write.deadline)
    return PutResult(statuses)


def kept(verbs: Asking, write: Write) -> PutResult:
    """A put. A durable put is repeated while blocks are FAILED and time is left: a tier may have
    evicted them before they were on NVMe."""
    done = verbs.stored(write)
    for _ in range(MORE_TRIES if write.durable else 0):
        if not (done.statuses == BlockStatus.FAILED).any() or left_s(write.deadline) <= 0:
            break
        done = verbs.stored(write)
    return done


def _into_reserved(verbs: Asking, write: Write) -> Any:
    """u2 [n] of BlockStatus. Retries once if the handles, unknown to the caller, become stale."""
    try:
        return _attempt(verbs, write)
    except (StaleHandle, SessionLost):
        return _attempt(verbs, write)


def _attempt(verbs: Asking, write: Write) -> Any:
    pages = verbs.reserved([write.group], "host", write.deadline, durable=write.durable)
    statuses = pages.statuses.copy()
    if pages:
        statuses[statuses == BlockStatus.RESERVED] = _written(verbs, pages, write, None)
    return statuses


def _spare(verbs: Asking, link: Link, page_grants: PageGrants, write: Write) -> ReservedPages | None:
    """Granted pages for such a put; pages beyond its blocks are released with the reservation."""
    lengths = [len(source) for source in write.sources]
    taken = page_grants.take(write.group, length=max(lengths), deadline=write.deadline)
    if taken is None:
        return None
    handles = taken[1][: len(lengths)]
    handles["length"] = lengths
    return verbs.pages(Hold(link, reservation=taken[0]), handles)


def _into_spare(verbs: Asking, pages: ReservedPages, write: Write) -> Any:
    """u2 [n] of BlockStatus; None: nothing was stored, for a reason that a reserve reports."""
    try:
        names = _names(write)
        names["length"] = pages.handles["length"]
        verbs.mapped(pages, write.deadline)
        statuses = _written(verbs, pages, write, names)
    except (NotFound, StaleHandle, SessionLost):
        pages.drop()
        return None
    except BaseException:
        pages.drop()
        raise
    return None if (statuses == BlockStatus.FAILED).any() else statuses


def _names(write: Write) -> StructArray:
    """COMMIT_BLOCK [n]; the caller fills in the lengths."""
    group = write.group
    return group.namespace.naming(
        requests.checked_hashes(group.hashes),
        index=range(len(write.sources)),
        parent=group.parent,
        position=group.position,
        tokens=group.tokens,
    )


def _written(verbs: Asking, pages: ReservedPages, write: Write, names: StructArray | None) -> Any:
    """Copies and commits; u2 [n] of BlockStatus of the reserved pages. names: None: as reserved."""
    try:
        copy, request = Copy(pages, write), requests.commit_request(pages.id, names, durable=write.durable)
        if write.until is not Until.SENT and write.bytes >= EARLY_BYTES:
            request.unwritten = True
            return verbs.committed(pages, request, write.deadline, meanwhile=copy).statuses
        copy.run()
        copy.complete(request)
        if write.until is Until.SENT and _is_sent(verbs, pages, request, write.deadline):
            return replies.all_statuses(_reserved(pages), BlockStatus.PENDING)
        return verbs.committed(pages, request, write.deadline).statuses
    except BaseException:
        pages.drop()
        raise


def _is_sent(verbs: Asking, pages: ReservedPages, request: pb.CommitRequest, deadline: float) -> bool:
    """Sends a commit without waiting for its answer; whether it was sent. The pages are then the daemon's."""
    hold = pages.held()
    pages.seal()
    is_sent = verbs.background_puts.send(hold, request, blocks=_reserved(pages), deadline=deadline)
    if is_sent:
        hold.settle()
    return is_sent


def _reserved(pages: ReservedPages) -> int:
    """Number of blocks with a page."""
    return int(np.count_nonzero(pages.statuses == BlockStatus.RESERVED))


class Copy:
    """The copy of a put, while the daemon prepares its commit; the commit ends with the sums."""

    def __init__(self, pages: ReservedPages, write: Write) -> None:
        self._pages, self._write = pages, write
        self._sums: bytes | None = None

    def run(self) -> None:
        """Copies once, however often it is called."""
        if self._sums is None:
            sources, targets = self._write.sources, self._pages.addresses()
            layers, lengths = self._write.group.namespace.spec.geometry.layers, [*map(len, sources)]
            if gpu_arrays.is_on_gpu(sources):
                self._store(targets)
                blocks = copying.blocks_of(targets.of_blocks, [0] * len(sources), lengths, layers)
                blocks = blocks[blocks["source"] != 0]
            else:
                blocks = copying.blocks_of([*map(buffers.address_of, sources)], targets.of_blocks, lengths, layers)
                blocks = blocks[blocks["target"] != 0]
            self._sums = copying.sum_and_copy(blocks).tobytes()

    def _store(self, targets: Addresses) -> None:
        """Copies arrays on a GPU to the pages, in their stream, and waits."""
        copies, rows = gpu_arrays.copies(), np.flatnonzero(targets.of_blocks)
        arrays, pages = (
            [self._write.sources[i] for i in rows.tolist()],
            copies.Pages(targets.of_blocks[rows], targets.kept),
        )
        if arrays:
            copies.store(copies.side_of(arrays), arrays, pages, self._write.deadline)

    def rest(self) -> bytes:
        """The message that follows the commit: Written."""
        return pb.Written(sums=self._sums).SerializeToString()

    def complete(self, request: pb.CommitRequest) -> None:
        """Makes it a commit of pages that are written."""
        request.unwritten, request.sums = False, self._sums or b""
