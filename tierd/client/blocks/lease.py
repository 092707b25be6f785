"""Lease: pinned blocks to be read in place or copied out.

asking.py requests leases. A view is read-only. Its pages stay pinned until the last array made from
it (slices, reshapes, tensors) is collected. After a copy, the generation words are read again: from
the first block whose word changed, all blocks are misses.
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
from tierd.client.blocks.arrival import Arrival
from tierd.client.blocks.gpu_work import is_done, pauses
from tierd.client.connect.forks import Bound
from tierd.client.session import gpu_arrays
from tierd.client.session.mapping import still_hold
from tierd.client.session.pins import Bytes, Hold
from tierd.client.session.segments import Parts, by_place
from tierd.client.transport.replies import Leased, LeasedGroup, joined, valid_blocks
from tierd.core.arrays.sets import every
from tierd.core.formats.model import BlockStatus, StructArray
from tierd.core.formats.words import barrier
from tierd.errors import InvalidArgument, StaleHandle, TierdError, ViewsAlive

RELEASE_TIMEOUT_S = 5.0
COPY_TIMEOUT_S = 30.0
ROWS_LEAST = 8
"""From this many pages on, check whether they are equally spaced."""


class Lease(Bound):
    """Pinned blocks from `acquire()`. False on a miss.

    As a context manager it raises ViewsAlive on exit while views are alive.

    Attributes:
        tokens: Servable tokens.
        handles: HANDLE [n], groups in order, rank-major within a group.
        groups: The same by group.
        tier_tokens: Per tier, tokens of the first group that were found there.
        whole: False if the store holds more than could be brought near.
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
        self._pending: Arrival | None = None
        if hold:
            hold.watch(self)
            if (self.handles["status"] == BlockStatus.PENDING).any():
                self._pending = Arrival(self.groups, hold)

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
        """The bytes of block i in place: read-only uint8 [length], or a DevicePage on a GPU.

        Its page stays pinned as long as any array made from it lives. Kernels take a DevicePage by
        `__cuda_array_interface__`.

        Raises:
            StaleHandle, ForkedClient: The lease has ended, or is of a parent process.
            InvalidArgument: There is no block i.
        """
        return self._views(self.handles[_index(i, len(self)) :][:1])[0]

    def views(self) -> list[Bytes]:
        """One view for each block; they hold the lease together. Raises StaleHandle, ForkedClient."""
        return cut_pages(self._held(), self.handles, parts=self.parts) if len(self) else []

    def copy_into(self, out: Any) -> int:
        """Copies the blocks into a list of buffers, or into one buffer in order, as `Client.get`.

        Arrays on a GPU are filled in their stream, as by `Client.get`. `release` waits for that.

        Returns:
            The number of good blocks, from the first on (per rank). It ends before a page that was
            taken away or does not hold its block; the contents of `out` after it are undefined.

        Raises:
            InvalidArgument: The buffers do not fit.
            StaleHandle, ForkedClient: The lease has ended, or is of a parent process.
            DeadlineExceeded, TierFailed, Unsupported: The GPU hangs, has failed or is missing.
        """
        return valid_blocks(self.groups, self.copied(out))

    def copied(self, out: Any, *, trusted: Any = (), deadline: float | None = None) -> NDArray[np.bool_]:
        """As `copy_into`, but returns whether each block is good, bool [n]. Sums of GPU pages are
        not checked. Pages with a `trusted` generation need no sums in the catalogue. The daemon has
        checked them for this lease. deadline: of copies that must be waited for."""
        hold, lengths = self._held(), self.handles["length"].tolist()
        if not buffers.are_in_pieces(out):
            out = buffers.pieces(gpu_arrays.all_seen(out), lengths, writable=True)
        is_on_gpu = gpu_arrays.are_on_gpu(out)
        if is_on_gpu:
            self._load(hold, out, deadline)
        good = np.ones(len(self.handles), np.bool_)
        layers = [group.layers for group in self.groups for _ in range(group.handles.size)]
        pages = one_sided_get.pages_of(hold.link.session, self.handles, layers) if hold.link.session else None
        if pages is not None:
            without_sums = pages.rows["table"] == 0
            good = np.array(pages.copy_to(None if is_on_gpu else out, is_leased=True), bool)
            good |= without_sums & np.isin(self.handles["generation"], trusted)
        elif not is_on_gpu:
            copy_out(self._views(self.handles), buffers.pieces(out, lengths, writable=True))
        return good & self._are_current()

    def _load(self, hold: Hold, arrays: Any, deadline: float | None) -> None:
        """Copies the blocks to arrays on a GPU, in their stream; the pages stay pinned meanwhile."""
        copies, addresses, kept = gpu_arrays.copies(), np.zeros(len(self), np.uint64), list[object]([hold.pin()])
        for (tier, number), rows in self.parts:
            segment = hold.segment((tier, number))
            if segment is None:
                raise StaleHandle(f"segment {number} of tier {tier}: not mapped any more; acquire again")
            addresses[rows] = np.uint64(segment.address) + self.handles["offset"][rows]
            kept.append(segment)
        deadline = time.monotonic() + COPY_TIMEOUT_S if deadline is None else deadline
        flight = copies.load(copies.side_of(arrays), arrays, copies.Pages(addresses, kept), deadline)
        self._work = (*(work for work in self._work if not is_done(work)), flight)

    @property
    def is_pending(self) -> bool:
        """Whether the daemon was still filling pages when it gave the lease."""
        return self._pending is not None

    def await_layer(self, layer: int | None = None, *, timeout_s: float) -> bool:
        """Waits until a layer of all blocks, and those before it, are in the pages and verified.

        Leases of `acquire_by_layer` need it before their pages are read; others have all layers. It
        makes no call. Blocks that are not divided by layers come whole.

        Args:
            layer: From 0 on. None: all layers.

        Returns:
            False if the time is up, if a page was lost, or if the daemon has gone. Then drop the
            lease, and compute.

        Raises:
            StaleHandle, ForkedClient: The lease has ended, or is of a parent process.
            InvalidArgument: The layer is negative.
        """
        if layer is not None and layer < 0:
            raise InvalidArgument(f"layer {layer}: layers count from 0; pass None for all layers")
        if self._pending is None:
            return True
        try:
            self._held()
        except StaleHandle:
            if self.hold is None or self.hold.link.is_usable:
                raise
            return False
        return self._pending.wait(layer, timeout_s=timeout_s)

    def check(self) -> int:
        """Number of leading blocks (per rank) still as leased. Raises StaleHandle, ForkedClient."""
        return valid_blocks(self.groups, self._are_current())

    def _are_current(self) -> NDArray[np.bool_]:
        """Which handles are still as leased: bool [n]."""
        hold = self._held()
        barrier()
        good = np.zeros(len(self.handles), dtype=np.bool_)
        for place, rows in self.parts:
            segment = hold.segment(place)
            if segment is not None:
                good[rows] = still_hold(segment.words, self.handles[rows], for_a_lease=True)
        if self._pending is not None:
            good[self.handles["status"] == BlockStatus.PENDING] &= self._pending.good()
        return good

    def tokens_of(self, blocks: int) -> int:
        """Tokens that can be served with the first `blocks` leased blocks."""
        if len(self.groups) == 1 and self.groups[0].first == 0:
            return min(self.tokens, int(self.groups[0].handles["tokens"][0, :blocks].sum()))
        return self.tokens if blocks == max((group.count for group in self.groups), default=0) else 0

    def after(self, *work: Any) -> Self:
        """Makes `release` wait for GPU work that reads the pages.

        Detach and the collection of views do not wait: hold the views until the work is done.

        Args:
            work: Events or streams of torch or cupy.
        """
        self._work += work
        return self

    def release(self) -> None:
        """Unpins the blocks once the work passed to `after` is done, unless the lease has ended.

        This blocks the thread, so a caller with an event loop should await its work first.

        Raises:
            ViewsAlive: Arrays made from the lease are alive.
            ForkedClient: The lease is of a parent process.
            DeadlineExceeded: The work is not done in time.
        """
        hold = self.hold
        if hold is None or hold.is_done:
            return
        hold.check_process()
        for pause_s in pauses(self._work, time.monotonic() + RELEASE_TIMEOUT_S):
            time.sleep(pause_s)
        if hold.has_views:
            raise ViewsAlive(
                f"lease {hold.lease}: arrays made from its views are alive; drop them first, or call detach() to let the last one release it"
            )
        if self._is_acknowledged and hold.link.is_usable and hold.link.session:
            hold.settle()
            with contextlib.suppress(TierdError):  # the daemon has gone, and the lease with it
                hold.link.session.release([hold.lease], timeout_s=RELEASE_TIMEOUT_S)
        hold.drop()

    close = release

    def detach(self) -> None:
        """Ends this handle. The lease ends with its last view, or now if there is none."""
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
    """Copies pages into memory of this process; GPU pages have arrived when it returns."""
    if all(isinstance(page, np.ndarray) for page in pages):
        buffers.copy_all(targets, pages)
        return
    for page, target in zip(pages, targets, strict=True):
        page.copy_to(target)


def cut_pages(hold: Hold, handles: StructArray, *, parts: Parts | None = None, writable: bool = False) -> list[Bytes]:
    """The bytes of HANDLE [n], under one pin. parts: by segment, if known. Raises StaleHandle."""
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
    """Equally long and spaced pages, as from one put: uint8 [n, length]. Its rows cost half as much
    as slices. None: the pages are not so."""
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
