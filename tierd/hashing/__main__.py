"""`python -m tierd.hashing FD`: the hash process, started by `tierd.hashing.process` and by nobody else.

Purpose: sums of pages where they lie. Non-purpose: whose they are. Invariants: it maps memory for reading alone; it ends with its socket and with its parent; signals
that a terminal or a supervisor sends to all processes of a daemon are the daemon's to answer. Imports are few: it is to be there when the first client comes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

import xxhash

from tierd import children
from tierd.hashing import wire
from tierd.huge_pages import map_shared

NICE = 5
"""Behind the daemon's loop, which answers clients, where there are not processors enough."""


class Sums:
    """Memory by segment, and sums of it."""

    def __init__(self) -> None:
        self._segments: dict[int, memoryview] = {}

    def attach(self, segment: int, descriptor: int, length_bytes: int) -> None:
        """Maps a file for reading; what cannot be mapped is as if it had not been attached."""
        try:
            array: ctypes.Array[ctypes.c_ubyte] = map_shared(descriptor, length_bytes, mmap.PROT_READ)
            self._segments[segment] = memoryview(array).cast("B")
        except OSError:
            self._segments.pop(segment, None)
        finally:
            os.close(descriptor)

    def detach(self, segment: int) -> None:
        """Unmaps it."""
        self._segments.pop(segment, None)

    def of(self, pages: Iterator[wire.Page]) -> Iterator[list[int]]:
        """xxh3-64 of each slice of each page; none of a page that is not there."""
        for page in pages:
            memory, at, sums = self._segments.get(page.segment), page.offset, list[int]()
            for length in page.lengths if memory is not None else ():
                sums.append(xxhash.xxh3_64_intdigest(memory[at : at + length]))  # type: ignore[index]
                at += length
            yield sums


def main() -> None:
    """Serves until the socket ends."""
    peer, sums = children.begun_by_daemon(int(sys.argv[1])), Sums()
    with suppress(OSError):  # a sandbox may refuse it
        os.nice(NICE)
    peer.send(wire.READY)
    while True:
        message, descriptors, *_ = socket.recv_fds(peer, wire.MESSAGE_BYTES, 1)
        if message[:1] == wire.HASH:
            number, pages = wire.asked(message)
            for answer in wire.answers(number, sums.of(pages)):
                peer.send(answer)
        elif message[:1] == wire.ATTACH:
            segment, length_bytes = wire.attached(message)
            if descriptors:
                sums.attach(segment, descriptors[0], length_bytes)
        elif message[:1] == wire.DETACH:
            sums.detach(wire.detached(message))
        else:
            return


with suppress(BrokenPipeError, ConnectionResetError):  # the daemon has gone
    main()
