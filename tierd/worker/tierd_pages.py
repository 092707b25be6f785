"""Pages of the daemon's: read, written and named in place.

Purpose: `PageSource` over `tierd.client.Client`. Non-purpose: what a page means to a sequence. Invariants: a page is mapped memory,
never a copy, but for pages that found no room; a named page is read through a lease that lives as long as its array; whatever the
daemon does, what a block table reads is what its sequence wrote: a failure means fewer named pages, or pages that are lost. `faults` counts failures by error.

On a GPU a Commit is sent when all is done that the current stream was given before, the store kernels of these pages with it: an event is recorded behind them, and the
reservation waits for it (`after`). So is everything before pages are let go of. Who changes the current stream while pages are in use makes the new one wait for the old one.

    with Client() as client, Engine(model, TierdPages(client, model, name="tiny-llama")) as engine:
        ...
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.client import BlockStatus, Client, Lease, NamespaceSpec, PutGroup, Reservation
from tierd.client.values import Hashes
from tierd.core.formats.model import ROOT
from tierd.errors import ConfigError, DeadlineExceeded, ForkedClient, InvalidArgument, StaleHandle, TierdError
from tierd.worker.model import Llama
from tierd.worker.pages import Held, LocalPages, Page, PageShape, page_shape

T = TypeVar("T")
_log = logging.getLogger(__name__)
_WITHHELD: list[tuple[Any, Any]] = []
"""Arrays and origins of pages that a GPU which hangs may still touch: for as long as this process lives the daemon gives them to nobody."""


@dataclass(frozen=True, slots=True)
class TierdOptions:
    """tier: "device" or "host", where pages lie; "" takes device if the daemon has one where the backend attends. reserve_pages: set aside at once, at least.

    durable: commits wait until blocks are on NVMe. keeps_copies: pages are copied before a Commit is sent, and none is ever lost; for who cannot compute
    again what one held.
    """

    tier: str = ""
    reserve_pages: int = 16
    durable: bool = False
    keeps_copies: bool = False


@dataclass(frozen=True, slots=True)
class _Slot:
    """Origin of a private page: its place in a reservation."""

    reservation: Reservation
    index: int


@dataclass(frozen=True, slots=True)
class _Leased:
    """Origin of a named page: its place in a lease, which ends when the last such page has been dropped."""

    lease: Lease
    index: int


class TierdPages:
    """A source of pages over a daemon. One caller thread. The client is the caller's to close, after this."""

    def __init__(
        self,
        client: Client,
        model: Llama | NamespaceSpec,
        *,
        name: str = "",
        shape: PageShape | None = None,
        options: TierdOptions | None = None,
    ) -> None:
        """model: or a namespace of the caller's own, with `shape`; name: of the model, for people; the weights' digest tells models apart.

        Raises what Client.open_namespace raises, ConfigError for a backend on a GPU and a daemon without one.
        """
        self._client = client
        self._shape = shape or _shape_of(model)
        self._options = options or TierdOptions()
        if isinstance(model, NamespaceSpec):
            spec = _with_scales(model, self._shape)
        else:
            spec = namespace_spec(model, self._shape, name=name)
        self._namespace = client.open_namespace(spec)
        if self._shape.backend.is_on_gpu and client.tiers and not client.gpu_tiers:
            raise ConfigError(
                f"worker: attends on {self._shape.backend.device}, the daemon has no memory of a GPU; give it a [[device]] of kind cuda, or choose device='cpu'"
            )
        if self._shape.backend.is_on_gpu and len(client.gpu_tiers) > 1 and not self._options.tier:
            raise ConfigError(
                f"worker: attends on {self._shape.backend.device}, the daemon has memory of several GPUs ({', '.join(client.gpu_tiers)}); say which with TierdOptions(tier=...)"
            )
        self._spare: list[Page] = []
        self._memory = LocalPages(self._shape)
        self._owed = 0
        self.faults: Counter[str] = Counter()

    @property
    def shape(self) -> PageShape:
        """What every page looks like."""
        return self._shape

    @property
    def tier(self) -> str:
        """The kind of tier where pages lie."""
        # What attends on host memory finds that in a device tier of kind "cpu", not in one of a GPU.
        has_device = any(name.startswith("device") for name in set(self._client.tiers) - set(self._client.gpu_tiers))
        return self._options.tier or ("device" if has_device or self._shape.backend.is_on_gpu else "host")

    def acquire(self, tokens: Sequence[int], *, marks: Sequence[int] = ()) -> Held:
        """The longest stored prefix: whole blocks, and the short block of the latest mark behind them if it is stored."""
        return self._guarded(lambda: self._acquire(tokens, marks), Held)

    def reserve(self, count: int) -> list[Page]:
        """Private pages of the daemon's as far as there is room, of this process's own memory for the rest, and in place of those that were lost: none is
        lost twice."""
        wanted = max(0, count - self._owed)
        if wanted > len(self._spare):
            self._spare += self._guarded(lambda: self._set_aside(wanted - len(self._spare)), list)
        own = self._memory.reserve(
            count - min(wanted, len(self._spare))
        )  # first: where there is none, nothing was taken
        self._owed -= count - wanted
        taken, self._spare = self._spare[:wanted], self._spare[wanted:]
        for page in taken:
            page.holders = 1
        return taken + own

    def commit(self, pages: Sequence[Page], tokens: Sequence[int], *, after: Page | None) -> list[Page]:
        """Names pages, one call per reservation. Pages are changed in place, so that forks that hold them see the same."""
        done = 0
        for origin, run in groupby(pages, key=_reservation_of):
            part = list(run)
            size = self._shape.tokens_per_block
            if isinstance(origin, Reservation) and _is_open(origin):
                self._name(origin, part, tokens[done * size : (done + len(part)) * size], after)
            if part[-1].is_private:
                break
            done, after = done + len(part), part[-1]
        return list(pages)

    def commit_tail(self, page: Page, tokens: Sequence[int], *, after: Page | None) -> bool:
        """Copies the beginning of a page, compact, into a short page of its own and publishes that."""
        return self._guarded(lambda: self._commit_tail(page, tokens, after), bool)

    def release(self, pages: Sequence[Page]) -> None:
        """Named pages are unpinned, private ones kept for the next reserve. Raises DeadlineExceeded while a GPU hangs that may still read them; they then
        stay this process's until it ends."""
        self._finish(pages)
        for page in pages:
            if page.is_lost:
                continue
            if page.origin is None:
                self._memory.release([page])
                continue
            page.holders -= 1
            if page.holders == 0 and isinstance(page.origin, _Slot):
                if page.origin.reservation:
                    self._spare.append(page)
            elif page.holders == 0:
                page.array = page.origin = None  # the lease ends with its last array

    def report_attention(self, pages: Sequence[Page], mass: Sequence[float]) -> None:
        """One report per lease that the pages are held by."""
        reports: dict[int, tuple[Lease, Any]] = {}
        for page, weight in zip(pages, mass, strict=False):
            if isinstance(page.origin, _Leased):
                lease = page.origin.lease
                _, row = reports.setdefault(lease.id, (lease, np.zeros((1, len(lease)), dtype=np.float32)))
                row[0, page.origin.index] += weight
        for lease, row in reports.values():
            self._guarded(partial(self._client.report_attention, lease, row), lambda: None)

    def close(self) -> None:
        """Gives spare pages back: a reservation ends with its last page. Raises DeadlineExceeded as `release`."""
        self._shape.backend.finish()
        self._spare.clear()
        self._memory.close()

    # -- inner steps, which may raise

    def _acquire(self, tokens: Sequence[int], marks: Sequence[int]) -> Held:
        size = self._shape.tokens_per_block
        lease, hashes = self._lease(tokens, len(tokens) // size * size)
        found = np.array(lease.tier_tokens, dtype=np.int64)
        near = [mark for mark in marks if lease.tokens < mark < lease.tokens + size and mark <= len(tokens)]
        for mark in sorted(near, reverse=True):
            longer, its_hashes = self._lease(tokens, mark)
            if longer.tokens == mark:
                # The first lease has brought its blocks near: what the second one finds farthest is the tail. Without a whole block it has told of no tier.
                found = found if len(found) else np.zeros(len(longer.tier_tokens), dtype=np.int64)
                found[np.flatnonzero(longer.tier_tokens)[-1]] += mark - lease.tokens
                lease, hashes = longer, its_hashes
                break
        return self._held(lease, hashes, found=found)

    def _lease(self, tokens: Sequence[int], count: int) -> tuple[Lease, Hashes]:
        """A lease on the first `count` tokens, a short last block included, and the hashes that were asked for."""
        hashes = self._namespace.hash(tokens[:count], with_tail=True)
        covered = count if len(hashes) else 0
        return self._client.acquire(self._namespace, hashes, tokens=covered, tier=self.tier), hashes

    def _held(self, lease: Lease, hashes: Hashes, *, found: NDArray[np.int64]) -> Held:
        """found: tokens by the position of the tier that held them before this request."""
        if not lease:
            return Held()
        counts = lease.handles["tokens"].tolist()
        pages = [
            Page(self._shape.view(view, count), hash=hashes[i].tobytes(), position=i, origin=_Leased(lease, i))
            for i, (view, count) in enumerate(zip(lease.views(), counts, strict=True))
        ]
        tail = pages.pop() if counts[-1] < self._shape.tokens_per_block else None
        tiers = {name: n for name, n in zip(self._client.tiers, found.tolist(), strict=False) if n}
        return Held(pages, tail, lease.tokens, tiers)

    def _set_aside(self, count: int) -> list[Page]:
        group = PutGroup.private(self._namespace, max(count, self._options.reserve_pages))
        reservation = self._client.reserve(group, tier=self.tier)
        return [
            Page(self._shape.view(buffer), origin=_Slot(reservation, i), holders=0)
            for i, buffer in enumerate(reservation.buffers())
            if buffer is not None
        ]

    def _name(self, reservation: Reservation, pages: list[Page], tokens: Sequence[int], after: Page | None) -> None:
        """Publishes pages of one reservation. Those of a Commit that failed are lost, or move to the copies that were made before.

        Once it has been sent the pages may be freed (somebody's block of the same name lies elsewhere, perhaps where it cannot be mapped), and of a call
        that failed nobody knows how far it came.
        """
        kept = self._copies(pages) if self._options.keeps_copies else []
        held: list[Page] = []
        try:
            held = self._guarded(lambda: self._publish(reservation, pages, tokens, after), Held).pages
        finally:  # whatever ends it, an interrupt too: pages that may be somebody's block must not be written to again
            if len(held) == len(pages):
                _move(pages, held)
                self._memory.release(kept)
            else:
                self._lose(pages, kept)

    def _lose(self, pages: list[Page], kept: list[Page]) -> None:
        try:
            with suppress(DeadlineExceeded):
                self._finish(pages)
        finally:
            _move(pages, kept or [Page(None) for _ in pages])
            self._owed += len(pages) - len(kept)
            self._spare.clear()

    def _finish(self, pages: Sequence[Page]) -> None:
        """Waits for what may still touch the pages. Raises DeadlineExceeded: nobody else gets them then, nor when the wait is interrupted, whoever lets go of them here."""
        try:
            self._shape.backend.finish()
        except BaseException:
            _WITHHELD.extend((page.array, page.origin) for page in pages)
            raise

    def _copies(self, pages: Sequence[Page]) -> list[Page]:
        copies = self._memory.reserve(len(pages))
        for copy, page in zip(copies, pages, strict=True):
            self._shape.backend.copy(page.array, copy.array, tokens=self._shape.tokens_per_block)
        return copies

    def _publish(
        self, reservation: Reservation, pages: Sequence[Page], tokens: Sequence[int], after: Page | None
    ) -> Held:
        """The pages of these blocks, under a lease; nothing if they were not stored."""
        parent, position = (after.hash, after.position + 1) if after else (ROOT, 0)
        hashes = self._namespace.hash(tokens, parent=parent)
        index = [page.origin.index for page in pages]
        if len(hashes) != len(index):
            return Held()
        blocks = self._namespace.naming(hashes, index=index, parent=parent, position=position)
        reservation.after(*self._shape.backend.under_way())
        lease = reservation.commit(blocks, durable=self._options.durable, lease=True, keep_open=True).lease
        if lease is None or len(lease) != len(index) or not self._is_near(lease):
            # They exist, but not where this worker attends: perhaps they can be brought there.
            lease = self._client.acquire(self._namespace, hashes, tokens=len(tokens), tier=self.tier)
        if len(lease) != len(index):
            return Held()
        return Held(
            [
                Page(self._shape.view(view), hash=hashes[i].tobytes(), position=position + i, origin=_Leased(lease, i))
                for i, view in enumerate(lease.views())
            ]
        )

    def _is_near(self, lease: Lease) -> bool:
        """Whether it lies where this worker attends; of several GPUs, on its own."""
        tiers = {self._client.tiers[i] for i in lease.handles["tier"].tolist()}
        if self.tier in self._client.tiers:
            return tiers == {self.tier}
        return {tier in self._client.gpu_tiers for tier in tiers} == {self._shape.backend.is_on_gpu}

    def _commit_tail(self, page: Page, tokens: Sequence[int], after: Page | None) -> bool:
        parent, position = (after.hash, after.position + 1) if after else (ROOT, 0)
        hashes = self._namespace.hash(tokens, parent=parent, with_tail=True)
        group = PutGroup(self._namespace, hashes, len(tokens), parent=parent, position=position)
        with self._client.reserve(group, tier=self.tier) as reservation:
            statuses = reservation.statuses.tolist()
            if statuses == [BlockStatus.RESERVED]:
                target = self._shape.view(reservation.buffer(0), len(tokens))
                self._shape.backend.copy(page.array, target, tokens=len(tokens))
                reservation.after(*self._shape.backend.under_way())
                statuses = reservation.commit(durable=self._options.durable).statuses.tolist()
        return statuses in ([BlockStatus.READY], [BlockStatus.EXISTS])

    def _guarded(self, work: Callable[[], T], nothing: Callable[[], T]) -> T:
        """What the daemon gave; `nothing` when it failed."""
        try:
            return work()
        except (ForkedClient, ConfigError):
            raise
        except TierdError as fault:
            self.faults[type(fault).__name__] += 1
            _log.debug("tierd gave nothing: %s", fault)
            return nothing()


def _move(pages: Sequence[Page], to: Sequence[Page]) -> None:
    """In place, so that all who have the pages see it."""
    for page, now in zip(pages, to, strict=True):
        page.array, page.hash, page.position, page.origin = now.array, now.hash, now.position, now.origin


def namespace_spec(model: Llama, shape: PageShape, *, name: str) -> NamespaceSpec:
    """What tells this model's KV from all other: weights, shape, the precision that it was computed in, and scales."""
    spec = NamespaceSpec(
        model=name,
        tokens_per_block=shape.tokens_per_block,
        block_bytes=shape.block_bytes,
        weights_digest=f"{model.digest}/{model.backend.dtype}",
        geometry=shape.geometry,
    )
    return _with_scales(spec, shape)


def _with_scales(spec: NamespaceSpec, shape: PageShape) -> NamespaceSpec:
    """Where pages have scales, bytes mean nothing without them: whose are others finds none of these."""
    return spec if shape.scales is None else replace(spec, salt=f"{spec.salt}/{shape.scales.text}")


def _shape_of(model: Llama | NamespaceSpec) -> PageShape:
    if isinstance(model, NamespaceSpec):
        raise InvalidArgument("TierdPages: a namespace does not say what computes on its pages; give `shape`")
    return page_shape(model)


def _is_open(reservation: Reservation) -> bool:
    """Whether its daemon is there. If not, its pages stay this process's to read and write: what it held is given to nobody before it ends."""
    try:
        return bool(reservation.held())
    except StaleHandle:
        return False


def _reservation_of(page: Page) -> Reservation | Page | None:
    """What a run of pages has in common: its reservation; a named page is a run of its own; None for plain memory."""
    if isinstance(page.origin, _Slot):
        return page.origin.reservation
    return page if page.hash else None
