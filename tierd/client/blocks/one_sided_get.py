"""Gets without a call: near blocks are found in the directory, copied, summed and checked again.

    directory: a hint ──▶ catalogue: name, length, generation, sums ──▶ summed and copied ──▶
    generations again ──▶ served; a notice tells the daemon

It serves gets and lookups of near blocks, and checks the sums of every copied page. For all other
blocks asking.py calls the daemon. A served block has its sums, and its page had the same generation
before and after the copy. Even a corrupt directory or catalogue causes no reads outside the
mappings, and a get looks at each only once. Only the daemon writes them; it changes a
page's generation before it reuses the page. Such reads are FaRM's (Dragojevic et al., NSDI 2014,
section 4). The loops are C++ (tierd/native) or Python, with the same results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.client.blocks import buffers, copying
from tierd.client.blocks.buffers import address_of
from tierd.client.session.mapping import MappedSegment, SegmentTable
from tierd.client.session.notices import REPORT_MAX_BYTES
from tierd.client.session.session import Session
from tierd.client.transport.requests import checked_hashes, group_message
from tierd.client.values import Found, GetResult, Group
from tierd.core.formats.directory import SEGMENT_BITS, Directory
from tierd.core.formats.layout import GENERATION, WORD_BYTES
from tierd.core.formats.model import HASH_BYTES, Need, StructArray
from tierd.core.formats.words import barrier
from tierd.errors import InvalidArgument, TierdError
from tierd.native import find_library

PAGE = np.dtype(
    [
        ("source", "<u8"),
        ("length", "<u8"),
        ("layers", "<u8"),
        ("generation", "<u8"),
        ("table", "<u8"),
        ("word", "<u8"),
        ("segment", "<u4"),
        ("slot", "<u4"),
    ]
)
"""A published page, from its entry. Its bytes (source), slice table (0: none) and generation word
are addresses in this process. Its segment is a number in the table of segments."""
NAMES = np.dtype(
    [("hashes", "<u8"), ("count", "<u8"), ("namespace", "<u4"), ("tokens", "<u4"), ("last", "<u4"), ("pad", "<u4")]
)
"""Blocks to find: the address of their hashes, the tokens of each, and of the last one."""
NOWHERE = (1 << 64) - 1
PLAIN_BLOCKS = 128
"""The Python loops find at most this many blocks; the daemon is faster for more."""
_library = find_library()


class Pages:
    """Pages in block order. rows: PAGE [n]; table: their segments, which keep the addresses valid."""

    def __init__(self, rows: StructArray, table: SegmentTable) -> None:
        self.rows, self.table = rows, table
        self.lengths: list[int] = rows["length"].tolist()

    def copy_to(self, out: Any, *, is_leased: bool = False) -> NDArray[np.bool_]:
        """Copies the pages; which have the right sums and have not changed. out: as for `Client.get`.
        None: only sums them. is_leased: also pages that lookups no longer find. Raises
        InvalidArgument, Cancelled."""
        rows = self.rows
        blocks = copying.blocks_of(rows["source"], np.zeros(len(rows), np.uint64), self.lengths, rows["layers"])
        if buffers.are_in_pieces(out):
            blocks = copying.in_pieces(blocks, buffers.of_blocks(out, len(rows)))
        elif out is not None:
            targets = buffers.pieces(out, self.lengths, writable=True)
            blocks["target"] = [address_of(target, writable=True) for target in targets]
        sums = copying.sum_and_copy(blocks)
        mask = int(GENERATION) if is_leased else NOWHERE
        good = np.zeros(len(rows), np.bool_)
        if _library is None:
            plain_check(rows, sums, mask, good)
        else:
            _library.tierd_check(address_of(rows), len(rows), address_of(sums), mask, address_of(good))
        return good


def get(session: Session, group: Group, out: Any, *, timeout_s: float) -> tuple[GetResult, list[int]] | None:
    """Copies all blocks of a group; returns their lengths too. None: call the daemon. Raises Cancelled."""
    if not session.notices.takes_gets:
        return None
    found = find(session, group, timeout_s=timeout_s)
    return None if found is None else served(session, group, out, *found)


def served(
    session: Session, group: Group, out: Any, pages: Pages, tier_tokens: list[int]
) -> tuple[GetResult, list[int]] | None:
    """The second half of `get`: copies what was found, and tells the daemon."""
    report = group_message(group).SerializeToString()
    try:
        if len(report) > REPORT_MAX_BYTES or not pages.copy_to(out).all():
            return None
    except InvalidArgument:  # the daemon's answer may be shorter, and fit
        return None
    if not session.notices.report_hit(report):
        return None
    return GetResult(sum(tier_tokens), len(pages.rows), (), tuple(tier_tokens)), pages.lengths


def find(session: Session, group: Group, *, timeout_s: float) -> tuple[Pages, list[int]] | None:
    """Near blocks of a group, and tokens by tier; None: some are not near. Maps segments."""
    count, namespace, directory = len(group.hashes), group.namespace, session.directory
    if not _is_plain(group) or directory is None or (_library is None and count > PLAIN_BLOCKS):
        return None
    if not directory.runs(namespace.id):
        return None
    hashes, size = checked_hashes(group.hashes), namespace.spec.tokens_per_block
    last = namespace.tokens_in(count, tokens=group.tokens) - (count - 1) * size
    names = np.array([(address_of(hashes), count, namespace.id, size, last, 0)], NAMES)
    for _ in range(count + 1):  # once more for each segment that was not mapped
        table = session.segments.table()
        rows, unmapped = _located(directory, table, names, count)
        if unmapped == NOWHERE or _segment(session, unmapped, timeout_s) is None:
            break
    if len(rows) < count:
        return None
    tier_tokens = [0] * len(session.tiers)
    segments = rows["segment"].tolist()
    for number in set(segments):
        its = segments.count(number)
        tier_tokens[table.segments[number].tier] += its * size
    tier_tokens[table.segments[segments[-1]].tier] += last - size
    return Pages(rows, table), tier_tokens


def _located(directory: Directory, table: SegmentTable, names: StructArray, count: int) -> tuple[StructArray, int]:
    """PAGE of leading near blocks of NAMES [1]; place of an unmapped next segment, or NOWHERE."""
    if _library is None:
        return plain_find(directory, table, names)
    rows, unmapped = np.empty(count, PAGE), ctypes.c_uint64()
    found = _library.tierd_find(
        directory.address,
        directory.buckets,
        table.address,
        len(table.segments),
        address_of(names),
        address_of(rows),
        ctypes.addressof(unmapped),
    )
    return rows[:found], unmapped.value


def plain_find(directory: Directory, table: SegmentTable, names: StructArray) -> tuple[StructArray, int]:
    """`tierd_find` (tierd/native/plane.cpp) in Python."""
    at, count, namespace, size, last, _ = names[0].item()
    hashes, rows, unmapped = ctypes.string_at(at, count * HASH_BYTES), list[tuple[int, ...]](), NOWHERE
    for i in range(count):
        name = hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
        hint = directory.place(namespace, name)
        if hint is None:
            break
        (place, slot), tokens = hint, size if i < count - 1 else last
        number = table.find(place)
        if number is None:
            unmapped = place
            break
        segment = table.segments[number]
        entry = segment.entry(slot)
        if entry is None or (entry.namespace, entry.tokens, entry.hash) != (namespace, tokens, name):
            break
        if entry.error or not 0 < entry.length <= segment.class_bytes:  # then its slices fit the table
            break
        if segment.generation(slot) != entry.generation:
            break
        rows.append((*_page(segment, slot, entry.length, entry.layers, entry.generation), number, slot))
    return np.array(rows, PAGE), unmapped


def plain_check(rows: StructArray, sums: copying.Sums, mask: int, good: NDArray[np.bool_]) -> None:
    """`tierd_check` (tierd/native/plane.cpp) in Python."""
    raw, at = sums.tobytes(), 0
    barrier()
    for i, (_, length, layers, generation, table, word, *_) in enumerate(rows.tolist()):
        end = at + WORD_BYTES * copying.slices_of(length, layers)
        is_its = bool(table) and ctypes.string_at(table, end - at) == raw[at:end]
        good[i] = is_its and ctypes.c_uint64.from_address(word).value & mask == generation
        at = end


def _page(segment: MappedSegment, slot: int, length: int, layers: int, generation: int) -> tuple[int, ...]:
    """PAGE, without the segment's number."""
    _, data, words, _, tables, class_bytes, _, slice_words = segment.row
    table, word = tables + slot * slice_words * WORD_BYTES, words + slot * WORD_BYTES
    return data + slot * class_bytes, length, layers, generation, table, word


