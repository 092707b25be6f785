"""The pages of one tier: segments, size classes, page ids, free pages.

A tier is cut into places of segment_bytes. A place in use holds a segment of one key, (domain,
class_bytes, writer), and a run of page ids. An empty segment is vacated at once. Some wait until
their place is needed (`reclaim`), because they are mapped. Their writer lives and a block was in
them, or the daemon began them for loading or sealed puts. A tier that is loading gives up no
segment. Any other segment in use has a page that is not FREE.

A bad page is quarantined instead of freed: it holds nothing and is not allocated until the
quarantine's bound frees it. If its segment holds nothing else, the place can be reused. Unless the
next segment gets another file, its pages on the same bytes begin quarantined. Quarantines do not
outlive a restart, and take at most `quarantine_bytes`.

Page ids of one run are consecutive. Generations and segment ids only rise, up to a limit. The
lowest place, then slot is given, whatever the order of frees.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.columns import Columns
from tierd.core.arrays.sets import every, kinds, span, starts, true_rows
from tierd.core.formats.block import size_class
from tierd.core.formats.model import (
    DAEMON,
    EXTENT,
    LIFELESS,
    PAGE_ALIGN_BYTES,
    PageState,
    SegmentAssignment,
    StructArray,
    TierSpec,
)
from tierd.core.index.place_columns import PlaceColumns
from tierd.core.index.segment import Key, Quarantined, Segment, Usage
from tierd.core.index.segment_files import Files
from tierd.core.plan import Bools, Ids
from tierd.errors import ConfigError

Column = NDArray[Any]
GENERATION_LIMIT = (1 << 62) - (1 << 32)
"""Generations stay below it: tiers' marks run ahead of it and must fit their words too."""
SEGMENT_LIMIT = (1 << 31) - (1 << 20)
"""Segment ids stay below it, for the same reason."""
NEAR_PAGES = 256
"""Pages of a segment that are searched first for free ones, which are usually in a row."""
PAGE_LIMIT = (1 << 31) - 1
"""Most page ids of one tier: int32 columns hold them."""
_NAMES = PageState.names()


