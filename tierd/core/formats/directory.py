"""The directory of a trust domain: near blocks by name, for clients that do not call the daemon.

Shared memory: a head, a byte for each namespace, and a table of buckets of SLOTS entries {key u64,
place u64}, little-endian. The daemon writes it; clients map it read-only. A key mixes a block's
hash and its namespace, and has two buckets. A place is {tier u8, segment u32, slot u24}.

An entry is a hint: it may be missing, old or half written. The segment's catalogue decides. A
namespace's byte is no hint: unless it says that the epoch runs, readers ask the daemon. No access
leaves the table, whatever it holds. A full bucket costs an entry and nothing else. An insert and a
lookup read two buckets. Self-verifying reads of remote memory: Pilaf and FaRM (Mitchell et al.,
USENIX ATC 2013, section 3; Dragojevic et al., NSDI 2014, section 4). The less full of two buckets:
Azar et al., "Balanced Allocations", SIAM J. Comput. 29(1), 1999.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.versions import DIRECTORY
from tierd.core.formats.words import Words

MAGIC = b"TIERDDIR"
HEAD = np.dtype([("magic", "S8"), ("version", "<u4"), ("reserved", "u1", (52,))])
NAMESPACES = 1 << 16
"""Ids that have a byte. Clients ask the daemon about greater ids."""
TABLE_OFFSET = HEAD.itemsize + NAMESPACES
SLOTS = 4
ENTRY_BYTES = 16
FILLED = 0.75
"""Share of the entries that may be in use before buckets fill up."""
ROUNDS = 4
"""Rounds in which the blocks of one call get entries; blocks without one by then are omitted."""
MIN_BLOCKS, MAX_BLOCKS = 1 << 10, 1 << 26
SEGMENT_BITS, SLOT_BITS = 32, 24

Keys = NDArray[np.uint64]
_MIX, _SPREAD = 0x9E37_79B9_7F4A_7C15, (0xC2B2_AE3D_27D4_EB4F, 0xD6E8_FEB8_6659_FD93)
_HALF, _WORD = np.uint64(32), (1 << 64) - 1


def directory_bytes(blocks: int) -> int:
    """Length of a directory for so many blocks: a fixed part, and a power of two of buckets."""
    entries = max(MIN_BLOCKS, min(blocks, MAX_BLOCKS)) / FILLED
    return TABLE_OFFSET + (1 << (int(entries) // SLOTS).bit_length()) * SLOTS * ENTRY_BYTES


def keys_of(namespaces: NDArray[np.uint32] | int, hashes: NDArray[np.uint8]) -> Keys:
    """Keys of blocks: u64 [n], never 0. namespaces: each one's, or one for all; hashes: u8 [n,
    32]."""
    first = np.ascontiguousarray(hashes).view("<u8").reshape(-1, 4)[:, 0]
    return np.asarray((first ^ (np.asarray(namespaces, np.uint64) * np.uint64(_MIX))) | np.uint64(1))


def places_of(tiers: NDArray[np.uint16], segments: NDArray[np.uint32], slots: NDArray[np.uint32]) -> Keys:
    """Places: u64 [n]."""
    high = tiers.astype(np.uint64) << np.uint64(SEGMENT_BITS) | segments.astype(np.uint64)
    return high << np.uint64(SLOT_BITS) | slots.astype(np.uint64)


class Directory:
    """A directory over words of memory; only a power of two of buckets is used. Raises ValueError
    if it is too short, or of a version that this tierd does not read."""

    def __init__(self, words: Words) -> None:
        rest = words[TABLE_OFFSET // 8 :]
        buckets = len(rest) // (2 * SLOTS)
        if buckets < 1:
            raise ValueError(f"directory: {len(words)} words hold no bucket of {2 * SLOTS}")
        raw = words.view(np.uint8)
        head = raw[: HEAD.itemsize].view(HEAD)[0]
        if head["magic"] != MAGIC or not DIRECTORY.reads(int(head["version"])):
            raise ValueError(f"directory: it begins with {head['magic']!r}, version {head['version']}")
        self._runs = memoryview(cast("bytes", raw))[HEAD.itemsize : TABLE_OFFSET]
        buckets = 1 << (buckets.bit_length() - 1)
        table = rest[: buckets * 2 * SLOTS].reshape(buckets, SLOTS, 2)
        self._keys, self._places = table[:, :, 0], table[:, :, 1]
        self._table = memoryview(cast("bytes", table)).cast("B").cast("Q")
        self.address, self.buckets = int(table.ctypes.data), buckets
        self._mask, self._turn = np.uint64(buckets - 1), 0

    @classmethod
    def new(cls, words: Words) -> Directory:
        """An empty one, in memory of zeros. For the writer only."""
        head = words.view(np.uint8)[: HEAD.itemsize].view(HEAD)
        head["magic"], head["version"] = MAGIC, DIRECTORY.current
        return cls(words)

    def runs(self, namespace: int) -> bool:
        """Whether a get of a namespace needs no call to the daemon: its epoch runs."""
        return namespace < NAMESPACES and bool(self._runs[namespace])

    def note_runs(self, ids: range, *, runs: bool) -> None:
        """Writes whether the namespaces' epoch runs. For the writer only."""
        its = self._runs[ids.start : ids.stop]
        its[:] = bytes([runs]) * len(its)

    def place(self, namespace: int, name: bytes) -> tuple[int, int] | None:
        """Place of a block of this hash: segment with its tier above SEGMENT_BITS, and slot; None
        if it has no entry. A hint. tierd/native does the same."""
        key = (int.from_bytes(name[:8], "little") ^ (namespace * _MIX & _WORD)) | 1
        for spread in _SPREAD:
            at = ((key * spread & _WORD) >> 32 & (self.buckets - 1)) * 2 * SLOTS
            row = self._table[at : at + 2 * SLOTS].tolist()
            if key in row[::2]:
                place = row[2 * row[::2].index(key) + 1]
                return place >> SLOT_BITS, place & (1 << SLOT_BITS) - 1
        return None

    def add(self, keys: Keys, places: Keys) -> None:
        """Enters blocks. Each overwrites its old entry, or takes the emptier bucket, or replaces
        others in turn if both are full. For the writer only."""
        for _ in range(ROUNDS):
            entry = self._entry(keys)
            self._keys[entry] = 0
            self._places[entry] = places
            self._keys[entry] = keys
            lost = self._keys[entry] != keys
            if not lost.any():
                break
            keys, places = keys[lost], places[lost]  # two of a round collided

    def _entry(self, keys: Keys) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The entry for each key: buckets and slots."""
        both = self._buckets(keys)
        held = self._keys[both]
        free = held == 0
        score = (held == keys[:, None, None]) * 64 + free * (16 + free.sum(axis=2)[:, :, None])
        self._turn += 1
        score[:, self._turn % 2, self._turn // 2 % SLOTS] += 1
        at = score.reshape(len(keys), 2 * SLOTS).argmax(axis=1)
        return both[np.arange(len(keys)), at // SLOTS], at % SLOTS

    def remove(self, keys: Keys, places: Keys) -> None:
        """Removes blocks that these places no longer hold; keeps entries with another place. For
        the writer only."""
        both = self._buckets(keys)
        is_its = (self._keys[both] == keys[:, None, None]) & (self._places[both] == places[:, None, None])
        rows, bucket, at = np.nonzero(is_its)
        self._keys[both[rows, bucket], at] = 0

    def _buckets(self, keys: Keys) -> NDArray[np.intp]:
        """The two of each key: intp [n, 2]."""
        return ((keys[:, None] * np.array(_SPREAD, np.uint64) >> _HALF) & self._mask).astype(np.intp)
