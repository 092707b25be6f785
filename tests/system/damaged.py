"""Finds blocks on disk and in memory and changes bits there, for tests that damage a daemon's data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.system.warm import Daemon
from tierd.core.formats.meta import META, META_BYTES, META_MAGIC
from tierd.testing import content_of
from tierd.tiers.store.slots import HEADER_BYTES

PAGE_BYTES = 4096


class Place(NamedTuple):
    """The start of a block: its header in a store, its page in memory."""

    path: Path
    offset: int


def slots(daemon: Daemon) -> dict[bytes, Place]:
    """Maps hash to slot for every whole header in the daemon's store."""
    found: dict[bytes, Place] = {}
    for path in sorted((daemon.root / "state" / "nvme-0").glob("seg-*.slots")):
        rows = np.fromfile(path, dtype=np.uint8).reshape(-1, PAGE_BYTES)[:, :META_BYTES]
        metas = np.ascontiguousarray(rows).view(META).reshape(-1)
        for at in np.flatnonzero(metas["magic"] == META_MAGIC).tolist():
            found[metas["hash"][at].tobytes()] = Place(path, at * PAGE_BYTES)
    return found


def pages(daemon: Daemon, names: np.ndarray, *, length: int = PAGE_BYTES) -> dict[bytes, Place]:
    """Maps hash to page for those of these blocks that the daemon's arena holds."""
    heads = {content_of(name, length)[:16].tobytes(): name.tobytes() for name in names}
    found: dict[bytes, Place] = {}
    for path in sorted(daemon.arena.rglob("[0-9]*.data")):
        rows = np.ascontiguousarray(np.fromfile(path, dtype=np.uint8).reshape(-1, PAGE_BYTES)[:, :16])
        for at, head in enumerate(rows.view("V16").reshape(-1).tolist()):
            if head in heads:
                found[heads[head]] = Place(path, at * PAGE_BYTES)
    return found


def flip(place: Place, at: int, bit: int = 0) -> None:
    """Changes one bit through the file, so that every process that maps it sees the change."""
    fd = os.open(place.path, os.O_RDWR)
    try:
        where = place.offset + at
        os.pwrite(fd, bytes([os.pread(fd, 1, where)[0] ^ 1 << bit]), where)
    finally:
        os.close(fd)


def copy(place: Place, length: int) -> bytes:
    """`length` bytes from a place on."""
    with place.path.open("rb") as file:
        file.seek(place.offset)
        return file.read(length)


def paste(place: Place, data: bytes, *, at: int = 0) -> None:
    """Writes bytes at a place."""
    fd = os.open(place.path, os.O_RDWR)
    try:
        os.pwrite(fd, data, place.offset + at)
    finally:
        os.close(fd)


assert HEADER_BYTES == PAGE_BYTES
