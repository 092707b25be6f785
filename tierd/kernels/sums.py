"""Checksums of slices of blocks by cuda/src/hash.cu: the xxh3-64 of `tierd.checksum` on the host.

It cuts pages into slices, checks arguments and launches. Callers compute the digest over a block's
sums and compare. Nothing is allocated or read back. An empty slice is not read; of others only the
granules of 16 bytes that they touch. The device must have mapped the memory that the arrays name:
the caller's duty.
XXH3 is by Yann Collet: "xxHash fast digest algorithm", doc/xxhash_spec.md of
github.com/Cyan4973/xxHash; here with its default secret and seed 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.block import slice_lengths
from tierd.kernels import params
from tierd.kernels.buffers import Array, Buffer
from tierd.kernels.library import Library

KERNEL = "slice_sums"
SHAPES_KEPT = 64
"""Page shapes whose cuts are remembered: nearly all pages of a daemon are alike."""


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of pages, page by page. addresses: u64 [slices]; lengths: u32 [slices], bytes;
    ends: i64 [pages], each page's end."""

    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    ends: NDArray[np.int64]

    def tables(self, sums: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
        """Each page's part of sums, u64 [slices]: its slice table."""
        return [sums[first:end] for first, end in pairwise([0, *self.ends.tolist()])]


def cut_pages(addresses: Iterable[int], lengths: Iterable[int], layers: Iterable[int]) -> Slices:
    """Slices of pages as `tierd.core.formats.block.slice_lengths` cuts the blocks in them. lengths:
    bytes of each block; layers: of each, 0 for an opaque one."""
    cuts = [_cut(int(length), int(count)) for length, count in zip(lengths, layers, strict=True)]
    starts = [np.uint64(address) + offsets for address, (offsets, _) in zip(addresses, cuts, strict=True)]
    return Slices(
        np.concatenate([np.empty(0, np.uint64), *starts]),
        np.concatenate([np.empty(0, np.uint32), *(each for _, each in cuts)]),
        np.cumsum([len(each) for _, each in cuts], dtype=np.int64),
    )


def slice_sums(library: Library, addresses: Array, lengths: Array, out: Array) -> Array:
    """Fills `out`, u64 [slices], with the xxh3-64 of each slice. Raises InvalidArgument. addresses:
    u64 [slices], of any alignment; multiples of 16 are the fastest. lengths: u32, bytes."""
    places = Buffer.of("addresses", addresses).checked((None,), "u64", device=library.device, dense_from=0)
    sums = params.Sums(
        places.address,
        Buffer.of("lengths", lengths).checked(places.shape, "u32", device=library.device, dense_from=0).address,
        Buffer.of("out", out).checked(places.shape, "u64", device=library.device, dense_from=0).address,
    )
    library.launch(KERNEL, (places.shape[0], 1, 1), sums)
    return out


@lru_cache(SHAPES_KEPT)
def _cut(length: int, layers: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Offsets and lengths of a block's slices."""
    lengths = np.array(slice_lengths(length, layers), np.uint32)
    return np.cumsum(lengths, dtype=np.uint64) - lengths, lengths