def pages_of(session: Session, handles: StructArray, layers: Sequence[int] | None = None) -> Pages | None:
    """Held pages of HANDLE [n]; None: one is not in mapped host memory. A page without its own
    entry gets no sums, so its copy is not good. layers: of each block, for such pages. None: all
    are opaque."""
    table, rows = session.segments.table(), list[tuple[int, ...]]()
    columns = (handles[name].tolist() for name in ("tier", "segment", "slot", "generation", "length"))
    for *place, generation, length, of_block in zip(*columns, layers or [0] * len(handles), strict=True):
        tier, number, slot = place
        at = table.find(tier << SEGMENT_BITS | number)
        if at is None:
            return None
        segment = table.segments[at]
        entry = segment.entry(slot)
        is_its = entry is not None and (entry.generation, entry.length) == (generation, length)
        cut = entry.layers if entry is not None and is_its else of_block
        *page, sums, word = _page(segment, slot, length, cut, generation)
        rows.append((*page, sums if is_its else 0, word, at, slot))
    return Pages(np.array(rows, PAGE), table)


def lookup(session: Session, group: Group, *, timeout_s: float) -> Found | None:
    """Looks up a group whose blocks are all near; None: call the daemon."""
    found = find(session, group, timeout_s=timeout_s) if session.notices.takes_gets else None
    if found is None:
        return None
    if not session.notices.report_hit(group_message(group).SerializeToString(), is_lookup=True):
        return None
    pages, tier_tokens = found
    tiers = np.array([segment.tier for segment in pages.table.segments], np.int8)
    return Found(sum(tier_tokens), (tiers[pages.rows["segment"]][None],), tuple(tier_tokens))


def _is_plain(group: Group) -> bool:
    """Whether it can be served without a call: a prefix, of rank 0 only."""
    return bool(len(group.hashes)) and group.need is Need.PREFIX and tuple(group.ranks) == (0,)


def _segment(session: Session, place: int, timeout_s: float) -> MappedSegment | None:
    """A segment of host memory, mapped now if needed."""
    where = place >> SEGMENT_BITS, place & (1 << SEGMENT_BITS) - 1
    segment = session.segments.at(where)
    if segment is None:
        try:
            segment = session.mapped(where, timeout_s=timeout_s)
        except TierdError:
            return None
    return segment if isinstance(segment, MappedSegment) and segment.tier < len(session.tiers) else None
