"""Reservation: pages to be written in place, then published or released.

asking.py reserves and publishes; the two classes below differ only in who waits. Only reserved
pages are writable. After commit or abort, the arrays that were handed out become read-only. Slices
and tensors that the caller made from them do not: do not write to those, since the page may hold
another client's block.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tierd.client.blocks.gpu_work import pauses
from tierd.client.blocks.lease import cut_pages
from tierd.client.connect import cancellation
from tierd.client.connect.calls import Deadline, deadline_of, due
from tierd.client.connect.forks import Bound
from tierd.client.session import mapping
from tierd.client.session.pins import Bytes, Hold
from tierd.client.session.segments import Parts, by_place
from tierd.client.transport.requests import commit_request
from tierd.client.values import Committed
from tierd.core.formats.model import BlockStatus, StructArray
from tierd.errors import InvalidArgument, StaleHandle, TierdError

COMMIT_TIMEOUT_S = 30.0
"""Default timeout of a commit or an abort; a commit hashes and may write to a disk."""


class Ends(Protocol):
    """Ends reservations."""

    def commit(self, pages: Any, make: Callable[[], Any], deadline: Deadline) -> Committed:
        """Publishes the pages."""
        ...

    def abort(self, pages: Any, deadline: Deadline) -> None:
        """Releases the pages."""
        ...


class Addresses(NamedTuple):
    """Addresses of pages in this process: u64 [n], 0 if not reserved; valid while `kept` is."""

    of_blocks: NDArray[np.uint64]
    kept: list[object]


class ReservedPages(Bound):
    """The part that both kinds of reservations share. False if nothing is reserved any more.

    Attributes:
        handles: HANDLE [n], groups in order.
        statuses: u2 [n] of BlockStatus: RESERVED, EXISTS, FAILED, NO_ROOM, REJECTED. NO_ROOM: all
            space is in use. A temporary overload raises Overloaded, with its hint, instead.
    """

    def __init__(
        self,
        hold: Hold | None,
        handles: StructArray,
        *,
        ends: Ends,
    ) -> None:
        self.handles = handles
        self.hold = hold
        self._ends = ends
        self._given: list[tuple[int, weakref.ref[Any]]] = []
        self._work: tuple[Any, ...] = ()
        self._sums = b""
        if hold:
            hold.watch(self)

    @property
    def id(self) -> int:
        """The daemon's number for it; 0: nothing is reserved."""
        return self.hold.reservation if self.hold else 0

    @property
    def statuses(self) -> NDArray[np.uint16]:
        """u2 [n] of BlockStatus."""
        return np.asarray(self.handles["status"])

    def __len__(self) -> int:
        return len(self.handles)

    def __bool__(self) -> bool:
        return self.hold is not None and not self.hold.is_done

    def after(self, *work: Any) -> Self:
        """Makes commit and abort wait, within their timeout, for GPU work that writes the pages.

        Otherwise the work must be done before: a running kernel would write into a page that is
        published, or that holds another block.

        Args:
            work: Events or streams of torch or cupy.
        """
        self._work += work
        return self

    def summed(self, sums: NDArray[np.uint64]) -> Self:
        """Gives the next commit the sums of all slices of its blocks, in order: xxh3-64, u64
        [slices] (copying.py). The daemon then reads no pages in host memory to sum them."""
        self._sums = sums.astype("<u8", copy=False).tobytes()
        return self

    def buffer(self, i: int) -> Bytes:
        """The page of block i: writable uint8 [length], or a DevicePage on a GPU. Raises
        InvalidArgument if it is not reserved, StaleHandle, ForkedClient."""
        found = self._cut([i])[i] if -len(self) <= i < len(self) else None
        if found is None:
            raise InvalidArgument(f"block {i}: it has no reserved page; look at statuses")
        return found

    def buffers(self) -> list[Bytes | None]:
        """One writable page for each block; None if not reserved. Raises StaleHandle, ForkedClient."""
        return self._cut(range(len(self)))

    def addresses(self) -> Addresses:
        """Addresses of its pages, for immediate writes. Raises StaleHandle, ForkedClient."""
        hold = self.held()
        rows = np.flatnonzero(self.handles["status"] == BlockStatus.RESERVED)
        handles, found = self.handles[rows], np.zeros(len(self), np.uint64)
        parts, kept = by_place(handles), list[object]([hold.pin()])
        _populate(hold, handles, parts)
        for place, its in parts:
            segment = hold.segment(place)
            if not isinstance(segment, mapping.MappedSegment):
                raise StaleHandle(f"segment {place[1]} of tier {place[0]}: not mapped any more; reserve again")
            found[rows[its]] = np.uint64(segment.address) + handles["offset"][its]
            kept.append(segment)
        return Addresses(found, kept)

    def held(self) -> Hold:
        """The hold, if it can be used. Raises InvalidArgument, StaleHandle, ForkedClient."""
        if self.hold is None:
            raise InvalidArgument("reservation: nothing was reserved; look at statuses")
        self.hold.check()
        return self.hold

    def not_committed(self) -> Committed:
        """The result of a failed commit."""
        handles = self.handles[self.statuses == BlockStatus.RESERVED].copy()
        handles["status"] = BlockStatus.FAILED
        return Committed(handles["status"].astype(np.uint16), handles)

    def drop(self) -> None:
        """Ends this handle: the pages are released with the last array over them."""
        if self.hold:
            self.hold.drop()

    def seal(self, indices: Sequence[int] | None = None) -> None:
        """Makes the arrays of these blocks (None: of all) read-only."""
        for i, reference in self._given:
            array = reference()
            if array is not None and (indices is None or i in indices):
                _seal(array)
        self._given = [
            (i, ref) for i, ref in self._given if indices is not None and i not in indices and ref() is not None
        ]

    def _commit(
        self, blocks: StructArray | None, deadline: Deadline, *, durable: bool, lease: bool, keep_open: bool
    ) -> Committed:
        self._await_work(deadline)
        sums, self._sums = self._sums, b""

        def make() -> Any:
            request = commit_request(self.id, blocks, durable=durable, lease=lease, keep_open=keep_open)
            request.sums = sums
            return request

        return self._ends.commit(self, make, deadline)

    def _abort(self, deadline: Deadline) -> None:
        self._await_work(deadline)
        self._ends.abort(self, deadline)

    def _await_work(self, deadline: Deadline) -> None:
        if self._work:
            for pause_s in pauses(self._work, due(deadline)):
                cancellation.pause(pause_s)
            self._work = ()

    def _cut(self, wanted: Any) -> list[Bytes | None]:
        found: list[Bytes | None] = [None] * len(self)
        asked, reserved = list(wanted), int(BlockStatus.RESERVED)
        statuses = self.handles["status"][asked].tolist() if asked else []
        rows = [i % len(self) for i, status in zip(asked, statuses, strict=True) if status == reserved]
        if not rows or self.hold is None:
            return found
        self.hold.check()
        handles = self.handles[rows]
        parts = by_place(handles)
        _populate(self.hold, handles, parts)
        for i, page in zip(rows, cut_pages(self.hold, handles, parts=parts, writable=True), strict=True):
            self._given.append((i, weakref.ref(page)))
            found[i] = page
        return found


