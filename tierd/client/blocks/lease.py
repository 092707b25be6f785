"""Lease: pinned blocks to be read in place or copied out.

Purpose: views that own their pin, copies that are checked. Non-purpose: how a lease is got (asking.py). Invariants:
a view is read-only, and its
pages are pinned until the last array made from it (slices, reshapes, tensors) is collected; after a copy the generation words are
read again, and what a changed one stands for is a miss with everything after it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierd.client.blocks import buffers, one_sided_get
from tierd.client.blocks.gpu_work import pauses
from tierd.client.connect.forks import Bound
from tierd.client.session.mapping import still_hold
from tierd.client.session.pins import Bytes, Hold
from tierd.client.session.segments import Parts, by_place
from tierd.client.transport.replies import Leased, LeasedGroup, joined, valid_blocks
from tierd.core.arrays.sets import every
from tierd.core.formats.model import StructArray
from tierd.core.formats.words import barrier
from tierd.errors import InvalidArgument, TierdError, ViewsAlive

RELEASE_TIMEOUT_S = 5.0
ROWS_LEAST = 8
"""From so many pages on it is looked whether they lie in a row."""


class Lease(Bound):
    """What acquire gave: false if nothing. A context manager, which refuses to end while views are alive.

    tokens: servable. handles: HANDLE [n], groups in order, within a group rank-major. groups: the same by group.
    tier_tokens: per tier, tokens of the first group that were found there. whole: False if more is held than could be brought near.
    """

    def __init__(self, hold: Hold | None, leased: Leased, *, is_acknowledged: bool = True) -> None:
        """is_acknowledged: whether `release` waits until the daemon has done it."""
        self.tokens = leased.tokens
        self.tier_tokens = leased.tier_tokens
        self.whole = leased.whole
        self.groups: tuple[LeasedGroup, ...] = leased.groups
        parts = [group.handles.reshape(-1) for group in leased.groups]
        self.handles: StructArray = parts[0] if len(parts) == 1 else joined(parts)
        self.hold = hold
        self._is_acknowledged = is_acknowledged
        self._work: tuple[Any, ...] = ()
        if hold:
            hold.watch(self)

    @cached_property
    def parts(self) -> Parts:
        """Its handles by segment."""
        return by_place(self.handles)

    @property
    def id(self) -> int:
        """The daemon's number for it; 0: nothing is held."""
        return self.hold.lease if self.hold else 0

    def __len__(self) -> int:
        return len(self.handles)

    def __bool__(self) -> bool:
        return self.hold is not None

    def view(self, i: int) -> Bytes:
        """The bytes of block i, read-only uint8 [length], in place; its pages stay pinned as long as any array made from it lives. On a GPU a
        DevicePage, which kernels take by `__cuda_array_interface__`.

        Raises StaleHandle, ForkedClient, InvalidArgument.
        """
        return self._views(self.handles[_index(i, len(self)) :][:1])[0]

    def views(self) -> list[Bytes]:
        """One view a block; they hold the lease together. Raises StaleHandle, ForkedClient."""
        return cut_pages(self._held(), self.handles, parts=self.parts) if len(self) else []

    def copy_into(self, out: Any) -> int:
        """Copies the blocks into a list of buffers, or into one buffer one behind the other; how many blocks are good.

        The number counts blocks from the first on (per rank); it is smaller than what was leased where a page was taken away
        meanwhile, or does not hold what it should; what lies in out beyond them is undefined. Raises InvalidArgument
        for buffers that do not fit, StaleHandle, ForkedClient.
        """
        return valid_blocks(self.groups, self.copied(out))

    def copied(self, out: Any, *, trusted: Any = ()) -> NDArray[np.bool_]:
        """As `copy_into`; whether each block is good, bool [n]. trusted: generations of pages that the daemon has
        looked at for this lease:
        they are good also where the catalogue has no sums of them. Pages of a GPU are copied as they are: nobody
        here sums them."""
        hold, targets = self._held(), buffers.pieces(out, self.handles["length"].tolist(), writable=True)
        good = np.ones(len(self.handles), np.bool_)
        pages = one_sided_get.pages_of(hold.link.session, self.handles) if hold.link.session else None
        if pages is not None:
            without_sums = pages.rows["table"] == 0
            good = np.array(pages.copy_to(targets, is_leased=True), bool)
            good |= without_sums & np.isin(self.handles["generation"], trusted)
        else:
            copy_out(self._views(self.handles), targets)
        return good & self._are_current()

    def check(self) -> int:
        """How many blocks, from the first on (per rank), still are what was leased. Raises StaleHandle, ForkedClient."""
        return valid_blocks(self.groups, self._are_current())

    def _are_current(self) -> NDArray[np.bool_]:
        """Which handles still are what was leased: bool [n]."""
        hold = self._held()
        barrier()
        good = np.zeros(len(self.handles), dtype=np.bool_)
        for place, rows in self.parts:
            segment = hold.segment(place)
            if segment is not None:
                good[rows] = still_hold(segment.words, self.handles[rows], for_a_lease=True)
        return good

    def tokens_of(self, blocks: int) -> int:
        """Tokens that can be served with so many blocks of those leased."""
        if len(self.groups) == 1 and self.groups[0].first == 0:
            return min(self.tokens, int(self.groups[0].handles["tokens"][0, :blocks].sum()))
        return self.tokens if blocks == max((group.count for group in self.groups), default=0) else 0

    def after(self, *work: Any) -> Self:
        """`release` waits for this work first: events or streams of torch or cupy, whose kernels read the pages. Not for what ends the lease without it:
        detach, and views that are collected; hold these until the work is done."""
        self._work += work
        return self

    def release(self) -> None:
        """Unpins, when the work named to `after` is done. Raises ViewsAlive while arrays made from it are alive, ForkedClient, DeadlineExceeded; a lease that
        has ended already is no fault. It waits with this thread, so a caller with an event loop awaits its work before."""
        hold = self.hold
        if hold is None or hold.is_done:
            return
        hold.check_process()
        if hold.has_views:
            raise ViewsAlive(
                f"lease {hold.lease}: arrays made from its views are alive; drop them first, or call detach() to let the last one release it"
            )
        for pause_s in pauses(self._work, time.monotonic() + RELEASE_TIMEOUT_S):
            time.sleep(pause_s)
        if self._is_acknowledged and hold.link.is_usable and hold.link.session:
            hold.settle()
            with contextlib.suppress(TierdError):  # the daemon has gone, and the lease with it
                hold.link.session.release([hold.lease], timeout_s=RELEASE_TIMEOUT_S)
        hold.drop()

    close = release

    def detach(self) -> None:
        """Ends this handle; the lease ends with its last view, now if there is none."""
        if self.hold:
            self.hold.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.release()
        else:
            self.detach()  # the traceback keeps views alive, and the error matters more

    def _held(self) -> Hold:
        if self.hold is None:
            raise InvalidArgument("lease: it is empty; test it before use")
        self.hold.check()
        return self.hold

    def _views(self, handles: StructArray) -> list[Bytes]:
        if not len(handles):
            return []
        return cut_pages(self._held(), handles)


