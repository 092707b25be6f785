"""Checksums: xxh3-64 for each slice and record, xxh3-128 over a block's slice table.

Only this module names the algorithm. The sums catch accidents, not attackers;
`tierd.core.formats.block` identifies blocks by SHA-256. On large buffers they release the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierd.errors import InvalidArgument

DIGEST_BYTES = 16

Buffer = bytes | bytearray | memoryview | NDArray[Any]
"""Types that can be summed: contiguous bytes."""


def _memory(buffer: Buffer) -> memoryview:
    return memoryview(cast(bytes, buffer))  # typing knows of numpy's buffers from Python 3.12 on


def record_checksum(data: Buffer) -> int:
    """xxh3-64 of a record, for `tierd.core.formats.meta.seal` and `intact`."""
    return xxhash.xxh3_64_intdigest(cast(bytes, data))


def slice_sums(view: Buffer, lengths: Sequence[int]) -> NDArray[np.uint64]:
    """xxh3-64 of consecutive slices of view: u64 [slices]. lengths: bytes of each slice, in order.
    Raises InvalidArgument if view is shorter than the slices together."""
    memory = _memory(view)
    total = sum(lengths)
    if memory.nbytes < total:
        raise InvalidArgument(
            f"slices: {total} bytes in all, but the page has {memory.nbytes}; correct the block's length"
        )
    if len(lengths) == 1:
        return np.array([xxhash.xxh3_64_intdigest(memory[:total])], dtype="<u8")
    ends = accumulate(lengths)
    sums = [xxhash.xxh3_64_intdigest(memory[end - n : end]) for n, end in zip(lengths, ends, strict=True)]
    return np.array(sums, dtype="<u8")


def sums_of_views(views: Sequence[memoryview], cuts: Sequence[Sequence[int]]) -> list[NDArray[np.uint64]]:
    """`slice_sums` of each; faster for views of one slice each."""
    if any(len(cut) != 1 or len(view) < cut[0] for view, cut in zip(views, cuts, strict=True)):
        return [slice_sums(view, cut) for view, cut in zip(views, cuts, strict=True)]
    sums = [xxhash.xxh3_64_intdigest(view[: cut[0]]) for view, cut in zip(views, cuts, strict=True)]
    return list(np.array(sums, dtype="<u8").reshape(-1, 1))


def raw_tables(tables: Sequence[NDArray[np.uint64]]) -> list[bytes]:
    """The bytes of each slice table, little-endian."""
    return [table.astype("<u8", copy=False).tobytes() for table in tables]


def table_digests(tables: Sequence[bytes]) -> NDArray[np.uint8]:
    """The blocks' checksums, u8 [n, 16]: xxh3-128 over each slice table, in canonical order.
    tables: bytes of little-endian u64."""
    return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, tables)), dtype=np.uint8).reshape(-1, DIGEST_BYTES)


def verify(view: Buffer, sums: NDArray[np.uint64], lengths: Sequence[int]) -> bool:
    """Whether the slices of view have exactly these sums; False if sizes do not fit."""
    if len(sums) != len(lengths) or _memory(view).nbytes < sum(lengths):
        return False
    return bool(np.array_equal(slice_sums(view, lengths), sums))
