"""Copies between device and host memory: what adjoins in one piece, batches in one call, one lane for each direction.

Purpose: `Copies`. Non-purpose: which bytes, and whether they may be touched. Invariants: a call returns when the last byte is there, which an event of its lane has
told; there is no order between the pieces of a call.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.gpu.device import Device, Lane
from tierd.gpu.regions import Addresses


class Runs(NamedTuple):
    """Where to, where from and how many bytes: u8[n] each, no length of 0."""

    targets: Addresses
    sources: Addresses
    lengths: NDArray[np.uint64]


class Way(enum.Enum):
    """How a call's runs are copied. Small ones may have another one day: a kernel that gathers them."""

    BATCH = "cuMemcpyBatchAsync"
    SINGLY = "cuMemcpyAsync"


def way_of(runs: Runs, *, has_batches: bool, is_direct: bool) -> Way:
    """The one place that chooses. Memory that is not registered goes by the calls whose way with it is written down."""
    return Way.BATCH if has_batches and is_direct and len(runs.lengths) > 1 else Way.SINGLY


def coalesced(runs: Runs, owners: NDArray[np.uint64]) -> Runs:
    """The same bytes in fewer runs, by address: those of one owner that follow each other on both sides are one. owners: u8[n], what a copy may not span two of."""
    kept = np.flatnonzero(runs.lengths)
    order = kept[np.argsort(runs.targets[kept], kind="stable")]
    targets, sources, lengths, owners = (column[order] for column in (*runs, owners))
    joins = owners[1:] == owners[:-1]
    for begins in (targets, sources):
        joins &= begins[1:] == begins[:-1] + lengths[:-1]
    starts = np.flatnonzero(np.concatenate(([True], ~joins))) if len(order) else order
    return Runs(targets[starts], sources[starts], np.add.reduceat(lengths, starts) if len(starts) else lengths)


class Copies:
    """Of one GPU. Threads may share it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lanes = {True: Lane(device), False: Lane(device)}
        cuda = device.cuda
        self._attributes = cuda.CUmemcpyAttributes()
        # Host memory is quiet and might be read at any time; device memory may be waiting for earlier work of this lane, and one rule for both is one less to mistake.
        self._attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes.flags = cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

    def run(self, runs: Runs, *, to_device: bool, is_direct: bool) -> None:
        """Copies all of them. is_direct: the host's memory is registered. Raises TierFailed."""
        if not len(runs.lengths):
            return
        way = way_of(runs, has_batches=self._device.has_batches, is_direct=is_direct)
        put = self._batch if way is Way.BATCH else self._singly
        with self._lanes[to_device].turn() as stream:
            put(runs, stream)

    def close(self) -> None:
        """Gives the streams back."""
        for lane in self._lanes.values():
            lane.close()

    def _batch(self, runs: Runs, stream: Any) -> None:
        cuda = self._device.cuda
        targets, sources = ([cuda.CUdeviceptr(place) for place in column.tolist()] for column in runs[:2])
        count, lengths = len(targets), runs.lengths.tolist()
        self._device.call(cuda.cuMemcpyBatchAsync, targets, sources, lengths, count, [self._attributes], [0], 1, stream)

    def _singly(self, runs: Runs, stream: Any) -> None:
        for target, source, length in zip(*(column.tolist() for column in runs), strict=True):
            self._device.call(self._device.cuda.cuMemcpyAsync, target, source, length, stream)
