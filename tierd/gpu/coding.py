"""Blocks that leave the GPU in rotated codes and come back from them.

To store pages, it encodes them into scratch memory and copies the payloads to the host. To load, it
copies payloads to scratch memory and decodes them into slabs. Sums are of payloads, as they left or
arrived. Nothing is allocated before the first call. The caller keeps the codec, its version and the
shape.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.model import StructArray
from tierd.errors import InvalidArgument, Unsupported
from tierd.gpu.copies import Copies
from tierd.gpu.device import Device, Lane
from tierd.gpu.kernel_columns import KernelColumns
from tierd.gpu.protocol import PIECES_MAX, CodedSums, Coding, SliceTable
from tierd.gpu.regions import Addresses, Region, Regions
from tierd.gpu.runs import Runs
from tierd.gpu.slabs import Slabs
from tierd.gpu.sums import Sums
from tierd.kernels.buffers import ALIGNMENT_BYTES, Buffer
from tierd.kernels.coded import BlockShape, decode_pages, encode_pages

VERSION = 1
"""Of the payloads that these kernels write and read."""
SCRATCH_BYTES = 32 << 20
"""For payloads of a call, unless one alone is longer."""
FOUND_BYTES = 8 * PIECES_MAX
DTYPES = {"bfloat16": "bf16", "float16": "f16"}
ROW = np.dtype([("plain", "<u8"), ("coded", "<u8"), ("found", "<u8")])
"""Addresses, and two float32 that encoding reports."""


class Coder:
    """The kernels of codecs on one GPU. One call at a time; threads may share it."""

    def __init__(self, device: Device, slabs: Slabs, hosts: Regions, *, copies: Copies, sums: Sums) -> None:
        self._device, self._slabs, self._hosts, self._copies, self._sums = device, slabs, hosts, copies, sums
        self._lock, self._ends = threading.Lock(), ExitStack()
        self._lane: Lane | None = None
        self._scratch = Region(0, 0)

    def store(self, pieces: StructArray, coding: Coding) -> CodedSums:
        """Slab to host, PIECE[n] with the blocks' own lengths. Raises InvalidArgument, Unsupported,
        Overloaded, TierFailed."""
        job = self._job(pieces, coding)
        errors = np.zeros((len(pieces), 2), np.float32)
        tables: list[SliceTable] = []
        with self._lock, self._slabs.regions.used(pieces) as slabs, self._hosts.used(job.payloads) as hosts:
            for part, scratch in self._parts(job):
                errors[part] = self._encode(job, slabs.addresses[part], scratch)
                tables += self._sums.of(scratch, job.payloads[part])
                runs = Runs(hosts.addresses[part], scratch, job.lengths[part])
                self._copies.run(runs, to_device=False, is_direct=hosts.is_direct)
        return CodedSums(tables, errors)

    def load(self, pieces: StructArray, coding: Coding) -> list[SliceTable]:
        """Host to slab, PIECE[n] with the blocks' own lengths. As `store`."""
        job = self._job(pieces, coding)
        tables: list[SliceTable] = []
        with self._lock, self._slabs.regions.used(pieces) as slabs, self._hosts.used(job.payloads) as hosts:
            for part, scratch in self._parts(job):
                runs = Runs(scratch, hosts.addresses[part], job.lengths[part])
                self._copies.run(runs, to_device=True, is_direct=hosts.is_direct)
                tables += self._sums.of(scratch, job.payloads[part])
                self._decode(job, slabs.addresses[part], scratch)
        return tables

    def close(self) -> None:
        """Release the resources of the driver, after all calls."""
        self._scratch.ending.close()
        self._ends.close()

    def _job(self, pieces: StructArray, coding: Coding) -> _Job:
        """Raises InvalidArgument, Unsupported."""
        if coding.version != VERSION or coding.dtype not in DTYPES:
            raise Unsupported(
                f"codec {coding.codec}: version {coding.version} of {coding.dtype}; kernels have "
                f"version {VERSION} of {', '.join(DTYPES)}"
            )
        sizes = (coding.layers, coding.kv_heads, coding.tokens, coding.head_dim)
        shape = BlockShape(coding.codec, *sizes, DTYPES[coding.dtype], is_hnd=coding.layout == "HND")
        size = shape.coded_bytes
        fault = self._device.kernels.find_fault(f"rotate_{shape.dtype}_{shape.head_dim}")
        if fault:
            raise Unsupported(f"codec {coding.codec}: {self._device.name} has no kernel for it ({fault})")
        for i in np.flatnonzero(pieces["length"] != shape.plain_bytes)[:1].tolist():
            raise InvalidArgument(
                f"piece {i}: {pieces['length'][i]} bytes; a block of its shape has {shape.plain_bytes}"
            )
        for i in np.flatnonzero(pieces["slab_offset"] % ALIGNMENT_BYTES)[:1].tolist():
            raise InvalidArgument(
                f"piece {i}: slab_offset {pieces['slab_offset'][i]} is no multiple of {ALIGNMENT_BYTES}, as "
                "kernels need"
            )
        payloads = pieces.copy()
        payloads["length"] = size
        return _Job(shape, payloads)

    def _parts(self, job: _Job) -> Iterator[tuple[slice, Addresses]]:
        """All pieces, as many at a time as have room, and the addresses of their payloads."""
        size = job.shape.coded_bytes
        each = max(1, SCRATCH_BYTES // size)
        self._reserve(size * min(each, len(job.payloads)))
        for first in range(0, len(job.payloads), each):
            count = min(each, len(job.payloads) - first)
            start = self._scratch.address + FOUND_BYTES
            yield slice(first, first + count), np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(size)

    def _reserve(self, payload_bytes: int) -> None:
        """Raises Overloaded."""
        if self._lane is None:
            self._lane = Lane(self._device)
            self._ends.callback(self._lane.close)
            self._arguments = KernelColumns(self._device, ROW, PIECES_MAX)
            self._ends.callback(self._arguments.close)
        if self._scratch.length_bytes < payload_bytes + FOUND_BYTES:
            self._scratch.ending.close()
            self._scratch = Region(0, 0)
            self._scratch = self._slabs.scratch(payload_bytes + FOUND_BYTES)

    def _encode(self, job: _Job, plain: Addresses, coded: Addresses) -> NDArray[np.float32]:
        assert self._lane, "reserved before"
        device, count, found = self._device, len(plain), self._scratch.address
        with self._lane.turn() as stream:
            places = self._places(plain, coded)
            report = Buffer("found", found, (count, 2), (8, 4), "f32", device.name)
            device.call(device.cuda.cuMemsetD8Async, found, 0, 8 * count, stream)
            library = device.kernels.into(stream)
            encode_pages(library, job.shape, plain=places[0], coded=places[1], found=report)
            column = self._arguments.columns["found"]
            device.call(device.cuda.cuMemcpyAsync, column.ctypes.data, found, 8 * count, stream)
        return column[:count].view(np.float32).reshape(count, 2).copy()

    def _decode(self, job: _Job, plain: Addresses, coded: Addresses) -> None:
        assert self._lane, "reserved before"
        with self._lane.turn() as stream:
            places = self._places(plain, coded)
            library = self._device.kernels.into(stream)
            decode_pages(library, job.shape, plain=places[0], coded=places[1])

    def _places(self, plain: Addresses, coded: Addresses) -> list[Any]:
        count = len(plain)
        for name, addresses in (("plain", plain), ("coded", coded)):
            self._arguments.columns[name][:count] = addresses
        return [self._arguments.buffer(name, count) for name in ("plain", "coded")]


@dataclass(frozen=True, slots=True)
class _Job:
    """payloads: PIECE[n] with the payloads' length."""

    shape: BlockShape
    payloads: StructArray

    @property
    def lengths(self) -> NDArray[np.uint64]:
        return self.payloads["length"].astype(np.uint64)