class Pages:
    """One tier's pages, by id; only this module writes `state`. is_loading: blocks still follow."""

    def __init__(self, spec: TierSpec, position: int) -> None:
        if not 0 < spec.segment_bytes <= spec.capacity_bytes:
            raise ConfigError(
                f"{spec.name}.segment_bytes: {spec.segment_bytes} is outside 1 to the capacity of {spec.capacity_bytes}; "
                "make the segments smaller or the tier larger"
            )
        self.spec, self.position, self.serving, self.writable, self.is_loading = spec, position, True, True, False
        self._columns = Columns(spec.capacity_bytes // PAGE_ALIGN_BYTES)
        column = self._columns.column
        self.state: Column = column(np.uint8)
        self.place: Column = column(np.int32, fill=-1)
        self.pins: Column = column(np.uint32)
        self.block: Column = column(np.int32, fill=-1)
        self.length: Column = column(np.uint32)
        self.flags: Column = column(np.uint8)
        self.error: Column = column(np.float32)
        """Error bound of the values of the page's block. has_coarse: one has ever been above 0."""
        self.has_coarse = False
        self.doom: Column = column(np.uint8)
        self.generation: Column = column(np.uint64)
        self.fault: Column = column(np.uint8)
        self.counts = [0] * len(PageState.names())
        self.bytes_in = [0] * len(PageState.names())
        self.quarantine: dict[int, Quarantined] = {}
        self.spots: dict[int, list[Quarantined]] = {}  # by place: bad bytes of its next segment
        self.quarantine_bytes = int(spec.quarantine_share * spec.capacity_bytes)
        places = spec.capacity_bytes // spec.segment_bytes
        self.segments: list[Segment | None] = [None] * places
        self.last_id: list[int | None] = [None] * places
        self.last_writer = [DAEMON] * places
        self.last_domain = [0] * places
        self.by_place = PlaceColumns(self.segments)
        self.files = Files(places, is_strict=spec.sealed_puts)
        self.vacant = set(range(places))
        self.barred, self.failing, self.closing, self.closed = (set[int]() for _ in range(4))
        """No memory for now; those that give no page, to be barred or closed (`resizing`)."""
        self.now, self.idle = 0.0, dict[int, float]()
        """Places of empty segments that wait until needed, oldest first: empty since."""
        self.holders: dict[int, dict[int, bool]] = {}
        self._open: dict[Key, set[int]] = {}
        self._runs: dict[int, list[int]] = {}
        self.place_table = np.zeros((places, 3), np.int64)
        self.retiring, self.bad = np.zeros(places, np.int64), np.zeros(places, np.int64)  # bad: quarantined

    @property
    def top(self) -> int:
        """Above every page id."""
        return self._columns.rows

    # -- pages

    def class_of(self, lengths: Column) -> Ids:
        """Page bytes of a block of each length, slot overhead included."""
        values = kinds(lengths)
        sizes = np.asarray([size_class(value) + self.spec.slot_overhead_bytes for value in values], np.int64)
        return sizes.repeat(len(lengths)) if len(sizes) == 1 else sizes[np.searchsorted(values, lengths)]

    def put_bytes(self, lengths: Column) -> Ids:
        """Bytes that a put of each length takes: its page, and with sealed puts a staging page."""
        return self.class_of(lengths) << int(self.spec.sealed_puts)

    def class_bytes(self, pages: Ids) -> Ids:
        """Bytes of each page."""
        sizes: Ids = self.place_table[self.place[pages], 2]
        return sizes

    def take(self, key: Key, count: int, generation: int) -> Ids:
        """free -> reserved: up to `count` pages of the key; generations from `generation` on."""
        taken: list[Ids] = []
        for place in sorted(self._open.get(key, set()) - self.failing):
            if count <= 0:
                break
            pages = self._take_from(place, count)
            count -= len(pages)
            taken.append(pages)
        pages = taken[0] if len(taken) == 1 else np.concatenate(taken) if taken else np.zeros(0, np.int64)
        self.generation[pages] = np.arange(generation, generation + len(pages), dtype=np.uint64)
        return pages

    def take_exactly(self, page: int, generation: int) -> None:
        """free -> reserved: this page with this generation, held by a client over a restart."""
        self._claim(int(self.place[page]), np.asarray([page], np.int64))
        self.generation[page] = generation

    def adopt(self, pages: Ids, generations: Column) -> None:
        """free -> reserved for many pages of segments that survived."""
        places = self.place[span(pages)]
        for place in kinds(places):
            self._used(place, int(np.count_nonzero(places == place)))
        self.generation[span(pages)] = generations
        self.move(pages, PageState.FREE, PageState.RESERVED)

    def give_back(self, pages: Ids) -> None:
        """Any state but free -> free; vacates segments that are empty now."""
        if len(pages) == 0:
            return
        states = self.state[pages]
        assert every(states != PageState.FREE), f"{self.spec.name}: a page that is free is given back"
        for state in kinds(states):
            self.move(pages[states == state], state, PageState.FREE)
        self._clear(pages)
        places = self.place[pages]
        order = places.argsort(kind="stable")
        begins = starts(places[order])
        lows = np.minimum.reduceat(pages[order], begins)
        ends = [*begins[1:].tolist(), len(pages)]
        for place, low, begin, end in zip(
            places[order[begins]].tolist(), lows.tolist(), begins.tolist(), ends, strict=True
        ):
            self._returned(place, low, end - begin)

    def withhold(self, pages: Ids, now: float) -> None:
        """retiring -> quarantined; above the bound, frees the pages quarantined longest."""
        starts = self.extents(pages)["offset"].astype(np.int64)
        for page, start, end in zip(
            pages.tolist(), starts.tolist(), (starts + self.class_bytes(pages)).tolist(), strict=True
        ):
            self.quarantine[page] = Quarantined(int(self.fault[page]), now, start, end)
        self.move(pages, PageState.RETIRING, PageState.QUARANTINED)
        self._clear(pages)
        while self.quarantined_bytes > self.quarantine_bytes:
            self._acquit([min(self.quarantine, key=lambda page: self.quarantine[page].since)])

    def reclaim(self, *, idle_s: float) -> bool:
        """Vacates a segment idle for idle_s, or empty but for bad pages (half at most), if any."""
        if self.idle and next(iter(self.idle.values())) <= self.now - idle_s:
            self._vacate(next(iter(self.idle)))
            return True
        for place, segment in enumerate(self.segments):
            bad = int(self.bad[place])
            if segment is not None and bad and segment.spare + bad == segment.pages and not self.is_mostly_bad(place):
                pages = [page for page in self.quarantine if self.place[page] == place]
                self.spots[place] = [self.quarantine[page] for page in pages]
                self._acquit(pages)
                self.vacate_idle(place)
                return True
        return False

    def vacate_idle(self, place: int) -> None:
        """Vacates a place if it is idle."""
        if place in self.idle:
            self._vacate(place)

    def is_mostly_bad(self, place: int) -> bool:
        """Whether more than half of a segment in use is quarantined."""
        segment = self.segments[place]
        assert segment is not None
        return 2 * int(self.bad[place]) > segment.pages

    def is_sealed(self, pages: Ids) -> NDArray[np.bool_]:
        """Which pages no client could ever write to, or whose one writer's process has ended."""
        return self.by_place.sealed[self.place[pages]]

    def move(self, pages: Ids, old: int, new: int) -> None:
        """Counts a change of state; index.py has the transitions."""
        if len(pages) == 0:
            return
        at = span(pages)
        assert every(self.state[at] == old), f"{self.spec.name}: a page to become {_NAMES[new]} is not {_NAMES[old]}"
        self.state[at] = new
        size = int(self.place_table[self.place[at], 2].sum())
        self.counts[old] -= len(pages)
        self.counts[new] += len(pages)
        self.bytes_in[old] -= size
        self.bytes_in[new] += size
        if new == PageState.READY:
            self.prove(pages)
        for state, step in ((old, -1), (new, 1)):
            if state >= PageState.RETIRING:
                np.add.at(self.retiring if state == PageState.RETIRING else self.bad, self.place[pages], step)

    def extents(self, pages: Ids, out: StructArray | None = None) -> StructArray:
        """EXTENT of each page; for negative pages all zero, with page -1. out: zeros to fill."""
        out = np.zeros(len(pages), EXTENT) if out is None else out
        out["tier"] = self.position
        is_there = pages >= 0
        if not every(is_there):
            out["page"] = -1
            pages = pages[is_there]
        at = true_rows(is_there) if len(pages) < len(out) else slice(None)
        rows = self.place_table.take(self.place.take(pages), axis=0)
        slots = pages - rows[:, 1]
        out["segment"][at], out["slot"][at], out["offset"][at] = rows[:, 0], slots, slots * rows[:, 2]
        out["flags"][at], out["length"][at] = self.flags.take(pages), self.length.take(pages)
        out["generation"][at], out["page"][at] = self.generation.take(pages), pages
        return out

    def find(self, extents: StructArray) -> Ids:
        """Page ids by (segment, slot); -1 if no such segment is in use or the slot is beyond it."""
        return self.by_place.find(extents)

    # -- segments

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that are not free."""
        return sum(self.bytes_in) - self.bytes_in[PageState.FREE]

    @property
    def staying_bytes(self) -> int:
        """Bytes of pages in use that are not being freed."""
        return self.bytes_in[PageState.RESERVED] + self.bytes_in[PageState.READY]

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of quarantined pages."""
        return self.bytes_in[PageState.QUARANTINED]

    def usage(self) -> dict[Key, Usage]:
        """Per key, used and possible bytes: its segments, and free places; not quarantined ones."""
        used: dict[Key, int] = {}
        whole: dict[Key, int] = {}
        counts = zip(self.segments, self.retiring.tolist(), self.bad.tolist(), strict=True)
        for place, (segment, retiring, bad) in enumerate(counts):
            if segment is not None and place not in self.idle:
                key, pages = segment.key, segment.pages - bad
                used[key] = used.get(key, 0) + (pages - segment.spare - retiring) * key.class_bytes
                whole[key] = whole.get(key, 0) + pages * key.class_bytes
        places, segment_bytes = len(self.vacant) + len(self.idle), self.spec.segment_bytes
        free = {key: places * (segment_bytes // key.class_bytes) * key.class_bytes for key in used}
        return {key: Usage(used[key], whole[key] + free[key]) for key in used}

    def has_ids(self, class_bytes: int) -> bool:
        """Whether a segment of the class can get page ids: those of an ended one, or new ones."""
        count = self.spec.segment_bytes // class_bytes
        return bool(self._runs.get(count)) or self.top + count <= PAGE_LIMIT

    def begin(self, key: Key, segment: int, domains: dict[int, int]) -> SegmentAssignment:
        """Begins a segment at a vacant place (one must exist). domains: of every live session."""
        place = min(self.vacant)
        replaces = self.last_id[place]
        held = self.holders.pop(replaces, {}) if replaces is not None else {}
        fresh = not self.files.is_fit(place, key) or any(
            domains[session] != key.domain or (writable and session != key.writer)
            for session, writable in held.items()
            if session in domains
        )
        if fresh:
            self.files.renew(place)
            if self.spec.writer_owned:
                self.spots.pop(place, None)  # another file, so other memory
        if held and not fresh:
            self.holders[segment] = held
        self._occupy(place, key, segment)
        return self.assignment(place, replaces=replaces, fresh=fresh)

    def adopt_segment(self, given: SegmentAssignment, writer: int) -> bool:
        """Puts a survived segment at its place. False if out of range, taken, or too large."""
        fits = given.class_bytes > 0 and given.pages * given.class_bytes <= self.spec.segment_bytes
        if given.slot not in self.vacant or not fits or not given.pages:
            return False
        self._occupy(given.slot, Key(given.domain, given.class_bytes, writer), given.segment, pages=given.pages)
        self.files.note_writer(given.slot, given.writer)
        return True

    def assignment(self, place: int, *, replaces: int | None = None, fresh: bool = False) -> SegmentAssignment:
        """The segment in use at a place, as a value."""
        segment = self.segments[place]
        assert segment is not None
        domain, class_bytes, writer = segment.key
        return SegmentAssignment(
            self.position, place, segment.id, domain, class_bytes, segment.pages, writer, replaces, fresh
        )

    def key_of(self, place: int) -> Key:
        """The key of a segment in use."""
        segment = self.segments[place]
        assert segment is not None
        return segment.key

    def open_places(self, key: Key) -> set[int]:
        """Places of segments of the key that have a free page."""
        return set(self._open.get(key, ()))

    def is_nobodys(self, pages: Ids) -> Bools:
        """Which pages lie in segments of NOBODY: their other holders are unknown."""
        return self.by_place.nobodys[self.place[pages]]

    def pages_of(self, place: int) -> slice:
        """The page ids of a segment in use."""
        segment = self.segments[place]
        assert segment is not None
        return slice(segment.first, segment.first + segment.pages)

    def note_attached(self, session: int, segment: int) -> None:
        """The session has a segment's descriptor (writable if its writer), the last of its
        place."""
        if segment in self.last_id:
            held = self.holders.setdefault(segment, {})
            place = self.last_id.index(segment)
            writer = self.last_writer[place]
            self.files.note(place, self.last_domain[place], writer=session if writer == session else None)
            held[session] = held.get(session, False) or writer == session

    def hand_over(self, session: int, *, to: int = DAEMON) -> None:
        """A session's process ended: its segments become the daemon's; its descriptors are closed.
        If `to` is another session of the same process and domain, it takes over both."""
        for place, segment in enumerate(self.segments):
            if segment is not None and segment.key.writer == session:
                self._close(place)
                segment.key = segment.key._replace(writer=to)
                self.by_place.note(place, self.last_writer[place])
                self._reopen(place)
                if segment.spare == segment.pages and to == DAEMON:
                    self._vacate(place)
        if to != DAEMON:
            self.last_writer = [to if writer == session else writer for writer in self.last_writer]
        for held in self.holders.values():
            is_writable = held.pop(session, None)
            if to != DAEMON and is_writable is not None:
                held[to] = held.get(to, False) or is_writable

    def close_empty(self) -> None:
        """After a restart: vacates segments without a page in use; those of living writers wait."""
        for place, segment in enumerate(self.segments):
            if segment is not None and segment.spare == segment.pages:
                self.idle[place] = self.now
                if segment.key.writer in LIFELESS:
                    self._vacate(place)

    # -- inside

    def _acquit(self, pages: list[int]) -> None:
        for page in pages:
            del self.quarantine[page]
        self.give_back(np.asarray(pages, np.int64))

    def _clear(self, pages: Ids) -> None:
        self.block[pages] = -1
        for column in (self.pins, self.length, self.flags, self.error, self.doom, self.fault):
            column[pages] = 0

    def _occupy(self, place: int, key: Key, segment: int, *, pages: int | None = None) -> None:
        count = self.spec.segment_bytes // key.class_bytes if pages is None else pages
        first = self._run(count)
        self.vacant.remove(place)
        self.last_id[place], self.last_writer[place], self.last_domain[place] = segment, key.writer, key.domain
        is_own = pages is None and key.writer == DAEMON and self.spec.writer_owned
        self.segments[place] = Segment(segment, key, first, count, count, is_own=is_own)
        self.by_place.note(place, self.last_writer[place])
        self.files.begin(place, key.domain)
        self.place_table[place] = segment, first, key.class_bytes
        self.place[first : first + count] = place
        self.counts[PageState.FREE] += count
        self.bytes_in[PageState.FREE] += count * key.class_bytes
        for found in self.spots.pop(place, ()):
            self._withhold_again(place, found)
        self._reopen(place)

    def _withhold_again(self, place: int, found: Quarantined) -> None:
        """Quarantines the new segment's pages on bad bytes; none if that would exceed the bound."""
        segment = self.segments[place]
        assert segment is not None
        size = segment.key.class_bytes
        slots = range(found.start // size, min(segment.pages, -(-found.end // size)))
        pages = [segment.first + slot for slot in slots if segment.first + slot not in self.quarantine]
        if self.quarantined_bytes + len(pages) * size <= self.quarantine_bytes:
            self.quarantine |= dict.fromkeys(pages, found)
            segment.spare -= len(pages)
            self.move(np.asarray(pages, np.int64), PageState.FREE, PageState.QUARANTINED)

    def _run(self, count: int) -> int:
        free = self._runs.get(count)
        if free:
            return heappop(free)
        first = self.top
        self._columns.lengthen(first + count)
        return first

    def _take_from(self, place: int, count: int) -> Ids:
        segment = self.segments[place]
        assert segment is not None
        begin, stop = segment.first + segment.low, segment.first + segment.pages
        near = min(stop, begin + NEAR_PAGES + count)
        pages = true_rows(self.state[begin:near] == PageState.FREE)[:count] + begin
        if len(pages) < count and near < stop:
            pages = true_rows(self.state[begin:stop] == PageState.FREE)[:count] + begin
        self._claim(place, pages)
        segment.low = int(pages[-1]) + 1 - segment.first
        return pages

    def _claim(self, place: int, pages: Ids) -> None:
        self._used(place, len(pages))
        self.move(pages, PageState.FREE, PageState.RESERVED)

    def _used(self, place: int, count: int) -> None:
        segment = self.segments[place]
        assert segment is not None and segment.spare >= count
        segment.spare -= count
        self.idle.pop(place, None)
        if segment.spare == 0:
            self._close(place)

    def _returned(self, place: int, page: int, count: int) -> None:
        segment = self.segments[place]
        assert segment is not None
        segment.spare += count
        segment.low = min(segment.low, page - segment.first)
        if segment.spare < segment.pages or self.is_loading:
            self._reopen(place)
        elif segment.stays and place not in self.failing:
            self._reopen(place)
            self.idle[place] = self.now
        else:
            self._vacate(place)

    def prove(self, pages: Ids) -> None:
        """Blocks were written to these pages."""
        for place in kinds(self.place[pages]):
            segment = self.segments[place]
            assert segment is not None
            segment.is_proven = True

    def _vacate(self, place: int) -> None:
        segment = self.segments[place]
        assert segment is not None
        self._close(place)
        self.idle.pop(place, None)
        heappush(self._runs.setdefault(segment.pages, []), segment.first)
        self.place[segment.first : segment.first + segment.pages] = -1
        self.counts[PageState.FREE] -= segment.pages
        self.bytes_in[PageState.FREE] -= segment.pages * segment.key.class_bytes
        self.segments[place] = None
        self.by_place.note(place, self.last_writer[place])
        self.place_table[place] = 0
        (self.closed if place in self.closing else self.barred if place in self.failing else self.vacant).add(place)
        for going in (self.failing, self.closing):
            going.discard(place)

    def _reopen(self, place: int) -> None:
        segment = self.segments[place]
        assert segment is not None
        if segment.spare:
            self._open.setdefault(segment.key, set()).add(place)

    def _close(self, place: int) -> None:
        key = self.key_of(place)
        places = self._open.get(key, set())
        places.discard(place)
        if not places:
            self._open.pop(key, None)
