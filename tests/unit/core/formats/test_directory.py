"""The directory returns the places of entered blocks, drops removed ones, and never points outside
itself."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.core.formats.directory import (
    ENTRY_BYTES,
    HEAD,
    MIN_BLOCKS,
    NAMESPACES,
    SLOTS,
    TABLE_OFFSET,
    Directory,
    Keys,
    directory_bytes,
    keys_of,
    places_of,
)
from tierd.core.formats.versions import DIRECTORY
from tierd.core.formats.words import Words
from tierd.testing import chain

NAMES = chain(1, 4000)


def made(blocks: int = MIN_BLOCKS) -> tuple[Directory, Words]:
    """An empty directory, and the memory of its table."""
    words = np.zeros(directory_bytes(blocks) // 8, "<u8")
    return Directory.new(words), words[TABLE_OFFSET // 8 :]


def at(count: int, *, tier: int = 0, segment: int = 3) -> Keys:
    """Places in one segment, one slot after the other."""
    slots = np.arange(count, dtype=np.uint32)
    return places_of(np.full(count, tier, np.uint16), np.full(count, segment, np.uint32), slots)


def found(directory: Directory, namespace: int, names: np.ndarray) -> list[tuple[int, int] | None]:
    """The place of each name, or None."""
    return [directory.place(namespace, name.tobytes()) for name in names]


def test_what_was_entered_is_found() -> None:
    """Each block is found at its tier, segment and slot, also at the greatest values. Others are misses."""
    directory, _ = made()
    keys = keys_of(7, NAMES[:100])
    tiers, segments = np.full(100, 255, np.uint16), np.full(100, (1 << 32) - 1, np.uint32)
    slots = np.arange((1 << 24) - 100, 1 << 24, dtype=np.uint32)
    directory.add(keys, places_of(tiers, segments, slots))
    assert found(directory, 7, NAMES[:100]) == [(255 << 32 | (1 << 32) - 1, slot) for slot in slots.tolist()]
    assert found(directory, 7, NAMES[100:200]) == found(directory, 8, NAMES[:100]) == [None] * 100


def test_the_last_place_counts() -> None:
    """A block that is entered twice has one entry, with its last place."""
    directory, words = made()
    keys = keys_of(7, NAMES[:50])
    directory.add(keys, at(50))
    directory.add(keys, at(50, tier=1, segment=9))
    assert found(directory, 7, NAMES[:50]) == [(1 << 32 | 9, slot) for slot in range(50)]
    assert np.count_nonzero(words.reshape(-1, 2)[:, 0]) == 50


def test_what_leaves_is_forgotten() -> None:
    """A removal drops the entry of that place only; an entry with another place stays."""
    directory, words = made()
    keys = keys_of(7, NAMES[:50])
    directory.add(keys, at(50))
    directory.remove(keys[:20], at(50)[:20])
    directory.remove(keys[20:], at(50, segment=4)[20:])
    assert [place is not None for place in found(directory, 7, NAMES[:50])] == [False] * 20 + [True] * 30
    directory.remove(keys, at(50))
    assert not words.reshape(-1, 2)[:, 0].any()


def test_as_many_as_it_is_made_for() -> None:
    """A directory that is filled in calls of 64 blocks returns 99 in 100 of its nominal number."""
    names, (directory, words) = chain(2, 1500), made(1500)
    for first in range(0, 1500, 64):
        directory.add(keys_of(1, names[first : first + 64]), at(1500)[first : first + 64])
    assert 1500 - found(directory, 1, names).count(None) >= 1485
    assert len(words) * 8 <= 64 * ENTRY_BYTES * 1500 // 16


def test_one_that_is_full_keeps_what_came_last() -> None:
    """With four times too many blocks no call fails, the last blocks are hits, and every hit is right."""
    directory, words = made()
    room, keys = len(words) // 2, keys_of(1, NAMES)
    names = np.concatenate([NAMES, chain(3, 4 * room - len(NAMES))]) if 4 * room > len(NAMES) else NAMES
    keys, places = keys_of(1, names), at(len(names))
    for first in range(0, len(names), 16):
        directory.add(keys[first : first + 16], places[first : first + 16])
    places = found(directory, 1, names)
    assert all(place is None or place[1] == slot for slot, place in enumerate(places))
    assert 16 - places[-16:].count(None) >= 12


@pytest.mark.parametrize("seed", range(20))
def test_whatever_its_bytes_say(seed: int) -> None:
    """On random memory every lookup ends with a place or None, and reads nothing outside the memory."""
    random = np.random.default_rng(seed)
    length = TABLE_OFFSET // 8 + int(random.integers(2 * SLOTS, 999))
    words = random.integers(0, 1 << 63, length, dtype=np.uint64)
    Directory.new(words)
    words.flags.writeable = False
    places = found(Directory(words), 1, NAMES[:500])
    assert all(place is None or 0 <= place[1] < 1 << 24 for place in places)
    assert {type(Directory(words).runs(namespace)) for namespace in (0, NAMESPACES - 1, (1 << 32) - 1)} == {bool}


def test_one_that_is_cut_short() -> None:
    """Memory too small for one bucket is refused, whatever its bytes are."""
    words = np.zeros(directory_bytes(MIN_BLOCKS) // 8, "<u8")
    Directory.new(words)
    for length in (0, 1, HEAD.itemsize // 8, TABLE_OFFSET // 8, TABLE_OFFSET // 8 + 2 * SLOTS - 1):
        with pytest.raises(ValueError, match="hold no bucket"):
            Directory(words[:length])


@pytest.mark.parametrize("what", ["magic", "older", "newer"])
def test_one_of_another_version(what: str) -> None:
    """A head with a version that this tierd does not read is refused."""
    words = np.zeros(directory_bytes(MIN_BLOCKS) // 8, "<u8")
    Directory.new(words)
    head = words.view(np.uint8)[: HEAD.itemsize].view(HEAD)
    head["magic" if what == "magic" else "version"] = {
        "magic": b"TIERDCAT",
        "older": DIRECTORY.oldest - 1,
        "newer": DIRECTORY.current + 1,
    }[what]
    with pytest.raises(ValueError, match="directory: it begins with"):
        Directory(words)


def test_only_namespaces_that_run_are_read_without_a_call() -> None:
    """`runs` is true only while the writer says so, and never for an id beyond the table."""
    directory, _ = made()
    assert not any(map(directory.runs, range(NAMESPACES)))
    directory.note_runs(range(3, 6), runs=True)
    directory.note_runs(range(NAMESPACES - 1, NAMESPACES + 2), runs=True)
    directory.note_runs(range(4, 5), runs=False)
    said = [namespace for namespace in range(NAMESPACES + 3) if directory.runs(namespace)]
    assert said == [3, 5, NAMESPACES - 1]


def test_a_hash_of_zeros_has_a_key() -> None:
    """A hash of zeros has a key that differs from that of an empty entry."""
    directory, _ = made()
    zeros = np.zeros((1, 32), np.uint8)
    assert found(directory, 0, zeros) == [None]
    directory.add(keys_of(0, zeros), at(1))
    assert found(directory, 0, zeros) == [(3, 0)]