def copy_out(pages: Sequence[Any], targets: Sequence[Bytes]) -> None:
    """Pages' bytes into memory of this process; those of a GPU have come when it returns."""
    if all(isinstance(page, np.ndarray) for page in pages):
        buffers.copy_all(targets, pages)
        return
    for page, target in zip(pages, targets, strict=True):
        page.copy_to(target)


def cut_pages(hold: Hold, handles: StructArray, *, parts: Parts | None = None, writable: bool = False) -> list[Bytes]:
    """The bytes of HANDLE [n], uint8 each, under one pin. parts: the handles by segment, where that is known. Raises StaleHandle."""
    pin, parts = hold.pin(), by_place(handles) if parts is None else parts
    if len(parts) == 1:
        whole = hold.expose(parts[0][0], pin, writable=writable)
        rows = rows_of(whole, handles) if isinstance(whole, np.ndarray) else None
        if rows is not None:
            return list(rows)
    starts, ends = handles["offset"].tolist(), (handles["offset"] + handles["length"]).tolist()
    if len(parts) == 1:
        return [whole[start:end] for start, end in zip(starts, ends, strict=True)]
    places = list(zip(handles["tier"].tolist(), handles["segment"].tolist(), strict=True))
    wholes = {place: hold.expose(place, pin, writable=writable) for place, _ in parts}
    return [wholes[place][start:end] for place, start, end in zip(places, starts, ends, strict=True)]


def rows_of(whole: Bytes, handles: StructArray) -> Bytes | None:
    """Pages of one length at equal distances, as those of one put are: uint8 [n, length], whose rows cost half of what slices do. None: they are not so."""
    starts, lengths = handles["offset"], handles["length"]
    if len(handles) < ROWS_LEAST:
        return None
    first, length, step = int(starts[0]), int(lengths[0]), int(starts[1]) - int(starts[0])
    end = first + len(handles) * step
    if not (0 < length <= step and end <= len(whole)):
        return None
    if not (every(lengths == length) and every(starts[1:] - starts[:-1] == step)):
        return None
    return whole[first:end].reshape(len(handles), step)[:, :length]


def _index(i: int, count: int) -> int:
    if not -count <= i < count:
        raise InvalidArgument(f"block {i}: the lease has {count}; count from 0")
    return i % count
