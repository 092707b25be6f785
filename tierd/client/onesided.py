"""Reads that ask nobody: near blocks are found in the domain's directory, copied, summed, and looked at once more.

    Directory: a hint ──▶ catalogue: name, length, generation, sums ──▶ summed and copied ──▶ generations again ──▶ served; the daemon is told by the mailbox

Purpose: gets of what lies near, and the sums of every page that is copied. Non-purpose: what is not near or not right (verbs.py asks then). Invariants: what is served has
its block's sums, and its page had one and the same generation before and after the copy; whatever stands in directory or catalogue, nothing outside the mappings is read, and a get ends
after one look at each. Only the daemon writes either, and changes a page's generation before the first byte of its reuse. Such reads are FaRM's (Dragojevic et al., NSDI 2014, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierd.client import buffers, copying
from tierd.client.buffers import Bytes
from tierd.client.mapping import Segment
from tierd.client.protocol import groups_message
from tierd.client.session import Session
from tierd.client.values import Found, GetResult, Group, checked_hashes
from tierd.core.block import slice_cut
from tierd.core.directory import SEGMENT_BITS, keys_of
from tierd.core.layout import GENERATION, WORD_BYTES
from tierd.core.meta import Entry
from tierd.core.model import HASH_BYTES, Need, StructArray
from tierd.core.sets import kinds
from tierd.core.words import barrier
from tierd.errors import InvalidArgument, TierdError


@dataclass
class Pages:
    """Published pages, in the order of their blocks. sources: their bytes and addresses; sums: their slice tables; held: segment, slot and generation of each."""

    sources: list[copying.Piece] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sums: list[bytes] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    held: list[tuple[Segment, int, int]] = field(default_factory=list)

    def take(self, segment: Segment, slot: int, entry: Entry) -> bool:
        """One more. False: it has no entry that could be its own."""
        length, cut = entry.length, slice_cut(entry.length, entry.layers)
        slices = cut.pieces * cut.layers
        if slices > segment.slice_words or not 0 < length <= segment.class_bytes:
            return False
        at, row = slot * segment.class_bytes, slot * segment.slice_words * WORD_BYTES
        self.sources.append((segment.memory[at : at + length], segment.address + at))
        self.sums.append(segment.tables[row : row + slices * WORD_BYTES].tobytes())
        self.lengths.append(length)
        self.layers.append(entry.layers)
        self.held.append((segment, slot, entry.generation))
        return True

    def take_unknown(self, segment: Segment, slot: int, *, length: int, generation: int) -> None:
        """A page that is held and has no entry of its own: whatever it holds, its copy is not good."""
        at = slot * segment.class_bytes
        self.sources.append((segment.memory[at : at + length], segment.address + at))
        self.sums.append(b"")
        self.lengths.append(length)
        self.layers.append(0)
        self.held.append((segment, slot, generation))

    def copy_to(self, targets: Sequence[Bytes], *, is_leased: bool = False) -> list[bool]:
        """Copies them; which have their sums and are still what they were. is_leased: also where nobody else finds them any more."""
        made = copying.sum_and_copy(targets, self.sources, layers=self.layers)
        barrier()
        mask = int(GENERATION) if is_leased else -1
        return [
            mine == its and segment.generation(slot) & mask == generation
            for mine, its, (segment, slot, generation) in zip(made, self.sums, self.held, strict=True)
        ]


def get(session: Session, group: Group, out: Any, *, timeout_s: float) -> tuple[GetResult, list[int]] | None:
    """The whole of a group, copied, and how long its blocks are; None: the daemon is to be asked. Raises Stopped."""
    if not session.mailbox.takes_gets:
        return None
    found = find(session, group, timeout_s=timeout_s)
    return None if found is None else served(session, group, out, *found)


def served(
    session: Session, group: Group, out: Any, pages: Pages, tier_tokens: list[int]
) -> tuple[GetResult, list[int]] | None:
    """The second half of `get`: copies what was found, and tells the daemon."""
    try:
        targets = buffers.pieces(out, pages.lengths, writable=True)
    except InvalidArgument:  # the answer may be shorter, and fit
        return None
    if not all(pages.copy_to(targets)):
        return None
    if not session.mailbox.tell_used(groups_message([group])[0].SerializeToString()):
        return None
    return GetResult(sum(tier_tokens), len(targets), (), tuple(tier_tokens)), pages.lengths


def lookup(session: Session, group: Group, *, timeout_s: float) -> Found | None:
    """What could be served of a group that lies near as a whole; None: the daemon is to be asked. Entries' checksums are left to who copies."""
    count, namespace = len(group.hashes), group.namespace
    if not _is_plain(group) or session.directory is None or not session.mailbox.takes_gets:
        return None
    hashes = checked_hashes(group.hashes)
    covered = namespace.block_tokens(count, tokens=group.tokens)
    places = session.directory.find(keys_of(namespace.id, hashes))
    if not places.are_known.all():
        return None
    tier_of, tier_tokens = np.zeros((1, count), np.int8), [0] * len(session.tiers)
    for place in kinds(places.segments):
        rows, segment = np.flatnonzero(places.segments == place), _segment(session, place, timeout_s)
        if segment is None or not segment.hold(places.slots[rows], namespace.id, hashes[rows], covered[rows]):
            return None
        tier_of[0, rows] = segment.tier
        tier_tokens[segment.tier] += int(covered[rows].sum())
    if not session.mailbox.tell_used(groups_message([group])[0].SerializeToString(), is_lookup=True):
        return None
    return Found(sum(tier_tokens), (tier_of,), tuple(tier_tokens))


