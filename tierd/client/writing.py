"""A put by shared memory: pages, a copy, one commit.

    reserved now, or a spare ──▶ Commit is sent ──▶ copied, while what the board says is written is hashed ──▶ its answer ──▶ spares for the next
                             └─▶ copied, where that is soon done ──▶ Commit is sent ─────────────────────────▶ its answer ──▶ spares for the next

Purpose: where the pages of a put come from, and how they are filled. Non-purpose: calls and their errors (verbs.py), what spares are (spares.py), TCP (remote.py).
Invariants: a put answers with what the daemon said of each block; one into spare pages that the daemon cannot commit is made once more with pages reserved for it, and
so is one whose daemon went in the midst of it: the next daemon is asked, or there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierd.client import buffers, protocol, stopping
from tierd.client.calls import left_s
from tierd.client.connection import Link
from tierd.client.pins import Hold
from tierd.client.progress import Progress
from tierd.client.reservation import ReservedPages
from tierd.client.spares import Spares
from tierd.client.steps import Do, Steps
from tierd.client.values import PutGroup, PutResult, checked_hashes
from tierd.core.block import size_class
from tierd.core.model import HASH_BYTES, BlockStatus, StructArray
from tierd.errors import NotFound, SessionLost, StaleHandle

if TYPE_CHECKING:
    from tierd.client.verbs import Verbs

PATIENCE_S = 5e-3
"""With a daemon that should see on the board that all is written."""
STEP_BYTES = 1 << 20
"""Of what is written between two notes of it."""
EARLY_BYTES = 1 << 20
"""From so many on a put's commit goes before its copy; a smaller one is copied in less time than it takes the daemon to hear that it is, and hashed as soon as that is heard."""
MORE_TRIES = 8
"""To bring blocks onto NVMe that go from the tiers meanwhile."""
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
    lengths = set(map(len, write.sources))
    if spares is None or not is_plain or len({size_class(length) for length in lengths}) != 1 or 0 in lengths:
        return PutResult((yield from _into_reserved(verbs, write)))
    length = max(lengths)
    pages = yield Do(lambda: _spare(verbs, link, spares, write))
    statuses = (yield from _into_spare(verbs, pages, write)) if pages else None
    if statuses is None:
        statuses = yield from _into_reserved(verbs, write)
    if protocol.every(statuses == BlockStatus.READY):
        yield Do(lambda: spares.order(group, length=length, deadline=write.deadline))
    else:
        yield Do(lambda: spares.pause(write.deadline))
    return PutResult(statuses)


def kept(verbs: Verbs, write: Write) -> Steps[PutResult]:
    """A put; of a durable one again what is FAILED, while there is time: a block may have gone before it was on NVMe, and its bytes are here."""
    done = yield from verbs.stored(write)
    for _ in range(MORE_TRIES if write.durable else 0):
        if not (done.statuses == BlockStatus.FAILED).any() or left_s(write.deadline) <= 0:
            break
        done = yield from verbs.stored(write)
    return done


def _into_reserved(verbs: Verbs, write: Write) -> Steps[Any]:
    """u2 [n] of BlockStatus. Nobody has seen its handles, so that they have become stale is made good here."""
    try:
        return (yield from _attempt(verbs, write))
    except (StaleHandle, SessionLost):
        return (yield from _attempt(verbs, write))


def _attempt(verbs: Verbs, write: Write) -> Steps[Any]:
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
    try:
        names = _names(write)
        names["length"] = pages.handles["length"]
        yield from verbs.mapped(pages, write.deadline)
        statuses = yield from _written(verbs, pages, write, names)
    except (NotFound, StaleHandle, SessionLost):
        pages.drop()
        return None
    except BaseException:
        pages.drop()
        raise
    return None if (statuses == BlockStatus.FAILED).any() else statuses


def _names(write: Write) -> StructArray:
    """COMMIT_BLOCK [n], whose lengths are to be filled in."""
    group = write.group
    return group.namespace.naming(
        checked_hashes(group.hashes),
        index=range(len(write.sources)),
        parent=group.parent,
        position=group.position,
        tokens=group.tokens,
    )


def _written(verbs: Verbs, pages: ReservedPages, write: Write, names: StructArray | None) -> Steps[Any]:
    """Copies and commits; u2 [n] of BlockStatus, of the pages that there are. names: COMMIT_BLOCK [n]; None: as they were reserved."""
    progress = None
    try:
        session = pages.held().link.session
        is_early = session is not None and session.takes_unwritten and write.bytes >= EARLY_BYTES
        if session is not None and is_early and session.board is not None:
            progress = session.board.take(pages.id)
        copying = Copying(pages, write, progress, is_followed=session is not None and session.is_followed)
        if not is_early:
            yield Do(copying.copy)
        request = protocol.commit_request(pages.id, names, durable=write.durable)
        request.unwritten, request.word = is_early, progress.number if progress else 0
        meanwhile = copying if is_early else None
        return (yield from verbs.committed(pages, request, write.deadline, meanwhile=meanwhile)).statuses
    except BaseException:
        pages.drop()
        raise
    finally:
        if progress is not None:
            progress.end()


class Copying:
    """The copy of one put, while the daemon has its commit already: that is prepared meanwhile, and what is written is hashed. The daemon waits for the end of it: where it is likely to
    learn it from the board (is_followed), a message follows if it has not soon."""

    is_due, patience_s = True, PATIENCE_S

    def __init__(
        self, pages: ReservedPages, write: Write, progress: Progress | None, *, is_followed: bool = False
    ) -> None:
        self._pages, self._write, self._progress, self._is_done = pages, write, progress, False
        self._is_told = not (is_followed and progress is not None)

    def run(self) -> None:
        """Once, however often it is called."""
        if self._is_done:
            return
        self.copy()
        if self._is_told:
            self._tell()
        self._is_done = True

    def insist(self) -> None:
        """Once: all is written."""
        if not self._is_told:
            self._is_told = True
            self._tell()

    def _tell(self) -> None:
        self._pages.tell_written(len(self._write.sources), deadline=self._write.deadline)

    def copy(self) -> None:
        """Nobody is told."""
        sources, targets, begun = self._write.sources, self._pages.targets(), 0
        for end in _stops([len(source) for source in sources]):
            stopping.check()
            given = [i for i in range(begun, end) if targets[i] is not None]
            buffers.copy_all([targets[i] for i in given], [sources[i] for i in given])  # type: ignore[misc]
            stopping.check()  # a caller who was told that it has ended may have used his sources for something else
            if self._progress is not None:
                self._progress.note(end)
            begun = end

    def hear(self, reply: Any) -> None:
        """Of a commit there are no previews."""


def _stops(lengths: Sequence[int]) -> Iterator[int]:
    """Before which blocks to say how far one has come, and the end."""
    written = 0
    for index, length in enumerate(lengths, 1):
        written += length
        if written >= STEP_BYTES:
            yield index
            written = 0
    if written:
        yield len(lengths)
