"""The daemon's end of a session's notices: releases and hit reports that wake no process.

A message has the numbers of leases that end, 8 bytes each, little-endian. Or it is a Group that the
client got or looked up without a call, after a 0 or 2^64 - 1. The module notice_polling.py decides
when it is read. A client that sends while it is read delays no other.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

MESSAGE_BYTES = 20 << 10
"""Limit of a message: 512 block names and the Group's other fields."""
NOTICE_BUFFER_BYTES = 64 << 10
"""The socket's buffer; Linux doubles it and counts its own bookkeeping.

It holds 4 of the longest messages, or 170 short ones. One read takes no more, so a client that
fills it meanwhile delays no other."""
READ_AT_ONCE = 128
"""Messages in one read."""
_LEASE = struct.Struct("<Q")


class Notices:
    """The notices of one session. theirs: the client's end, to be sent and closed. Raises OSError
    if no descriptors are left."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NOTICE_BUFFER_BYTES)

    def messages(self) -> Iterator[bytes]:
        """Yields the waiting messages, up to the limits of one read."""
        read_bytes = 0
        for _ in range(READ_AT_ONCE):
            if read_bytes > 2 * NOTICE_BUFFER_BYTES:
                return
            try:
                data = self._ours.recv(MESSAGE_BYTES)
            except OSError:
                return
            if not data:
                return
            read_bytes += len(data)
            yield data

    def close(self) -> None:
        """Closes the daemon's end."""
        self._ours.close()


def leases_of(data: bytes) -> list[int]:
    """Numbers of leases that end. An incomplete number is ignored."""
    return [lease for (lease,) in _LEASE.iter_unpack(data[: len(data) // _LEASE.size * _LEASE.size])]
