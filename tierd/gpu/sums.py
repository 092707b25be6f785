"""Checksums of device memory: by a kernel if there is one, else after a copy to host memory.

The sums are slice tables of spans; `tierd.checksum` names the algorithm. Bytes are read after the
call began. Both ways give the same tables.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.checksum import slice_sums
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.model import StructArray
from tierd.gpu.copies import Copies
from tierd.gpu.device import Device, Lane
from tierd.gpu.kernel_columns import KernelColumns
from tierd.gpu.protocol import SliceTable
from tierd.gpu.regions import Addresses
from tierd.gpu.runs import Runs
from tierd.kernels.sums import KERNEL, cut_pages
from tierd.kernels.sums import slice_sums as slice_sums_on

SLICES_MAX = 1 << 16
"""Of one launch: 16 GiB of whole ones."""
SLICE_ROW = np.dtype([("address", "<u8"), ("sum", "<u8"), ("length", "<u4")])
"""A slice's parameters and result in a launch."""
STAGING_BYTES = 16 << 20
"""More than the longest slice: 4 GiB in 480 pieces."""


class Part(NamedTuple):
    """Slices that are staged together: their sources and lengths."""

    sources: Addresses
    lengths: list[int]


class StagedSums:
    """Sums of copies in registered host memory, one call at a time. kind: as in GpuFacts.hashes."""

    kind = "host"

    def __init__(self, device: Device, copies: Copies) -> None:
        self._device, self._copies = device, copies
        self._lock = threading.Lock()
        self._address = int(device.call(device.cuda.cuMemHostAlloc, STAGING_BYTES, 0))
        self._view = memoryview((ctypes.c_ubyte * STAGING_BYTES).from_address(self._address)).cast("B")

    def of(self, addresses: Addresses, pieces: StructArray) -> list[SliceTable]:
        """Of PIECE[n], whose bytes are at device addresses u8[n]. Raises TierFailed."""
        lengths = list(map(slice_lengths, pieces["length"].tolist(), pieces["layers"].tolist()))
        counts = [len(each) for each in lengths]
        with self._lock:
            sums = [self._sums_of(part) for part in parts(addresses, lengths)]
        flat = np.concatenate(sums) if sums else np.empty(0, "<u8")
        return np.split(flat, np.cumsum(counts)[:-1]) if counts else []

    def close(self) -> None:
        """Release the resources of the driver."""
        self._view.release()
        self._device.call(self._device.cuda.cuMemFreeHost, self._address)

    def _sums_of(self, part: Part) -> NDArray[np.uint64]:
        lengths = np.array(part.lengths, np.uint64)
        targets = self._address + np.cumsum(lengths) - lengths
        # A run may not span two slabs, so runs are not joined: slices are few and long.
        self._copies.run(Runs(targets, part.sources, lengths), to_device=False, is_direct=True)
        return slice_sums(self._view, part.lengths)


def parts(addresses: Addresses, lengths: Sequence[Sequence[int]]) -> Iterator[Part]:
    """All slices of all blocks in order, in parts that fit the staging memory."""
    sources, chosen, room = list[int](), list[int](), STAGING_BYTES
    for address, block in zip(addresses.tolist(), lengths, strict=True):
        for source, length in zip(accumulate(block, initial=address), block, strict=False):
            if length > room:
                yield Part(np.array(sources, np.uint64), chosen)
                sources, chosen, room = [], [], STAGING_BYTES
            sources.append(source)
            chosen.append(length)
            room -= length
    if chosen:
        yield Part(np.array(sources, np.uint64), chosen)


class KernelSums:
    """Sums by the kernel, with its columns in registered host memory. One call at a time."""

    kind = "kernel"

    def __init__(self, device: Device) -> None:
        """`device.kernels` must have it. Raises Overloaded."""
        self._device, self._lock, self._lane = device, threading.Lock(), Lane(device)
        self._arguments = KernelColumns(device, SLICE_ROW, SLICES_MAX)

    def of(self, addresses: Addresses, pieces: StructArray) -> list[SliceTable]:
        """As in StagedSums."""
        cut = cut_pages(addresses.tolist(), pieces["length"].tolist(), pieces["layers"].tolist())
        sums = np.empty(len(cut.lengths), np.uint64)
        with self._lock:
            for first in range(0, len(sums), SLICES_MAX):
                some = slice(first, first + SLICES_MAX)
                sums[some] = self._sums_of(cut.addresses[some], cut.lengths[some])
        return cut.tables(sums)

    def close(self) -> None:
        """As in StagedSums."""
        self._arguments.close()
        self._lane.close()

    def _sums_of(self, addresses: Addresses, lengths: NDArray[np.uint32]) -> NDArray[np.uint64]:
        count, columns = len(lengths), self._arguments.columns
        columns["address"][:count], columns["length"][:count] = addresses, lengths
        with self._lane.turn() as stream:
            buffers = (self._arguments.buffer(name, count) for name in ("address", "length", "sum"))
            slice_sums_on(self._device.kernels.into(stream), *buffers)
        return columns["sum"][:count]


Sums = StagedSums | KernelSums


def open_sums(device: Device, copies: Copies) -> Sums:
    """The fastest way; a notice explains if it is not the kernel. Raises Overloaded."""
    fault = device.kernels.find_fault(KERNEL)
    if not fault:
        return KernelSums(device)
    device.notices.append(
        f"{device.name}: device memory is copied to the host for its checksums, which is slow ({fault})"
    )
    return StagedSums(device, copies)
