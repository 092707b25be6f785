"""The daemon's end of a session's mailbox: what its client gives back, and gets of its own, without waking anybody.

Each message is u8 numbers, little-endian, of leases that end. Or it is a Group that the client has got, or looked
up, by itself, behind a 0, or behind 2^64 - 1. When it is read is decided elsewhere (notice_polling.py). A client that
fills it while it is read delays nobody.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

MESSAGE_BYTES = 20 << 10
"""Of one message: the names of 512 blocks, and what else a Group says."""
MAILBOX_BYTES = 64 << 10
"""Linux doubles it and counts its own bookkeeping: a mailbox holds 4 of the longest messages, or 170 short ones. One
read takes what it holds, so a client that fills it meanwhile delays nobody."""
READ_AT_ONCE = 128
"""Messages."""
_LEASE = struct.Struct("<Q")


class Notices:
    """One of a session. theirs: the client's end, to be sent and closed. Raises OSError where descriptors are short."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAILBOX_BYTES)

    def messages(self) -> Iterator[bytes]:
        """Takes what is there. At its end there is nothing more to hear."""
        heard_bytes = 0
        for _ in range(READ_AT_ONCE):
            if heard_bytes > 2 * MAILBOX_BYTES:
                return
            try:
                data = self._ours.recv(MESSAGE_BYTES)
            except OSError:
                return
            if not data:
                return
            heard_bytes += len(data)
            yield data

    def close(self) -> None:
        """Reads no more."""
        self._ours.close()


def leases_of(data: bytes) -> list[int]:
    """Numbers of leases that end. What is no whole number says nothing."""
    return [lease for (lease,) in _LEASE.iter_unpack(data[: len(data) // _LEASE.size * _LEASE.size])]
