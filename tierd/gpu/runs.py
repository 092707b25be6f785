"""Runs of bytes to be copied, and the way of each. Pure; every byte is in one run of one way."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.gpu.protocol import PIECES_MAX
from tierd.gpu.regions import Addresses

RUNS_MIN = 32
"""Fewer small runs are not gathered."""
RUNS_MAX = PIECES_MAX
"""Nor are more: the limit of one launch."""


class Runs(NamedTuple):
    """Targets, sources and lengths in bytes: u8[n] each, no length of 0."""

    targets: Addresses
    sources: Addresses
    lengths: NDArray[np.uint64]

    def part(self, chosen: NDArray[np.bool_]) -> Runs:
        """The chosen runs."""
        return Runs(*(column[chosen] for column in self))


class Way(enum.Enum):
    """The copier of runs: the kernel, or the copy engines, called for many at once or for each."""

    GATHER = "copy_runs"
    BATCH = "cuMemcpyBatchAsync"
    SINGLY = "cuMemcpyAsync"


def ways_of(runs: Runs, *, gather_bytes: int, has_batches: bool, is_direct: bool) -> list[tuple[Way, Runs]]:
    """Choose the way of each run. gather_bytes: the longest small run, measured; is_direct: the
    host's memory is registered.

    Unregistered memory uses the calls with documented behavior for it; a kernel cannot reach it.
    """
    small = (runs.lengths <= gather_bytes) & is_direct
    small &= RUNS_MIN <= np.count_nonzero(small) <= RUNS_MAX
    few, rest = runs.part(small), runs.part(~small)
    engines = Way.BATCH if has_batches and is_direct and len(rest.lengths) > 1 else Way.SINGLY
    return [(way, part) for way, part in ((Way.GATHER, few), (engines, rest)) if len(part.lengths)]


def coalesced(runs: Runs, owners: NDArray[np.uint64]) -> Runs:
    """The same bytes in fewer runs, by address. Joins runs of one owner that are adjacent on both
    sides. owners: u8[n], since a copy may not span two."""
    kept = np.flatnonzero(runs.lengths)
    order = kept[np.argsort(runs.targets[kept], kind="stable")]
    targets, sources, lengths, owners = (column[order] for column in (*runs, owners))
    joins = owners[1:] == owners[:-1]
    for begins in (targets, sources):
        joins &= begins[1:] == begins[:-1] + lengths[:-1]
    starts = np.flatnonzero(np.concatenate(([True], ~joins))) if len(order) else order
    return Runs(targets[starts], sources[starts], np.add.reduceat(lengths, starts) if len(starts) else lengths)
