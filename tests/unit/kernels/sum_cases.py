"""Cases for the kernel that sums slices, with the xxhash package's sums as the expected results.

Slices are in a pool of random bytes, so a stray byte changes a sum. Empty slices, and entries
beside the given ones, point far away. Sums begin as 0xFF, and those beside must stay so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from tests.unit.kernels.kernel_cases import placed
from tierd.kernels.buffers import Buffer
from tierd.kernels.library import Library
from tierd.kernels.sums import slice_sums

Array = np.ndarray[Any, Any]
WILD, POISON = 0x7FFF_FFFF_0000, 2**64 - 1
GRANULE = 16
"""Bytes: the kernel reads places at multiples of it in another way than others."""
RAGGED = (
    *(0, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 143, 144, 239, 240),
    *(241, 255, 256, 257, 320, 321, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 4096, 4097, 5121, 8193, 9999),
)
"""Lengths around the algorithm's limits: paths, stripes of 64 bytes, blocks of 1024, blocks in flight."""


@dataclass(frozen=True)
class Spans:
    """Slices: lengths in bytes, and their offsets from a multiple of GRANULE."""

    lengths: tuple[int, ...]
    offsets: tuple[int, ...] = (0,)
    seed: int = 0

    def starts(self) -> list[int]:
        """The slices' starts in the pool, one close behind the other; offsets are used in turn."""
        starts, end = [], GRANULE
        for i, length in enumerate(self.lengths):
            starts.append(-(-end // GRANULE) * GRANULE + self.offsets[i % len(self.offsets)])
            end = starts[-1] + length
        return starts


def surrounded(inner: Any, dtype: Any, beside: int) -> Array:
    """A view of an array that has one more entry before and one behind."""
    return np.array([beside, *inner, beside], dtype)[1:-1]


def check_sums(library: Library, spans: Spans) -> None:
    """Each slice's sum is right to the bit, and no other entry is written."""
    starts = spans.starts()
    end = max((start + n for start, n in zip(starts, spans.lengths, strict=True)), default=0)
    pool = np.random.default_rng(spans.seed).integers(0, 256, end + GRANULE, np.uint8)
    lengths = surrounded(spans.lengths, np.uint32, 2**32 - 1)
    sums = surrounded([POISON] * len(starts), np.uint64, POISON)
    with placed(library) as put:
        base = Buffer.of("pool", put(pool)).address
        assert base % GRANULE == 0
        places = [base + start if n else WILD for start, n in zip(starts, spans.lengths, strict=True)]
        slice_sums(library, put(surrounded(places, np.uint64, WILD)), put(lengths), put(sums))
    for start, n, got in zip(starts, spans.lengths, sums.tolist(), strict=True):
        want = xxhash.xxh3_64_intdigest(pool[start : start + n])
        assert got == want, f"{n} bytes, {start % GRANULE} behind a multiple of {GRANULE}: {got:016x}, not {want:016x}"
    assert sums.base[[0, -1]].tolist() == [POISON] * 2, "a sum was written beside those that were asked for"


SUMS = (Spans(RAGGED), Spans(RAGGED[::2], (1, 8, 15)), Spans(RAGGED[1::2], (7, 9)), Spans(()))
"""Small ones of each kind."""
