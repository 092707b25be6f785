"""Ranges of addresses by number: slabs, host memories, or files, whose address is a handle.

Users are counted, so that no region ends during a copy. Numbers and offsets of pieces are checked
and resolved here. The region of a returned address stays until its user leaves. A number has one
region at a time. Threads may share it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.model import StructArray
from tierd.errors import InvalidArgument, TierFailed

Addresses = NDArray[np.uint64]
WAIT_S = 600.0
"""The last resort: the caller's patience ends much earlier."""


@dataclass(slots=True)
class Region:
    """address: its begin; is_direct: copy engines reach it directly.
    is_registered: disks do too; ending: releases it."""

    address: int
    length_bytes: int
    is_direct: bool = True
    is_registered: bool = False
    users: int = 0
    ending: ExitStack = field(default_factory=ExitStack)


class Regions:
    """Regions of one kind, which errors name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._regions: dict[int, Region] = {}
        self._changed = threading.Condition()

    def add(self, number: int, region: Region) -> None:
        """Add a region for use. Raises InvalidArgument if the number is taken."""
        with self._changed:
            if number in self._regions:
                raise InvalidArgument(f"{self._kind} {number}: exists already; end it first")
            self._regions[number] = region

    def end(self, number: int) -> None:
        """End a region after its last user. Raises InvalidArgument, and errors of its release."""
        with self._changed:
            region = self._find(number)
            del self._regions[number]
            if not self._changed.wait_for(lambda: not region.users, WAIT_S):
                raise TierFailed(f"{self._kind} {number}: still in use after {WAIT_S:g} s; the GPU hangs")
        region.ending.close()

    def end_all(self) -> None:
        """`end` every region."""
        for number in list(self._regions):
            self.end(number)

    @contextmanager
    def used(self, pieces: StructArray) -> Iterator[Used]:
        """Addresses of pieces, valid during the block. Raises InvalidArgument if not in a region."""
        numbers, each = np.unique(pieces[self._kind], return_inverse=True)
        with self._changed:
            regions = [self._find(int(number)) for number in numbers]
            for region in regions:
                region.users += 1
        try:
            yield Used(self._kind, pieces, regions, each)
        finally:
            with self._changed:
                for region in regions:
                    region.users -= 1
                self._changed.notify_all()

    def _find(self, number: int) -> Region:
        if number not in self._regions:
            raise InvalidArgument(f"{self._kind} {number}: not there; make, adopt or attach it first")
        return self._regions[number]


class Used:
    """The regions of pieces. addresses: u8[n]; regions: of each; is_direct: of all of them."""

    def __init__(self, kind: str, pieces: StructArray, regions: list[Region], each: NDArray[np.intp]) -> None:
        starts = np.array([region.address for region in regions], np.uint64)[each]
        ends = np.array([region.length_bytes for region in regions], np.uint64)[each]
        offsets = pieces[f"{kind}_offset"]
        # A difference, since a sum might pass 2**64.
        wrong = np.flatnonzero((offsets > ends) | (pieces["length"] > ends - np.minimum(offsets, ends)))
        if len(wrong):
            piece, end = pieces[wrong[0]], ends[wrong[0]]
            raise InvalidArgument(
                f"piece {wrong[0]}: {piece['length']} bytes at {offsets[wrong[0]]} of {kind} {piece[kind]}, which has {end}"
            )
        self.addresses: Addresses = starts + offsets
        self.regions = [regions[i] for i in each.tolist()]
        self.is_direct = all(region.is_direct for region in regions)
