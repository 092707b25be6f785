"""Reads from files of stores straight into slabs.

`DirectReads` opens files by number and carries out READs. The daemon compares the sums, and decides
whether to use direct reads. When a call returns, none of its reads is in flight. A slab is
registered at its first read, and deregistered before it is unmapped. Sums are of the bytes on the
device after the read. A failed read has none.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tierd.core.formats.model import PAGE_ALIGN_BYTES, StructArray
from tierd.errors import InvalidArgument
from tierd.gpu.cufile import LIBRARIES, CuFile
from tierd.gpu.device import Device
from tierd.gpu.probe import direct_by
from tierd.gpu.protocol import READ, SliceTable, pack_sums
from tierd.gpu.regions import Region, Regions
from tierd.gpu.slabs import Slabs
from tierd.gpu.sums import Sums

READERS = 16
"""Reads in flight at one time: the default of the daemon's stores."""
NO_TABLE: SliceTable = np.zeros(0, np.uint64)


class DirectReads:
    """Direct reads of one GPU. Threads may share it. The first probe opens cuFile."""

    def __init__(self, device: Device, slabs: Slabs, sums: Sums) -> None:
        self._device, self._slabs, self._sums = device, slabs, sums
        self._files = Regions("file")
        self._readers = ThreadPoolExecutor(READERS, "tierd-gpu-read", initializer=device.enter)
        self._registering = threading.Lock()
        self._library: CuFile | None = None

    def probe(self, descriptor: int, by: str = "auto") -> str:
        """As `direct_by`. by: the setting `direct_reads`, which the first probe decides."""
        with self._registering:
            self._library = self._library or LIBRARIES[by]()
        return direct_by(self._library, self._device, self._slabs, descriptor)

    def open_file(self, number: int, descriptor: int) -> None:
        """Open a file; the descriptor stays the caller's. Raises InvalidArgument, Unsupported."""
        library, own = self._cufile(), os.dup(descriptor)
        region = Region(0, os.fstat(own).st_size)
        region.ending.callback(os.close, own)
        try:
            region.address = library.register_file(own)
            region.ending.callback(library.deregister_file, region.address)
            self._files.add(number, region)
        except BaseException:
            region.ending.close()
            raise

    def close_file(self, number: int) -> None:
        """Close a file after its reads have ended. Raises InvalidArgument."""
        self._files.end(number)

    def read(self, packed: bytes) -> dict[str, Any]:
        """READ [n]: slice tables of the bytes on the device, and faults of rows without one. Raises
        InvalidArgument before a byte moves, Unsupported, TierFailed."""
        reads = np.frombuffer(packed, READ)
        _check(reads)
        whole = reads.copy()
        whole["length"] = reads["room"]
        with self._files.used(whole) as files, self._slabs.regions.used(whole) as slabs:
            self._register(slabs.regions)
            jobs = zip(files.regions, slabs.regions, reads, strict=True)
            said = self._readers.map(self._read_one, jobs)
            faults = {row: fault for row, fault in enumerate(said) if fault}
            good = np.setdiff1d(np.arange(len(reads)), list(faults)).astype(np.intp)
            tables = [NO_TABLE] * len(reads)
            for row, table in zip(good.tolist(), self._sums.of(slabs.addresses[good], reads[good]), strict=True):
                tables[row] = table
        return pack_sums(tables) | {"faults": list(faults.items())}

    def end_all(self) -> None:
        """Close all files; drop slabs before `close`."""
        self._files.end_all()

    def close(self) -> None:
        """No read may follow."""
        self._readers.shutdown()
        if self._library is not None:
            self._library.close()

    def _read_one(self, job: tuple[Region, Region, np.void]) -> str:
        """Read one block; returns the fault, or "". A fault of this program ends the process."""
        file, slab, read = job
        length, at, offset = int(read["room"]), int(read["file_offset"]), int(read["slab_offset"])
        return self._cufile().read(file.address, length, at=at, memory=slab.address, offset=offset) if length else ""

    def _register(self, slabs: list[Region]) -> None:
        library = self._cufile()
        with self._registering:
            for slab in slabs:
                if not slab.is_registered:
                    library.register_memory(slab.address, slab.length_bytes)
                    slab.is_registered = True
                    slab.ending.callback(library.deregister_memory, slab.address)

    def _cufile(self) -> CuFile:
        if self._library is None:
            raise InvalidArgument("direct reads: not probed yet; probe first")
        return self._library


def _check(reads: StructArray) -> None:
    """Raises InvalidArgument."""
    for name in ("file_offset", "slab_offset", "room"):
        wrong = np.flatnonzero(reads[name] % PAGE_ALIGN_BYTES)
        if len(wrong):
            raise InvalidArgument(
                f"read {wrong[0]}: {name} {reads[name][wrong[0]]} is no multiple of {PAGE_ALIGN_BYTES}"
            )
    short = np.flatnonzero(reads["room"] < reads["length"])
    if len(short):
        row = reads[short[0]]
        raise InvalidArgument(
            f"read {short[0]}: a block of {row['length']} bytes is longer than its space of {row['room']}; round up"
        )
