"""Pages of the daemon, read, written and named in place.

It implements `PageSource` over `tierd.client.Client`. A page is mapped memory, never a copy, except
a page that found no room. A named page is read through a lease that lives as long as its array. A
block table always reads its sequence's own writes: a failure gives fewer named pages, or lost ones.
Failures are counted by error in `faults`, decisions of the advisor in `advice`.

On a GPU a Commit is sent after all earlier work of the current stream, including its pages' store
kernels. An event is recorded behind that work, and the reservation waits for it (`after`).
Releasing pages waits likewise. If you change the current stream while pages are in use, make the
new one wait for the old one.

    with Client() as client, Engine(model, TierdPages(client, model, name="tiny-llama")) as engine:
        ...
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.client import BlockStatus, Client, Group, Lease, NamespaceSpec, OpenedNamespace, PutGroup, Reservation
from tierd.client.advice import Claim, EngineAdvice
from tierd.client.values import Hashes
from tierd.core.formats.model import ROOT
from tierd.errors import ConfigError, DeadlineExceeded, ForkedClient, InvalidArgument, StaleHandle, TierdError
from tierd.worker.advisor import Advisor
from tierd.worker.model import Llama
from tierd.worker.pages import Held, LocalPages, Page, PageShape, page_shape

T = TypeVar("T")
_log = logging.getLogger(__name__)
_WITHHELD: list[tuple[Any, Any]] = []
"""Arrays and origins of pages that a hanging GPU may still touch, kept while this process lives."""
LEAST_LOAD_S = 0.25
"""Pages of a stored prefix are waited for at least so long."""
EXISTING_S = 1.0
"""A block that a Commit found on a store is waited for so long. Then it is computed again."""


@dataclass(frozen=True, slots=True)
class TierdOptions:
    """tier: "device" or "host"; "": device if the daemon has one where the backend attends.

    stored_in: tier of pages with a name; "": the same, or "host". Then a page moves to host memory
    once it is stored, and prompts may be larger than the device tier. Not with pages on a GPU.
    reserve_pages: least pages of a reservation. durable: commits wait until blocks are on NVMe.
    keeps_copies: pages are copied before a Commit, none is lost; for callers without recomputing.
    load_s: pages of a stored prefix that have not come after this time are computed; sooner if
    computing them takes less.
    advisor: tokens that are faster to compute than to load are computed.
    """

    tier: str = ""
    stored_in: str = ""
    reserve_pages: int = 16
    durable: bool = False
    keeps_copies: bool = False
    load_s: float = 5.0
    advisor: bool = True


@dataclass(frozen=True, slots=True)
class _Slot:
    """Origin of a private page: its place in a reservation."""

    reservation: Reservation
    index: int


@dataclass(frozen=True, slots=True)
class _Leased:
    """Origin of a named page: its place in a lease, which ends when its last page is dropped."""

    lease: Lease
    index: int


@dataclass(slots=True)
class _Load:
    """A lease on the blocks of `hashes`. declined: stored tokens beyond them. spent_s: that the engine
    waited for it. until: when it is given up."""

    lease: Lease
    hashes: Hashes
    claimed: Claim
    declined: int
    spent_s: float = 0.0
    until: float = 0.0


class TierdPages:
    """A source of pages over a daemon; one caller thread. The caller closes the client, after this."""

    def __init__(
        self,
        client: Client,
        model: Llama | NamespaceSpec,
        *,
        name: str = "",
        shape: PageShape | None = None,
        options: TierdOptions | None = None,
    ) -> None:
        """model: or the caller's own namespace, with `shape`. name: of the model, to display; its
        weights' digest identifies it.

        Raises what Client.open_namespace raises, ConfigError for a backend on a GPU and a daemon
        without one.
        """
        self._client = client
        self._shape = shape or _shape_of(model)
        self._options = options or TierdOptions()
        if isinstance(model, NamespaceSpec):
            spec = _with_scales(model, self._shape)
        else:
            spec = namespace_spec(model, self._shape, name=name)
        self._namespace = client.open_namespace(spec)
        if self._options.stored_in not in ("", "host"):
            raise ConfigError(f"TierdOptions.stored_in: is {self._options.stored_in!r}; give 'host', or nothing")
        if self._shape.backend.is_on_gpu and self._options.stored_in:
            raise ConfigError(
                f"TierdOptions.stored_in: is {self._options.stored_in!r}, attention on {self._shape.backend.device} reads "
                "pages of its own memory alone; leave it empty, or choose device='cpu'"
            )
        if self._shape.backend.is_on_gpu and client.tiers and not client.gpu_tiers:
            raise ConfigError(
                f"worker: attends on {self._shape.backend.device}, the daemon has no memory of a GPU; give it a [[device]] of kind cuda, or choose device='cpu'"
            )
        if self._shape.backend.is_on_gpu and len(client.gpu_tiers) > 1 and not self._options.tier:
            raise ConfigError(
                f"worker: attends on {self._shape.backend.device}, the daemon has memory of several GPUs "
                f"({', '.join(client.gpu_tiers)}); name one with TierdOptions(tier=...)"
            )
        self._spare: list[Page] = []
        self._memory = LocalPages(self._shape)
        self._owed = 0
        self._advisor = Advisor(client, self._namespace, is_on=self._options.advisor)
        self.faults: Counter[str] = Counter()

    @property
    def shape(self) -> PageShape:
        """Shape of every page."""
        return self._shape

    @property
    def namespace(self) -> OpenedNamespace:
        """The namespace of the pages' blocks."""
        return self._namespace

    @property
    def advice(self) -> EngineAdvice:
        """Its decisions; `take_counts` has them and their regret."""
        return self._advisor.advice

    @property
    def tier(self) -> str:
        """The kind of tier where pages lie."""
        # Host attention uses a device tier of kind "cpu", not one of a GPU.
        has_device = any(name.startswith("device") for name in set(self._client.tiers) - set(self._client.gpu_tiers))
        return self._options.tier or ("device" if has_device or self._shape.backend.is_on_gpu else "host")

    @property
    def stored_tier(self) -> str:
        """The kind of tier where pages with a name lie."""
        return self._options.stored_in or self.tier

    def acquire(self, tokens: Sequence[int], *, marks: Sequence[int] = (), by_layer: bool = False) -> Held:
        """The longest stored prefix: whole blocks, and then the latest mark's short block if it is stored."""
        return self._guarded(lambda: self._acquire(tokens, marks, by_layer=by_layer), Held)

    def reserve(self, count: int) -> list[Page]:
        """Private pages of the daemon if it has room, else of this process's memory. Replacements
        of lost pages are own memory: none is lost twice."""
        wanted = max(0, count - self._owed)
        if wanted > len(self._spare):
            self._spare += self._guarded(lambda: self._set_aside(wanted - len(self._spare)), list)
        own = self._memory.reserve(count - min(wanted, len(self._spare)))  # first: if it fails, nothing was taken
        self._owed -= count - wanted
        taken, self._spare = self._spare[:wanted], self._spare[wanted:]
        for page in taken:
            page.holders = 1
        return taken + own

    def commit(self, pages: Sequence[Page], tokens: Sequence[int], *, after: Page | None) -> list[Page]:
        """Names pages, one call per reservation. Pages change in place, so forks that hold them see it.
        Pages of blocks that were declined are named without a call, and stay where they are."""
        self._name_declined(pages, tokens, after)
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
        """Copies the start of a page, compact, into a short page and commits that."""
        return self._guarded(lambda: self._commit_tail(page, tokens, after), bool)

    def release(self, pages: Sequence[Page]) -> None:
        """Unpins named pages and keeps private ones for the next reserve. Raises DeadlineExceeded
        while a hanging GPU may still read them. This process then keeps them until it ends."""
        self._finish(pages)
        for page in pages:
            if page.is_lost:
                continue
            if page.holders == 1 and not isinstance(page.origin, _Leased):
                page.hash, page.position = b"", 0
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
        """One report per lease of the pages."""
        reports: dict[int, tuple[Lease, Any]] = {}
        for page, weight in zip(pages, mass, strict=False):
            if isinstance(page.origin, _Leased):
                lease = page.origin.lease
                _, row = reports.setdefault(lease.id, (lease, np.zeros((1, len(lease)), dtype=np.float32)))
                row[0, page.origin.index] += weight
        for lease, row in reports.values():
            self._guarded(partial(self._client.report_attention, lease, row), lambda: None)

    def computed(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """The advisor learns from a pass, without its waits for layers."""
        self._advisor.computed(parts, seconds)

    def close(self) -> None:
        """Releases spare pages: a reservation ends with its last page. Raises DeadlineExceeded as `release`."""
        self._shape.backend.finish()
        self._spare.clear()
        self._memory.close()

    # -- inner steps, which may raise

    def _acquire(self, tokens: Sequence[int], marks: Sequence[int], *, by_layer: bool) -> Held:
        size, begun = self._shape.tokens_per_block, time.monotonic()
        load = self._load(tokens, len(tokens) // size * size, by_layer=by_layer)
        lease, declined = load.lease, load.declined
        found = np.array(lease.tier_tokens, dtype=np.int64)
        near = [mark for mark in marks if lease.tokens < mark < lease.tokens + size and mark <= len(tokens)]
        for mark in sorted(near, reverse=True):
            longer = self._load(tokens, mark, by_layer=by_layer, held=lease.tokens)
            declined += longer.declined
            if longer.lease.tokens == mark:
                # The first lease has copied its blocks near, so the second one finds only the tail
                # far. Without a whole block the first has no tiers.
                found = found if len(found) else np.zeros(len(longer.lease.tier_tokens), dtype=np.int64)
                found[np.flatnonzero(longer.lease.tier_tokens)[-1]] += mark - lease.tokens
                longer.claimed = longer.claimed if load.claimed.advice is None else load.claimed
                load = longer
            if longer.lease.tokens == mark or longer.declined:
                break
        held, self._advisor.is_late = self._held(load.lease, load.hashes, found=found), False
        load.spent_s = time.monotonic() - begun
        if not load.lease.is_pending:
            self.advice.loaded(load.claimed, load.spent_s)
            return replace(held, advised_compute_tokens=declined)
        load.until = time.monotonic() + self._wait_s(load.claimed)
        return replace(held, advised_compute_tokens=declined, arriving=partial(self._arrived, load))

    def _load(self, tokens: Sequence[int], count: int, *, by_layer: bool, held: int = 0) -> _Load:
        """A lease on the first `count` tokens, a short last block included, as far as the advisor says."""
        hashes = self._namespace.hash(tokens[:count], with_tail=True)
        layers, covered = self._shape.geometry.layers if by_layer else 1, count if len(hashes) else 0
        worth = self._advisor.worth(hashes, covered, held=held, prompt=len(tokens), layers=layers)
        if by_layer:
            lease = self._client.acquire_by_layer(
                Group(self._namespace, worth.hashes, worth.tokens), tier=self.stored_tier
            )
        else:
            lease = self._client.acquire(self._namespace, worth.hashes, tokens=worth.tokens, tier=self.stored_tier)
        self._advisor.note(lease.tier_tokens)
        return _Load(lease, worth.hashes, worth.claimed, worth.declined)

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

    def _wait_s(self, claimed: Claim) -> float:
        """How long a load may take: what computing would have, within limits."""
        most_s = self._options.load_s
        return min(most_s, max(LEAST_LOAD_S, claimed.compute_s)) if claimed.compute_s else most_s

    def _arrived(self, load: _Load, layer: int | None) -> bool:
        """Whether a layer is in the pages of a lease in time."""
        begun = time.monotonic()
        left_s = max(0.0, load.until - begun)
        is_there = self._guarded(lambda: load.lease.await_layer(layer, timeout_s=left_s), bool)
        waited_s = time.monotonic() - begun
        load.spent_s += waited_s
        self._advisor.waited_s += waited_s
        self._advisor.is_late = not is_there and waited_s >= left_s
        if not is_there or layer in (None, self._shape.geometry.layers - 1):
            self.advice.loaded(load.claimed, load.spent_s)
        return is_there

    def _name_declined(self, pages: Sequence[Page], tokens: Sequence[int], after: Page | None) -> None:
        """Names private pages whose blocks the advisor has left on a store. A Commit would answer with
        the block there, and take the page."""
        declined = self._advisor.declined
        parent, position = (after.hash, after.position + 1) if after else (ROOT, 0)
        names = map(bytes, self._namespace.hash(tokens, parent=parent)) if declined else ()
        for i, (page, name) in enumerate(zip(pages, names, strict=False)):
            if page.is_private and name in declined:
                page.hash, page.position = name, position + i
                declined.remove(name)

    def _set_aside(self, count: int) -> list[Page]:
        group = PutGroup.private(self._namespace, max(count, self._options.reserve_pages))
        reservation = self._client.reserve(group, tier=self.tier)
        return [
            Page(self._shape.view(buffer), origin=_Slot(reservation, i), holders=0)
            for i, buffer in enumerate(reservation.buffers())
            if buffer is not None
        ]

    def _name(self, reservation: Reservation, pages: list[Page], tokens: Sequence[int], after: Page | None) -> None:
        """Commits pages of one reservation. Pages of a failed Commit are lost, or move to copies
        made before.

        After a Commit is sent, its pages may be freed: the existing block of that name lies
        elsewhere, perhaps unmappable. A failed call has an unknown outcome.
        """
        kept = self._copies(pages) if self._options.keeps_copies else []
        held: list[Page] = []
        try:
            held = self._guarded(lambda: self._publish(reservation, pages, tokens, after), Held).pages
        # after an interrupt too: pages that may be another client's block must not be written
        finally:
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
        """Waits for work that may still touch the pages. If that raises DeadlineExceeded or is
        interrupted, this process keeps the pages."""
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
        """The pages of these blocks, under a lease; none if they were not stored."""
        parent, position = (after.hash, after.position + 1) if after else (ROOT, 0)
        hashes = self._namespace.hash(tokens, parent=parent)
        index = [page.origin.index for page in pages]
        if len(hashes) != len(index):
            return Held()
        blocks = self._namespace.naming(hashes, index=index, parent=parent, position=position)
        reservation.after(*self._shape.backend.under_way())
        lease = reservation.commit(blocks, durable=self._options.durable, lease=True, keep_open=True).lease
        if lease is None or len(lease) != len(index) or not self._is_near(lease):
            # They exist, but not where this worker reads them; the daemon may copy them there.
            group = Group(self._namespace, hashes, len(tokens))
            there = self._client.acquire(group, tier=self.stored_tier, timeout_s=EXISTING_S)
            if lease is None or len(there) == len(index) or not self._options.stored_in:
                lease = there
        if len(lease) != len(index):
            return Held()
        return Held(
            [
                Page(self._shape.view(view), hash=hashes[i].tobytes(), position=position + i, origin=_Leased(lease, i))
                for i, view in enumerate(lease.views())
            ]
        )

    def _is_near(self, lease: Lease) -> bool:
        """Whether it lies where this worker reads stored pages; of several GPUs, on its own."""
        tiers = {self._client.tiers[i] for i in lease.handles["tier"].tolist()}
        if self._options.stored_in:
            return all(tier.startswith("host.") for tier in tiers)
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
        """The daemon's answer; `nothing` if it failed."""
        try:
            return work()
        except (ForkedClient, ConfigError):
            raise
        except TierdError as fault:
            self.faults[type(fault).__name__] += 1
            _log.debug("tierd served nothing: %s", fault)
            return nothing()


def _move(pages: Sequence[Page], to: Sequence[Page]) -> None:
    """Changes pages in place, so that all holders see it."""
    for page, now in zip(pages, to, strict=True):
        page.become(now)


def namespace_spec(model: Llama, shape: PageShape, *, name: str) -> NamespaceSpec:
    """The identity of a model's KV: weights, shape, the precision of its computation, and scales."""
    spec = NamespaceSpec(
        model=name,
        tokens_per_block=shape.tokens_per_block,
        block_bytes=shape.block_bytes,
        weights_digest=f"{model.digest}/{model.backend.dtype}",
        geometry=shape.geometry,
    )
    return _with_scales(spec, shape)


def _with_scales(spec: NamespaceSpec, shape: PageShape) -> NamespaceSpec:
    """Adds the scales, which the bytes depend on: workers with other scales find none of these blocks."""
    return spec if shape.scales is None else replace(spec, salt=f"{spec.salt}/{shape.scales.text}")


def _shape_of(model: Llama | NamespaceSpec) -> PageShape:
    if isinstance(model, NamespaceSpec):
        raise InvalidArgument("TierdPages: a namespace does not include the pages' shape; give `shape`")
    return page_shape(model)


def _is_open(reservation: Reservation) -> bool:
    """Whether its daemon is there. Else this process keeps its pages until it ends."""
    try:
        return bool(reservation.held())
    except StaleHandle:
        return False


def _reservation_of(page: Page) -> Reservation | Page | None:
    """A run's common origin: its reservation. A named page is its own run; None: plain memory."""
    if page.hash:
        return page
    return page.origin.reservation if isinstance(page.origin, _Slot) else None
