"""A put by shared memory: pages, a copy, one commit.

    reserved now, or a spare ──▶ copied, while the daemon hashes what is told ──▶ committed

Purpose: where the pages of a put come from, and how they are filled. Non-purpose: calls and their errors (verbs.py), what spares are (spares.py), TCP (remote.py).
Invariants: a put answers with what the daemon said of each block; one into spare pages that the daemon cannot commit is made once more with pages reserved for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tierd.client import buffers, protocol
from tierd.client.connection import Link
from tierd.client.pins import Hold
from tierd.client.reservation import ReservedPages
from tierd.client.spares import LEAST_BYTES
from tierd.client.steps import Do, Steps
from tierd.client.values import PutGroup, PutResult
from tierd.core.model import HASH_BYTES, BlockStatus, StructArray
from tierd.errors import NotFound, StaleHandle

if TYPE_CHECKING:
    from tierd.client.verbs import Verbs

LONG_BYTES = 8 << 20
"""Of a put that copies for so long that the daemon can reserve the next one's pages meanwhile; with less it is asked to afterwards."""
TELL_BYTES = 1 << 20
"""Of what is still to be written: with less the daemon would be told of what it is about to hear anyway."""


def put(
    verbs: Verbs, link: Link, group: PutGroup, sources: Sequence[buffers.Bytes], *, durable: bool, deadline: float
) -> Steps[PutResult]:
    """Stores blocks, one source each."""
    size, length = sum(map(len, sources)), max(map(len, sources))
    spares = link.spares if size >= LEAST_BYTES and _can_wait_for_names(group) else None
    if spares is None or durable or verbs.tells_events:
        return PutResult((yield from _into_reserved(verbs, group, sources, durable=durable, deadline=deadline)))
    spare = yield Do(lambda: spares.take(group, length=length, deadline=deadline))
    number, is_long = spare[0] if spare else 0, size >= LONG_BYTES
    if is_long:
        spares.order(group, length=length, taken=number)
    statuses = None
    if spare is not None:
        handles = spare[1][: len(sources)]
        handles["length"] = [len(source) for source in sources]
        pages = verbs.pages(Hold(link, reservation=number), handles)
        statuses = yield from _into_spare(verbs, pages, group, sources, deadline)
    if statuses is None:
        statuses = yield from _into_reserved(verbs, group, sources, durable=False, deadline=deadline)
    if (statuses != BlockStatus.READY).any():
        yield Do(spares.pause)
    elif not is_long:
        spares.order(group, length=length)
    return PutResult(statuses)


def _can_wait_for_names(group: PutGroup) -> bool:
    """Whether a commit can say all that a reserve would."""
    return group.priority is None and group.retention_s is None and len(group.parent) == HASH_BYTES


def _into_reserved(
    verbs: Verbs, group: PutGroup, sources: Sequence[buffers.Bytes], *, durable: bool, deadline: float
) -> Steps[Any]:
    """u2 [n] of BlockStatus."""
    pages = yield from verbs.reserved([group], "host", deadline, durable=durable)
    statuses = pages.statuses.copy()
    if pages:
        written = yield from _written(verbs, pages, sources, None, durable=durable, deadline=deadline)
        statuses[statuses == BlockStatus.RESERVED] = written
    return statuses


def _into_spare(
    verbs: Verbs, pages: ReservedPages, group: PutGroup, sources: Sequence[buffers.Bytes], deadline: float
) -> Steps[Any]:
    """u2 [n] of BlockStatus; None: nothing was stored, for a reason that reserving tells."""
    names = group.namespace.naming(
        protocol.checked_hashes(group.hashes),
        index=range(len(sources)),
        parent=group.parent,
        position=group.position,
        tokens=group.tokens,
    )
    names["length"] = [len(source) for source in sources]
    try:
        yield from verbs.mapped(pages, deadline)
        statuses = yield from _written(verbs, pages, sources, names, durable=False, deadline=deadline)
    except (NotFound, StaleHandle):
        return None
    return None if (statuses == BlockStatus.FAILED).any() else statuses


def _written(
    verbs: Verbs,
    pages: ReservedPages,
    sources: Sequence[buffers.Bytes],
    names: StructArray | None,
    *,
    durable: bool,
    deadline: float,
) -> Steps[Any]:
    """Copies and commits; u2 [n] of BlockStatus, of the pages that there are. names: COMMIT_BLOCK [n]; None: as they were reserved."""
    try:
        yield Do(lambda: _fill(pages, sources))
        request = protocol.commit_request(pages.id, names, durable=durable, lease=False, keep_open=False)
        return (yield from verbs.committed(pages, request, deadline)).statuses
    except BaseException:
        pages.drop()
        raise


def _fill(pages: ReservedPages, sources: Sequence[buffers.Bytes]) -> None:
    """Copies. The daemon, which hashes meanwhile, is told soon, and then each time that half of what was left is written."""
    targets, begun = pages.buffers(), 0
    for end in _stops([len(source) for source in sources]):
        given = [i for i in range(begun, end) if targets[i] is not None]
        buffers.copy_all([targets[i] for i in given], [sources[i] for i in given])  # type: ignore[misc]
        if end < len(sources):
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
