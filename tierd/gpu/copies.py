"""Copies between device and host memory, with one lane per direction.

Adjacent bytes are one piece; a kernel copies small pieces, the copy engines the others in batches
(`runs.ways_of` chooses). The caller decides which bytes, and whether they may be touched. A call
returns when the last byte is there. One event of its lane confirms that for all pieces. The pieces
of a call have no order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from tierd.errors import TierdError
from tierd.gpu.cutover import measured
from tierd.gpu.device import Device, Lane
from tierd.gpu.gather import Gather
from tierd.gpu.runs import Runs, Way, ways_of
from tierd.kernels.pages import RUNS_KERNEL

HOST_POINTERS = "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"
"""Attribute of a GPU that reaches registered host memory at the host's addresses."""


class Copies:
    """Copies of one GPU. Threads may share it.
    gather_bytes: the longest run that a kernel copies, to the device (True) and from it (False); 0:
    none."""

    def __init__(self, device: Device) -> None:
        """Measures when to gather. Adds a notice if it cannot. Raises Overloaded, TierFailed."""
        self._device = device
        self._lanes = {True: Lane(device), False: Lane(device)}
        cuda = device.cuda
        self._attributes = cuda.CUmemcpyAttributes()
        # Host memory could be read at any time. Device memory may wait for earlier work of this
        # lane. One rule for both is simpler.
        self._attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes.flags = cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        self._gather: Gather | None = None
        self.gather_bytes = {True: 0, False: 0}
        try:
            fault = self._begin_gather()
        except TierdError as error:
            fault = str(error)
        if fault:
            device.notices.append(
                f"{device.name}: small pages are copied by the copy engines, which are slow with them ({fault})"
            )

    def run(self, runs: Runs, *, to_device: bool, is_direct: bool) -> None:
        """Copy all runs. is_direct: the host's memory is registered. Raises TierFailed."""
        limit, has_batches = self.gather_bytes[to_device], self._device.has_batches
        ways = ways_of(runs, gather_bytes=limit, has_batches=has_batches, is_direct=is_direct)
        if ways:
            self._carry(ways, to_device=to_device)

    def seconds(self, way: Way, runs: Runs, *, to_device: bool) -> float:
        """Time to copy all runs this way. Raises TierFailed."""
        begun = time.perf_counter()
        self._carry([(way, runs)], to_device=to_device)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Release the resources of the driver."""
        for part in (*self._lanes.values(), *([self._gather] if self._gather else ())):
            part.close()

    def _begin_gather(self) -> str:
        """Prepare to gather; returns why it is impossible, or "". Raises Overloaded, TierFailed."""
        device = self._device
        fault = device.kernels.find_fault(RUNS_KERNEL)
        if not fault and not device.attribute(HOST_POINTERS):
            fault = f"{HOST_POINTERS} is 0: its kernels cannot use host addresses"
        if not fault:
            self._gather = Gather(device)
            self.gather_bytes = measured(device, self.seconds)
        return fault

    def _carry(self, ways: Sequence[tuple[Way, Runs]], *, to_device: bool) -> None:
        with ExitStack() as ends:
            # Before the turn, so it is returned after the turn, when the kernel has read it.
            puts = [self._put(way, runs, ends) for way, runs in ways]
            stream = ends.enter_context(self._lanes[to_device].turn())
            for put in puts:
                put(stream)

    def _put(self, way: Way, runs: Runs, ends: ExitStack) -> Callable[[Any], None]:
        """A function that puts runs into a stream."""
        if way is Way.GATHER:
            assert self._gather, "nothing is gathered without a kernel"
            return ends.enter_context(self._gather.prepared(runs))
        return partial(self._batch if way is Way.BATCH else self._singly, runs)

    def _batch(self, runs: Runs, stream: Any) -> None:
        cuda = self._device.cuda
        targets, sources = ([cuda.CUdeviceptr(place) for place in column.tolist()] for column in runs[:2])
        count, lengths = len(targets), runs.lengths.tolist()
        self._device.call(cuda.cuMemcpyBatchAsync, targets, sources, lengths, count, [self._attributes], [0], 1, stream)

    def _singly(self, runs: Runs, stream: Any) -> None:
        for target, source, length in zip(*(column.tolist() for column in runs), strict=True):
            self._device.call(self._device.cuda.cuMemcpyAsync, target, source, length, stream)
