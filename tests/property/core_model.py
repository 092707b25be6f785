"""A plain model of the core's promises: dicts of pages, checked against every plan.

Purpose: the model learns from plans and answers alone which session holds a page and which bytes it
has. It fails at the first plan that would damage a holder. Non-purpose: predicting the core's
choices. A generation names one life of a page and is never used twice. A page holds the key
(namespace, hash) written there, or garbage. A reserved page is garbage at once: its holder may
write at any time. A transfer copies the content that its source has when it ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from tierd.core.formats.model import (
    EXTENT,
    SEALED,
    BlockStatus,
    Reason,
    SegmentAssignment,
    StructArray,
    TierKind,
    TierSpec,
)
from tierd.core.plan import Plan

Key = tuple[int, bytes]
"""(namespace id, block hash)."""

UNKNOWN = -1
"""Page number of a page adopted from a former core: no answer has told it."""


class Stage(Enum):
    """The use of a page."""

    WRITING = 1  # reserved for a session
    FILLING = 2  # target of a transfer
    READY = 3


@dataclass
class Page:
    """A page from its reservation until it is free."""

    tier: int
    page: int
    segment: int
    slot: int
    generation: int
    stage: Stage = Stage.WRITING
    content: Key | None = None
    condemned: bool = False
    retired: bool = False


@dataclass
class Flight:
    """A transfer in flight. The source is pinned only once it has been filled."""

    id: int
    after: int
    source: int
    target: int
    key: Key
    started: bool


@dataclass
class Model:
    """All that plans and answers tell about the core's pages."""

    tiers: list[TierSpec]
    pages: dict[int, Page] = field(default_factory=dict)  # by generation
    places: dict[tuple[int, int], int] = field(default_factory=dict)  # (tier, page) -> generation
    slots: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (tier, segment, slot) -> generation
    segments: dict[tuple[int, int], SegmentAssignment] = field(default_factory=dict)  # (tier, place)
    writers: dict[int, int] = field(default_factory=dict)  # segment -> session
    flights: dict[int, Flight] = field(default_factory=dict)
    pins: Counter[int] = field(default_factory=Counter)  # by generation
    held: dict[Key, dict[int, int]] = field(default_factory=dict)  # key -> tier -> generation
    used_generations: set[int] = field(default_factory=set)
    used_segments: set[int] = field(default_factory=set)
    used_flights: set[int] = field(default_factory=set)
    serving: dict[int, bool] = field(default_factory=dict)
    direct: dict[int, frozenset[int]] = field(default_factory=dict)  # device -> stores that it reads directly
    descriptors: dict[int, dict[int, bool]] = field(default_factory=dict)  # segment -> session -> writable
    sessions: dict[int, int] = field(default_factory=dict)  # live session -> domain
    forgotten: set[int] = field(default_factory=set)  # namespaces
    ending: set[int] = field(default_factory=set)  # forgotten ones whose unpinned pages may remain
    lent: set[tuple[int, int]] = field(
        default_factory=set
    )  # (tier, place) of a file to which a session had a writable descriptor
    landed: set[int] = field(default_factory=set)  # generations that became ready in the present step

    # -- plans

    def apply(self, plan: Plan) -> None:
        """Checks a plan against the held pages and applies it."""
        for row in plan.freed:
            if row["reason"] == Reason.DEMOTED:
                self._check_demoted(row)
        for row in plan.retired:
            self._retire(row)
        for row in plan.freed:
            self._free(row)
        for assignment in plan.segments:
            self._begin(assignment)
        for row in plan.reserved:
            self._reserve(row)
        for row in plan.transfers:
            self._fly(row)
        for waited in plan.waits.tolist():
            assert waited in self.flights, f"plan waits for transfer {waited}, which is not in flight"
        self.landed.clear()

    def _retire(self, row: StructArray) -> None:
        page = self.pages[int(row["generation"])]
        assert page.stage is Stage.READY and not page.retired, f"retired: {page}"
        page.retired = True  # its last pin may free it in the same step

    def check_words(self) -> None:
        """Checks that exactly the once ready pages that no lookup finds are marked as retired."""
        for page in self.pages.values():
            is_known = page.stage is Stage.READY and page.content is not None and page.page != UNKNOWN
            if is_known and page.content[0] not in self.ending:
                is_found = self.held.get(page.content, {}).get(page.tier) == page.generation
                assert page.retired is not is_found, f"{'found' if is_found else 'not found'}: {page}"

    def _free(self, row: StructArray) -> None:
        extent = row["extent"]
        generation = int(extent["generation"])
        page = self.pages.pop(generation, None)
        assert page is not None, f"freed a page that was not held: {extent}"
        place = (int(extent["tier"]), int(extent["page"]))
        assert (page.tier, page.slot) == (place[0], int(extent["slot"]))
        assert page.page in {place[1], UNKNOWN}
        assert not self.pins[generation], f"freed a page with {self.pins[generation]} pins: {page}"
        if generation not in self.landed:
            assert bool(row["was_ready"]) == (page.stage is Stage.READY), f"was_ready is wrong for {page}"
        if row["was_ready"]:
            assert page.content == (int(row["namespace"]), row["hash"].tobytes()), "freed under another name"
        self.places.pop(place, None)
        del self.slots[page.tier, page.segment, page.slot]
        self._unhold(page)

    def _check_demoted(self, row: StructArray) -> None:
        """Checks that a farther tier holds each demoted block."""
        key, tier = (int(row["namespace"]), row["hash"].tobytes()), int(row["extent"]["tier"])
        assert any(other > tier for other in self.held.get(key, {})), (
            f"demoted from tier {tier}, but held nowhere farther"
        )

    def end_session(self, session: int, into: int) -> None:
        """Gives the session's segments to the daemon, or them and its mappings to session into."""
        del self.sessions[session]
        self.writers = {s: into if writer == session else writer for s, writer in self.writers.items()}
        for mapped in self.descriptors.values():
            if into and session in mapped:
                mapped[into] = mapped.get(into, False) or mapped[session]

    def _begin(self, new: SegmentAssignment) -> None:
        spec = self.tiers[new.tier]
        assert new.segment not in self.used_segments, f"segment id {new.segment} used twice"
        assert new.slot < spec.capacity_bytes // spec.segment_bytes
        assert 0 < new.pages * new.class_bytes <= spec.segment_bytes
        old = self.segments.get((new.tier, new.slot))
        assert new.replaces == (old.segment if old else None)
        if old:
            live = [p for p in self.pages.values() if p.tier == new.tier and p.segment == old.segment]
            assert not live, f"segment {old.segment} was replaced while it holds {live}"
            self._check_fresh(old.segment, new)
        if new.fresh:
            self.lent.discard((new.tier, new.slot))
        assert new.writer != SEALED or (new.tier, new.slot) not in self.lent, "sealed blocks in a file that was lent"
        self.used_segments.add(new.segment)
        self.segments[new.tier, new.slot] = new
        self.writers[new.segment] = new.writer

    def lend(self, tier: int, segment: int) -> None:
        """A session may write to the segment's file while a process has its descriptor."""
        self.lent |= {at for at, its in self.segments.items() if at[0] == tier and its.segment == segment}

    def check_sealed(self, generation: int) -> None:
        """Checks that no session can write to the page."""
        page = self.pages[generation]
        places = [at for at, its in self.segments.items() if at[0] == page.tier and its.segment == page.segment]
        assert self.writers[page.segment] == SEALED
        assert self.lent.isdisjoint(places)

    def _check_fresh(self, old: int, new: SegmentAssignment) -> None:
        mapped = {s: w for s, w in self.descriptors.pop(old, {}).items() if s in self.sessions}
        danger = any(self.sessions[s] != new.domain or (w and s != new.writer) for s, w in mapped.items())
        assert new.fresh or not danger, f"segment {old} is reused by {new} while {mapped} map it"
        if not new.fresh:
            self.descriptors[new.segment] = mapped

    def _reserve(self, extent: StructArray) -> None:
        tier, page, segment, slot = (int(extent[name]) for name in ("tier", "page", "segment", "slot"))
        generation = int(extent["generation"])
        assert generation not in self.used_generations, f"generation {generation} used twice"
        assert (tier, page) not in self.places, f"page {page} of tier {tier} handed to two holders"
        assert (tier, segment, slot) not in self.slots, "two pages in one slot"
        assignment = next(a for (t, _), a in self.segments.items() if t == tier and a.segment == segment)
        assert slot < assignment.pages
        assert int(extent["offset"]) == slot * assignment.class_bytes
        overhead = self.tiers[tier].slot_overhead_bytes
        assert int(extent["length"]) + overhead <= assignment.class_bytes, "a page is shorter than its block"
        self.used_generations.add(generation)
        self.pages[generation] = Page(tier, page, segment, slot, generation)
        self.places[tier, page] = generation
        self.slots[tier, segment, slot] = generation

    def _fly(self, row: StructArray) -> None:
        flight_id, after = int(row["id"]), int(row["after"])
        assert flight_id not in self.used_flights, "transfer id used twice"
        source, target = int(row["source"]["generation"]), int(row["target"]["generation"])
        assert source in self.pages, "a transfer reads a free page"
        assert target in self.pages, "a transfer writes a free page"
        page = self.pages[target]
        self._check_way(self.pages[source].tier, page.tier)
        assert page.stage is Stage.WRITING, "a transfer writes a page that is in use"
        page.stage = Stage.FILLING
        if after:
            assert after in self.flights, "a transfer follows one that is not in flight"
            assert self.flights[after].target == source
            key = self.flights[after].key
        else:
            assert self.pages[source].stage is Stage.READY, "a transfer reads a page that is not ready"
            assert self.pages[source].content is not None
            key = self.pages[source].content
            self.pins[source] += 1
        assert key[0] not in self.forgotten, "a transfer of what is forgotten"
        others = [self.pages[f.target] for f in self.flights.values() if f.key == key]
        # A condemned target, whose block was committed anew, gets published to no lookup.
        assert not any(p.tier == page.tier and not p.condemned for p in others), "two flights of one block to one tier"
        self.pins[target] += 1
        self.used_flights.add(flight_id)
        self.flights[flight_id] = Flight(flight_id, after, source, target, key, started=not after)

    def _check_way(self, source: int, target: int) -> None:
        """Checks that a transfer between device and store uses a host page or a direct read."""
        kinds = self.tiers[source].kind, self.tiers[target].kind
        has_host = any(spec.kind is TierKind.HOST and self.serving.get(t, True) for t, spec in enumerate(self.tiers))
        if has_host and kinds == (TierKind.NVME, TierKind.DEVICE):
            assert source in self.direct.get(target, ()), "a store is read into a device that it has no direct way to"
        assert not has_host or kinds != (TierKind.DEVICE, TierKind.NVME), "a device is written to a store directly"

    # -- events outside the core

    def land(self, flight_id: int, status: int) -> None:
        """A transfer has ended (before the plan of `finish` is applied)."""
        flight = self.flights.pop(flight_id)
        self.pins[flight.target] -= 1
        if flight.started:
            self.pins[flight.source] -= 1
        if status is BlockStatus.CORRUPT:
            self.condemn(flight.source)
        if status is BlockStatus.READY:
            assert flight.started, "the test let a transfer succeed before the one that it follows"
            self.publish(flight.target, self.pages[flight.source].content)
            for follower in self.flights.values():
                if follower.after == flight_id:
                    follower.started = True
                    self.pins[follower.source] += 1

    def publish(self, generation: int, key: Key | None) -> None:
        """The page is ready and holds the key, unless it is condemned or its namespace
        forgotten."""
        assert key is not None
        page = self.pages[generation]
        page.content = key
        if key[0] in self.forgotten or page.condemned:
            return
        page.stage = Stage.READY
        self.landed.add(generation)
        tiers = self.held.setdefault(key, {})
        assert page.tier not in tiers, f"two pages of one block in tier {page.tier}"
        tiers[page.tier] = generation

    def supersede(self, key: Key, tier: int, *, same: bool) -> None:
        """Recommits a name that no client can read: condemns its page there; all, if bytes
        differ."""
        old = {f.target for f in self.flights.values() if f.key == key} | set(self.held.get(key, {}).values())
        for page in [self.pages[generation] for generation in old]:
            if page.tier == tier or not same:
                page.condemned = True
                self._unhold(page)

    def condemn(self, generation: int) -> None:
        """The page's bytes are wrong."""
        page = self.pages.get(generation)
        if page is not None and page.stage is Stage.READY:
            page.condemned = True
            self._unhold(page)

    def lose(self, generation: int) -> None:
        """The bytes written to the page, or in flight to it, are lost."""
        page = self.pages[generation]
        page.condemned = True
        self._unhold(page)

    def forget(self, namespaces: set[int]) -> None:
        """No block of these namespaces may be found any more."""
        self.forgotten |= namespaces
        self.ending |= namespaces
        for key in [k for k in self.held if k[0] in namespaces]:
            del self.held[key]

    def _unhold(self, page: Page) -> None:
        if page.content is not None:
            tiers = self.held.get(page.content, {})
            if tiers.get(page.tier) == page.generation:
                del tiers[page.tier]

    # -- a new daemon

    def restart(self, kept: set[int], sessions: dict[int, int]) -> None:
        """Drops flights, pins and unnamed pages but for live sessions' pages; tiers serve."""
        ready = {g for tiers in self.held.values() for g in tiers.values()}
        self.pages = {g: page for g, page in self.pages.items() if g in ready | kept}
        for generation in self.pages.keys() - ready:
            self.pages[generation].stage = Stage.WRITING  # of no block: no plan reports its end
        self.segments = {
            at: replace(a, writer=self.writers[a.segment] if self.writers[a.segment] in {SEALED, *sessions} else 0)
            for at, a in self.segments.items()
        }
        self.writers = {a.segment: a.writer for a in self.segments.values()}
        self.places = {}
        for page in self.pages.values():
            page.page = UNKNOWN
        self.slots = {(page.tier, page.segment, page.slot): g for g, page in self.pages.items()}
        self.flights, self.pins, self.used_flights = {}, Counter(), set()
        self.ending.clear()
        self.serving, self.sessions = {}, dict(sessions)

    def move(self, extent: StructArray) -> None:
        """The new core gives a page another number."""
        page = self.pages[int(extent["generation"])]
        assert (page.segment, page.slot) == (int(extent["segment"]), int(extent["slot"]))
        page.page = int(extent["page"])
        self.places[page.tier, page.page] = page.generation

    def extents(self, generations: list[int]) -> StructArray:
        """EXTENT of pages, with the fields that a session table has."""
        out: StructArray = np.zeros(len(generations), EXTENT)
        for row, generation in zip(out, generations, strict=True):
            page = self.pages[generation]
            row["tier"], row["segment"], row["slot"] = page.tier, page.segment, page.slot
            row["generation"], row["length"] = generation, 1
        return out

    # -- questions

    def nearest(self, key: Key) -> int:
        """The nearest serving tier that holds the key, or -1."""
        tiers = self.held.get(key, {})
        return min((t for t in tiers if self.serving.get(t, True)), default=-1)

    def check_holds(self, extent: StructArray, key: Key) -> int:
        """Checks that the extent is a live page with this key's bytes. Returns its generation."""
        generation = int(extent["generation"])
        page = self.pages.get(generation)
        assert page is not None, f"a handle to a free page: {extent}"
        assert (page.tier, page.page, page.segment, page.slot) == tuple(
            int(extent[n]) for n in ("tier", "page", "segment", "slot")
        )
        assert page.stage is Stage.READY, f"a handle to {page}"
        assert page.content == key, f"a handle to the wrong bytes: {page} instead of {key}"
        return generation
