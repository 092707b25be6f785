"""Carries plans out: applies them to the tiers, runs transfers, reports results to the core.

Every plan goes through here, in the order of the core's decisions. The core decides; the mover
copies. `start` has no await, so tiers see plans in the order in which the core made them. Each
transfer of a plan is finished exactly once. Many calls may wait for one transfer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import structlog

from tierd import loads_by_layer
from tierd.cache.directories import Directories
from tierd.cache.events import EventKind
from tierd.cache.parts import Parts
from tierd.cache.prefetches import Ledger, Turns
from tierd.cache.read_queues import ReadQueues
from tierd.core.arrays.columns import runs
from tierd.core.arrays.sets import kinds, true_rows
from tierd.core.formats.meta import picked
from tierd.core.formats.model import CODED, BlockStatus, Fault, Reason, SegmentAssignment, StructArray
from tierd.core.plan import Plan
from tierd.failpoint import failpoint
from tierd.mover import link_of
from tierd.tiers.io.files import NO_SPACE
from tierd.tiers.tier import is_stored
from tierd.tracing import exemplar, span

log = structlog.get_logger(__name__)

BATCH_BYTES = 32 << 20
"""Limit of bytes in a batch. Batches of large blocks have fewer, so that urgent ones wait less."""

UNFAILED = (BlockStatus.READY, BlockStatus.NO_ROOM, BlockStatus.DEFERRED)
"""Of transfers: DEFERRED ones belong to a prefetch that was cancelled before they began."""

BY_LAYER_BYTES = 1 << 30
"""Limit of bytes in a batch that is loaded by layer. Others get their turns between its reads."""

Outcome = dict[int, int]
"""Transfer id to BlockStatus."""


class Flights:
    """The transfers under way. directories: they are updated when blocks are freed."""

    def __init__(self, parts: Parts, directories: Directories) -> None:
        self._core, self._tiers, self._mover = parts.core, parts.tiers, parts.mover
        self._clock, self._events, self._metrics = parts.clock, parts.events, parts.metrics
        self._decisions = parts.decisions
        self._layers_of, self._directories = parts.registry.layers_of, directories
        self._limits = parts.limits
        # Without admission in a replay, results do not depend on the disk's speed.
        stored = [] if parts.clock.is_replay else [t.position for t in parts.tiers if is_stored(t)]
        self.read_queues = ReadQueues(stored, now=_loop_time, limits=parts.limits)
        self.prefetches = Ledger(parts.metrics, now=parts.clock.now, next_id=parts.core.next_id)
        self.turns = Turns(lambda: parts.limits.prefetch_batches)
        self._flying: dict[int, asyncio.Task[Outcome]] = {}
        self._preparing: dict[int, asyncio.Task[None]] = {}
        self.corrupt: Counter[int] = Counter()
        """Corrupt blocks so far, by the tier that held them."""
        self.stir: Callable[[], None] = lambda: None
        """Called when `corrupt` grows."""
        self.lost: Counter[int] = Counter()
        """Blocks that stores lost with a failed sync, by tier."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there may be more to write: a store lost blocks, or is back in service."""
        self.barred = 0
        """Segments for which no memory was available so far."""
        self.made = 0
        """Transfers finished since the start."""
        self.failed = 0
        """Finished transfers that did not succeed."""

    def start(self, plan: Plan, *, session: int = 0, by_layer: bool = False, wanted: bytes = b"") -> None:
        """Applies a plan to the tiers and starts its transfers. session: asked for it; 0: none.
        by_layer: its client waits for each layer. wanted: the first block that is put."""
        if plan.is_empty:
            return
        for tier in self._tiers:
            tier.apply(plan)
        self._directories.remove(plan.freed)
        self.prefetches.free(plan.freed)
        for segment in plan.segments:
            self._prepare(segment)
        if len(plan.freed):
            self._announce_freed(plan, session, wanted)
        if not len(plan.transfers):
            return
        if by_layer:
            plan.transfers["by_layer"] = _come_by_layer(plan.transfers)
        before: dict[int, asyncio.Task[Outcome]] = {}
        for batch in self._batches(plan.transfers):
            self.read_queues.begin(batch, session=session)
            self.turns.expect(batch)
            task = asyncio.create_task(self._fly(batch, before))
            self._flying.update((int(i), task) for i in batch["id"])
        # Set after all of the plan's tasks exist, and before any of them runs.
        before.update((i, self._flying[i]) for i in plan.transfers["after"].tolist() if i in self._flying)

    async def landed(self, plan: Plan, *, timeout_s: float) -> bool:
        """Waits for a plan's transfers and those it shares. False on timeout; the transfers go on."""
        ids = [*plan.transfers["id"].tolist(), *plan.waits.tolist()]
        tasks = {self._flying[i] for i in ids if i in self._flying}
        if not tasks:
            return True
        _, late = await asyncio.wait(tasks, timeout=max(0.0, timeout_s))
        return not late

    async def prepared(self, segments: Iterable[int]) -> None:
        """Waits until the segments can be written. Raises TierFailed."""
        tasks = [task for segment in segments if (task := self._preparing.get(segment))]
        if tasks:  # not gather: a call cancelled just when a task fails would leave the error unread
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()

    async def idle(self, *, timeout_s: float) -> bool:
        """Waits until no transfer is under way. False on timeout."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._flying:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return False
            await asyncio.wait(set(self._flying.values()), timeout=left)
        return True

    def condemn(self, pages: StructArray, fault: Fault) -> None:
        """Quarantines bad pages, EXTENT [n]. They become misses, and are counted and logged."""
        for position in np.unique(pages["tier"]).tolist():
            bad = pages[pages["tier"] == position]
            name, first = self._tiers[position].spec.name, bad[0]
            if fault is not Fault.IO:
                self._count_corrupt(position, len(bad))
            where = {"segment": int(first["segment"]), "offset": int(first["offset"])}
            log.error("bad pages quarantined", tier=name, fault=fault.name.lower(), count=len(bad), **where)
        self.start(self._core.condemn(pages, now=self._clock.now(), fault=fault))

    def note_lost(self) -> None:
        """Reports lost copies of stores to the core."""
        for tier in self._tiers:
            if is_stored(tier) and len(lost := tier.take_lost()):
                self.lost[tier.position] += len(lost)
                log.error("blocks lost with a failed sync", tier=tier.spec.name, count=len(lost))
                self.start(self._core.lose(lost, now=self._clock.now()))
                self.wake()

    @property
    def count(self) -> int:
        """Transfers under way."""
        return len(self._flying)

    def _prepare(self, segment: SegmentAssignment) -> None:
        if segment.replaces is not None:
            self._preparing.pop(segment.replaces, None)
        task = asyncio.create_task(self._tiers[segment.tier].prepare([segment]))
        self._preparing[segment.segment] = task
        task.add_done_callback(lambda done: self._prepared_one(segment, done))

    def _prepared_one(self, segment: SegmentAssignment, task: asyncio.Task[None]) -> None:
        # A failed task stays as long as its segment, so that later waiters get its error.
        error = None if task.cancelled() else task.exception()
        if error is not None:
            name = self._tiers[segment.tier].spec.name
            log.error("segment not prepared", tier=name, segment=segment.segment, error=str(error))
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_SPACE:
                self.barred += 1
                self._core.bar(segment.tier, segment.segment)
        elif self._preparing.get(segment.segment) is task:
            del self._preparing[segment.segment]

    def _batches(self, transfers: StructArray) -> Iterator[StructArray]:
        # Transfers that wait for another transfer, or for a segment's memory, get batches of their
        # own. Otherwise they would delay the others.
        links = link_of(transfers) << 2 | transfers["by_layer"] << 1 | (transfers["after"] > 0)
        unready = [self._unready(*where) for where in transfers["target"][["tier", "segment"]].tolist()]
        alike: dict[tuple[int, int], list[int]] = {}
        for row, key in enumerate(zip(links.tolist(), unready, strict=True)):
            alike.setdefault(key, []).append(row)
        for rows in alike.values():
            largest = int(transfers["source"]["length"][rows].max())
            step = max(1, min(self._limits.batch_blocks, BATCH_BYTES // max(1, largest)))
            if transfers["by_layer"][rows[0]]:
                step = max(1, BY_LAYER_BYTES // largest)  # the first layers of all blocks come first
            for i in range(0, len(rows), step):
                yield transfers[rows[i : i + step]]

    def _unready(self, tier: int, segment: int) -> int:
        """The segment if its memory is still being prepared, else 0."""
        return segment if segment in self._preparing and not is_stored(self._tiers[tier]) else 0

    async def _fly(self, batch: StructArray, before: dict[int, asyncio.Task[Outcome]]) -> Outcome:
        """Runs one batch. before: the tasks that fill this plan's source pages."""
        statuses = np.full(len(batch), BlockStatus.FAILED, dtype=np.uint16)
        metas, begun, link = None, asyncio.get_running_loop().time(), self._link(batch)
        try:
            with span(f"transfer {link}", link=link, blocks=len(batch)) as step:
                ready = await self._sources_ready(batch, before)
                await self.prepared(kinds(batch["target"]["segment"]))
                async with self.turns.of(batch) as goes:
                    if ready.any() and goes:
                        metas = self._metas(batch)  # not before: a source that was decoded has another digest
                        some = metas[ready]
                        statuses[ready] = await self._mover.copy(batch[ready], some)
                        metas[ready] = some
                    elif not goes:
                        statuses[:] = BlockStatus.DEFERRED
                if step:
                    step.set_attribute("tierd.bytes", int(batch["source"]["length"].sum()))
                    step.set_attribute("tierd.ready_blocks", int((statuses == BlockStatus.READY).sum()))
        except Exception:
            log.exception("transfer batch failed", count=len(batch))
        finally:
            self._finish(batch, statuses, metas)
            took_s = asyncio.get_running_loop().time() - begun
            self._metrics.transfer_seconds.labels(link=link).observe(took_s, exemplar())
        return dict(zip(batch["id"].tolist(), statuses.tolist(), strict=True))

    @staticmethod
    async def _sources_ready(batch: StructArray, before: dict[int, asyncio.Task[Outcome]]) -> StructArray:
        """Waits until the batch's source pages are filled. True per transfer with a good source."""
        ready = np.ones(len(batch), dtype=np.bool_)
        for i, first in enumerate(batch["after"].tolist()):
            if first in before:
                ready[i] = (await asyncio.shield(before[first]))[first] == BlockStatus.READY
        return ready

    def _metas(self, batch: StructArray) -> StructArray:
        """META [n] of the transfers' blocks, as their sources hold them."""
        metas = self._core.metas(batch["block"])
        metas["layers"], metas["error"] = self._layers_of(metas["namespace"]), batch["error"]
        return metas

    def _finish(self, batch: StructArray, statuses: StructArray, metas: StructArray | None) -> None:
        self.made += len(batch)
        # A block whose encoding did not fit is copied as it is next time.
        self.failed += int(np.isin(statuses, UNFAILED, invert=True).sum())
        for i in batch["id"].tolist():
            self._flying.pop(i, None)
        self.read_queues.end(batch)
        self.turns.end(batch)
        self.prefetches.fail(batch["target"]["generation"][statuses != BlockStatus.READY].tolist())
        failpoint("flights.finish.before_books")
        plan = self._core.finish(batch["id"], statuses=statuses, now=self._clock.now(), metas=metas)
        self._count(batch, statuses)
        self.start(plan)
        self._announce_stored(self._held(batch[statuses == BlockStatus.READY]))

    def _link(self, batch: StructArray) -> str:
        source, target = batch["source"]["tier"][0], batch["target"]["tier"][0]
        return f"{self._tiers[source].spec.name}>{self._tiers[target].spec.name}"

    def _count_corrupt(self, position: int, count: int) -> None:
        self.corrupt[position] += count
        self._metrics.corrupt.labels(tier=self._tiers[position].spec.name).inc(count)
        self.stir()

    def _count(self, batch: StructArray, statuses: StructArray) -> None:
        link = self._link(batch)
        good = statuses == BlockStatus.READY
        self._metrics.bytes.labels(link=link).inc(int(batch["source"]["length"][good].sum()))
        if (bad := int((statuses == BlockStatus.CORRUPT).sum())) > 0:
            self._count_corrupt(int(batch["source"]["tier"][0]), bad)
        for status, count in zip(*np.unique(statuses, return_counts=True), strict=True):
            outcome = BlockStatus.names()[status]
            self._metrics.transfers.labels(link=link, outcome=outcome).inc(int(count))
            if status not in UNFAILED:
                error = self._take_error(batch) if status == BlockStatus.FAILED else ""
                log.warning("transfers failed", link=link, outcome=outcome, count=int(count), error=error)

    def _take_error(self, batch: StructArray) -> str:
        """The latest error text of the mover or of the batch's stores."""
        mover_error, self._mover.last_error = self._mover.last_error, ""
        tiers = [self._tiers[batch[end]["tier"][0]] for end in ("source", "target")]
        return mover_error or next(
            (error for tier in tiers if is_stored(tier) and (error := tier.health().last_error)), ""
        )

    def _announce_freed(self, plan: Plan, session: int, wanted: bytes) -> None:
        gone = picked(plan.freed, true_rows(plan.freed["was_ready"]))
        if len(lost := self._decisions.losses_of(gone)):
            need = Reason.NONE
            if len(plan.transfers):
                need = Reason(plan.transfers["reason"][0])
                wanted = self._core.names(plan.transfers["block"][:1])["hash"].tobytes()
            self._decisions.lost(lost, session=session, wanted=wanted, need=need)
        for rows in runs(gone["extent"]["tier"], gone["namespace"], gone["reason"]):
            first = gone[rows[0]]
            tier, name = int(first["extent"]["tier"]), Reason(first["reason"]).name.lower()
            self._metrics.freed.labels(tier=self._tiers[tier].spec.name, reason=name).inc(len(rows))
            hashes, namespace = gone["hash"].take(rows, axis=0).tobytes(), int(first["namespace"])
            self._events.add(EventKind.REMOVED, tier=tier, namespace=namespace, hashes=hashes, reason=name)

    def _held(self, landed: StructArray) -> StructArray:
        """The transfers whose targets still hold their blocks. An epoch may have ended, or a tier
        been lost, meanwhile."""
        held = np.zeros(len(landed), dtype=np.bool_)
        for tier in kinds(landed["target"]["tier"]):
            rows = true_rows(landed["target"]["tier"] == tier)
            found = self._core.extents(landed["block"][rows], tier=tier)
            held[rows] = found["generation"] == landed["target"]["generation"][rows]
        return landed[held]

    def _announce_stored(self, landed: StructArray) -> None:
        if len(landed):
            self.announce(self._core.names(landed["block"]), landed["target"]["tier"], landed["reason"])

    def announce(self, names: StructArray, tiers: StructArray, reasons: StructArray) -> None:
        """Reports blocks that tiers now hold to watchers. names: NAME or META [n]."""
        for rows in runs(tiers, names["namespace"], reasons):
            first = rows[0]
            self._events.add(
                EventKind.STORED,
                tier=int(tiers[first]),
                namespace=int(names["namespace"][first]),
                hashes=names["hash"].take(rows, axis=0).tobytes(),
                reason=Reason(reasons[first]).name.lower(),
            )


def _come_by_layer(transfers: StructArray) -> StructArray:
    """Which of TRANSFER [n] bring large blocks, as they are, to a client that waits for layers."""
    source = transfers["source"]
    is_plain = (transfers["reason"] == int(Reason.DEMAND)) & (source["flags"] & CODED == 0)
    return np.asarray(is_plain & (source["length"] >= 2 * loads_by_layer.PART_BYTES))


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