def _populate(hold: Hold, handles: StructArray, parts: Parts) -> None:
    for place, rows in parts:
        mapped, offsets = hold.segment(place), handles["offset"][rows].tolist()
        if not isinstance(mapped, mapping.MappedSegment) or not mapped.is_writable:
            continue
        if not mapped.present.issuperset(offsets):
            mapping.populate(mapped, list(zip(offsets, handles["length"][rows].tolist(), strict=True)))


def _seal(page: Any) -> None:
    if isinstance(page, np.ndarray):
        page.flags.writeable = False
    else:
        page.seal()


class Reservation(ReservedPages):
    """A reservation of Client. As a context manager, it aborts on exit unless committed."""

    def commit(
        self,
        blocks: StructArray | None = None,
        *,
        durable: bool = False,
        lease: bool = False,
        keep_open: bool = False,
        timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> Committed:
        """Publishes the written pages, all of the call's or none. Do not use the arrays afterwards.

        Args:
            blocks: COMMIT_BLOCK [n], see OpenedNamespace.naming. None: all as named in reserve.
            durable: Return only when the blocks are on NVMe and synced.
            lease: Pin the committed blocks.
            keep_open: Blocks that are not named stay reserved.

        Raises:
            DeadlineExceeded: timeout_s has passed. The blocks may be published even so.
        """
        return self._commit(blocks, deadline_of(timeout_s), durable=durable, lease=lease, keep_open=keep_open)

    def abort(self, *, timeout_s: float = COMMIT_TIMEOUT_S) -> None:
        """Releases the pages without publishing them."""
        self._abort(deadline_of(timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self:
            with contextlib.suppress(TierdError):
                self.abort()


class AsyncReservation(ReservedPages):
    """A reservation of AsyncClient. As an async context manager, it aborts unless committed."""

    def __init__(
        self, hold: Hold | None, handles: StructArray, *, ends: Ends, run: Callable[..., Awaitable[Any]]
    ) -> None:
        """run: carries a verb out by a deadline."""
        super().__init__(hold, handles, ends=ends)
        self._run = run

    async def commit(
        self,
        blocks: StructArray | None = None,
        *,
        durable: bool = False,
        lease: bool = False,
        keep_open: bool = False,
        timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> Committed:
        """As Reservation.commit."""
        commit = partial(self._commit, blocks, durable=durable, lease=lease, keep_open=keep_open)
        return await self._run(commit, deadline_of(timeout_s))  # type: ignore[no-any-return]

    async def abort(self, *, timeout_s: float = COMMIT_TIMEOUT_S) -> None:
        """As Reservation.abort."""
        await self._run(self._abort, deadline_of(timeout_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self:
            with contextlib.suppress(TierdError):
                await self.abort()
