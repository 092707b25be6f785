"""Checksums of what lies on the device: by a kernel where there is one, else by way of host memory.

Purpose: slice tables of spans of device memory. Non-purpose: the algorithm (`tierd.checksum` names it). Invariants: what is summed was read after the
call began; both ways give the same tables.
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
"""In one launch: 16 GiB of whole ones."""
TOLD = np.dtype([("address", "<u8"), ("sum", "<u8"), ("length", "<u4")])
"""What a launch is told of a slice and answers."""
STAGING_BYTES = 16 << 20
"""More than the longest slice: 4 GiB in 480 pieces."""


class Part(NamedTuple):
    """Slices that are staged together: where from, and their lengths."""

    sources: Addresses
    lengths: list[int]


class StagedSums:
    """Copies to registered host memory and sums there, one call at a time. kind: as in GpuFacts.hashes."""

    kind = "host"

    def __init__(self, device: Device, copies: Copies) -> None:
        self._device, self._copies = device, copies
        self._lock = threading.Lock()
        self._address = int(device.call(device.cuda.cuMemHostAlloc, STAGING_BYTES, 0))
        self._view = memoryview((ctypes.c_ubyte * STAGING_BYTES).from_address(self._address)).cast("B")

    def of(self, addresses: Addresses, pieces: StructArray) -> list[SliceTable]:
        """Of PIECE[n], whose bytes lie at addresses u8[n] of the device. Raises TierFailed."""
        lengths = list(map(slice_lengths, pieces["length"].tolist(), pieces["layers"].tolist()))
        counts = [len(each) for each in lengths]
        with self._lock:
            sums = [self._sums_of(part) for part in parts(addresses, lengths)]
        flat = np.concatenate(sums) if sums else np.empty(0, "<u8")
        return np.split(flat, np.cumsum(counts)[:-1]) if counts else []

    def close(self) -> None:
        """Gives back what it holds of the driver."""
        self._view.release()
        self._device.call(self._device.cuda.cuMemFreeHost, self._address)

    def _sums_of(self, part: Part) -> NDArray[np.uint64]:
        lengths = np.array(part.lengths, np.uint64)
        targets = self._address + np.cumsum(lengths) - lengths
        # A run may not span two slabs, so what does not adjoin on the device is not joined: slices are few and long.
        self._copies.run(Runs(targets, part.sources, lengths), to_device=False, is_direct=True)
        return slice_sums(self._view, part.lengths)


def parts(addresses: Addresses, lengths: Sequence[Sequence[int]]) -> Iterator[Part]:
    """All slices of all blocks in order, as many at a time as staging holds."""
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
    """By the kernel, where the bytes lie. What it is told and what it answers lie in registered host memory, which it reads and writes itself. One call at a time."""

    kind = "kernel"

    def __init__(self, device: Device) -> None:
        """`device.kernels` must have it. Raises Overloaded."""
        self._device, self._lock, self._lane = device, threading.Lock(), Lane(device)
        self._told = KernelColumns(device, TOLD, SLICES_MAX)

    def of(self, addresses: Addresses, pieces: StructArray) -> list[SliceTable]:
        """As StagedSums says."""
        cut = cut_pages(addresses.tolist(), pieces["length"].tolist(), pieces["layers"].tolist())
        sums = np.empty(len(cut.lengths), np.uint64)
        with self._lock:
            for first in range(0, len(sums), SLICES_MAX):
                some = slice(first, first + SLICES_MAX)
                sums[some] = self._sums_of(cut.addresses[some], cut.lengths[some])
        return cut.tables(sums)

    def close(self) -> None:
        """As StagedSums says."""
        self._told.close()
        self._lane.close()

    def _sums_of(self, addresses: Addresses, lengths: NDArray[np.uint32]) -> NDArray[np.uint64]:
        count, columns = len(lengths), self._told.columns
        columns["address"][:count], columns["length"][:count] = addresses, lengths
        with self._lane.turn() as stream:
            buffers = (self._told.buffer(name, count) for name in ("address", "length", "sum"))
            slice_sums_on(self._device.kernels.into(stream), *buffers)
        return columns["sum"][:count]


Sums = StagedSums | KernelSums


def open_sums(device: Device, copies: Copies) -> Sums:
    """The best way that there is; why it is not the kernel is among the device's notices. Raises Overloaded."""
    fault = device.kernels.find_fault(KERNEL)
    if not fault:
        return KernelSums(device)
    device.notices.append(
        f"{device.name}: sums of device memory are made on the host, which takes a copy of it and is slow ({fault})"
    )
    return StagedSums(device, copies)
