"""A put by shared memory: pages, a copy, one commit.

    reserved now, or a spare ──▶ copied, while the daemon hashes what is told ──▶ committed

Purpose: where the pages of a put come from, and how they are filled. Non-purpose: calls and their errors (verbs.py), what spares are (spares.py), TCP (remote.py).
Invariants: a put answers with what the daemon said of each block; one into spare pages that the daemon cannot commit is made once more with pages reserved for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierd.client import buffers, protocol
from tierd.client.connection import Link
from tierd.client.pins import Hold
from tierd.client.reservation import ReservedPages
from tierd.client.spares import LEAST_BYTES, Spares
from tierd.client.steps import Do, Steps
from tierd.client.values import PutGroup, PutResult
from tierd.core.model import HASH_BYTES, BlockStatus, StructArray
from tierd.errors import NotFound, StaleHandle

if TYPE_CHECKING:
    from tierd.client.verbs import Verbs

LONG_BYTES = 16 << 20
"""Of a put that copies for so long that the daemon can reserve the next one's pages meanwhile; with less it is asked to afterwards."""
TELL_BYTES = 1 << 20
"""Of what is still to be written: with less the daemon would be told of what it is about to hear anyway."""
POSITION_LIMIT = 1 << 32
"""Of blocks; with a greater one no message is made."""


@dataclass(frozen=True, slots=True)
class Write:
    """What a put is to do: a source for each block of a group, by when, and whether onto NVMe."""

    group: PutGroup
    sources: Sequence[buffers.Bytes]
    deadline: float
    durable: bool = False

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(map(len, self.sources))

    @property
    def needs_names(self) -> bool:
        """Whether a reserve must say what no commit can."""
        group = self.group
        says_more = group.priority is not None or group.retention_s is not None
        is_odd = len(group.parent) != HASH_BYTES or not 0 <= group.position < POSITION_LIMIT
        return self.durable or says_more or is_odd


def put(verbs: Verbs, link: Link, write: Write) -> Steps[PutResult]:
    """Stores blocks."""
    group, spares = write.group, link.spares
    is_plain = not (write.needs_names or verbs.tells_events) and verbs.knows(group.namespace, link)
    if spares is None or not is_plain or write.bytes < LEAST_BYTES:
        return PutResult((yield from _into_reserved(verbs, write)))
    length, is_long = max(map(len, write.sources)), write.bytes >= LONG_BYTES
    pages = yield Do(lambda: _spare(verbs, link, spares, write))
    try:
        if is_long:
            spares.order(group, length=length, deadline=write.deadline, taken=pages.id if pages else 0)
        statuses = (yield from _into_spare(verbs, pages, write)) if pages else None
    except BaseException:
        if pages:
            pages.drop()
        raise
    if statuses is None:
        statuses = yield from _into_reserved(verbs, write)
    if (statuses != BlockStatus.READY).any():
        yield Do(lambda: spares.pause(write.deadline))
    elif not is_long:
        spares.order(group, length=length, deadline=write.deadline, low=1)
    return PutResult(statuses)


def _into_reserved(verbs: Verbs, write: Write) -> Steps[Any]:
    """u2 [n] of BlockStatus."""
    pages = yield from verbs.reserved([write.group], "host", write.deadline, durable=write.durable)
    statuses = pages.statuses.copy()
    if pages:
        statuses[statuses == BlockStatus.RESERVED] = yield from _written(verbs, pages, write, None)
    return statuses


def _spare(verbs: Verbs, link: Link, spares: Spares, write: Write) -> ReservedPages | None:
    """Pages that were reserved for such a put; what nobody writes to goes back with them."""
    lengths = [len(source) for source in write.sources]
    taken = spares.take(write.group, length=max(lengths), deadline=write.deadline)
    if taken is None:
        return None
    handles = taken[1][: len(lengths)]
    handles["length"] = lengths
    return verbs.pages(Hold(link, reservation=taken[0]), handles)


def _into_spare(verbs: Verbs, pages: ReservedPages, write: Write) -> Steps[Any]:
    """u2 [n] of BlockStatus; None: nothing was stored, for a reason that reserving tells."""
    group, sources = write.group, write.sources
    names = group.namespace.naming(
        protocol.checked_hashes(group.hashes),
        index=range(len(sources)),
        parent=group.parent,
        position=group.position,
        tokens=group.tokens,
    )
    names["length"] = pages.handles["length"]
    try:
        yield from verbs.mapped(pages, write.deadline)
        statuses = yield from _written(verbs, pages, write, names)
    except (NotFound, StaleHandle):
        return None
    return None if (statuses == BlockStatus.FAILED).any() else statuses


def _written(verbs: Verbs, pages: ReservedPages, write: Write, names: StructArray | None) -> Steps[Any]:
    """Copies and commits; u2 [n] of BlockStatus, of the pages that there are. names: COMMIT_BLOCK [n]; None: as they were reserved."""
    try:
        yield Do(lambda: _fill(pages, write.sources))
        request = protocol.commit_request(pages.id, names, durable=write.durable, lease=False, keep_open=False)
        return (yield from verbs.committed(pages, request, write.deadline)).statuses
    except BaseException:
        pages.drop()
        raise


def _fill(pages: ReservedPages, sources: Sequence[buffers.Bytes]) -> None:
    """Copies. The daemon, which hashes meanwhile, is told soon, then each time that half of what was left is written, and of the last, which it hashes while it hears of the commit."""
    targets, begun = pages.buffers(), 0
    for end in _stops([len(source) for source in sources]):
        given = [i for i in range(begun, end) if targets[i] is not None]
        buffers.copy_all([targets[i] for i in given], [sources[i] for i in given])  # type: ignore[misc]
        if begun or end < len(sources):
            pages.tell_written(end)
        begun = end


def _stops(lengths: Sequence[int]) -> Iterator[int]:
    """Before which blocks to say how far one has come, and the end."""
    left = sum(lengths)
    stop_at = left - left // 8
    for index, length in enumerate(lengths, 1):
        left -= length
        if TELL_BYTES <= left <= stop_at:
            yield index
            stop_at = left // 2
    yield len(lengths)