def _is_plain(group: Group) -> bool:
    """Whether it is of one that answers without a call: a prefix, of rank 0 alone."""
    return bool(len(group.hashes)) and group.need is Need.PREFIX and tuple(group.ranks) == (0,)


def find(session: Session, group: Group, *, timeout_s: float) -> tuple[Pages, list[int]] | None:
    """Where all of a group's blocks lie near, as the catalogues say, and tokens by tier; None: not all do. Maps segments that are not."""
    count, namespace = len(group.hashes), group.namespace
    if not _is_plain(group) or session.directory is None:
        return None
    hashes = np.ascontiguousarray(group.hashes).tobytes()
    places = session.directory.places(namespace.id, hashes)
    if places is None:
        return None
    size = namespace.spec.tokens_per_block
    last = namespace.tokens_in(count, tokens=group.tokens) - (count - 1) * size
    pages, tier_tokens, segments = Pages(), [0] * len(session.tiers), dict[int, Segment | None]()
    for i, (place, slot) in enumerate(places):
        if place not in segments:
            segments[place] = _segment(session, place, timeout_s)
        segment, tokens = segments[place], size if i < count - 1 else last
        entry = segment.entry(slot) if segment is not None else None
        if segment is None or entry is None or segment.generation(slot) != entry.generation:
            return None
        name = entry.namespace, entry.tokens, entry.hash
        if name != (namespace.id, tokens, hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]):
            return None
        if not pages.take(segment, slot, entry):
            return None
        tier_tokens[segment.tier] += tokens
    return pages, tier_tokens


def pages_of(session: Session, handles: StructArray) -> Pages | None:
    """Pages that are held, of HANDLE [n]; None: one is not in host memory that is mapped."""
    pages = Pages()
    columns = (handles[name].tolist() for name in ("tier", "segment", "slot", "generation", "length"))
    for tier, number, slot, generation, length in zip(*columns, strict=True):
        segment = session.segment((tier, number))
        if not isinstance(segment, Segment):
            return None
        entry = segment.entry(slot)
        is_its = entry is not None and (entry.generation, entry.length) == (generation, length)
        if entry is None or not is_its or not pages.take(segment, slot, entry):
            pages.take_unknown(segment, slot, length=length, generation=generation)
    return pages


def _segment(session: Session, place: int, timeout_s: float) -> Segment | None:
    """A segment of host memory, mapped now if it was not."""
    where = place >> SEGMENT_BITS, place & (1 << SEGMENT_BITS) - 1
    segment = session.segment(where)
    if segment is None:
        try:
            segment = session.mapped(where, timeout_s=timeout_s)
        except TierdError:
            return None
    return segment if isinstance(segment, Segment) and segment.tier < len(session.tiers) else None
