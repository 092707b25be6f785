"""Ends TCP connections that bring no credential within seconds, and counts them apart.

gRPC's own limit counts all connections, and keeps silent ones. guard.py checks calls. A connection
with an authenticated call is never ended here. After each look at most NEWCOMERS of the others
remain, none of them longer than NEWCOMER_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import time
from urllib.parse import unquote

import structlog

from tierd.config import split_address
from tierd.errors import Overloaded

log = structlog.get_logger(__name__)

NEWCOMERS = 64
NEWCOMER_S = 5.0
LOOK_S = 0.5
"""Time between two looks."""
Address = tuple[str, int]


class Unauthenticated:
    """The connections of one port. limit: of those with the credential."""

    def __init__(self, port: int, *, limit: int) -> None:
        self.port, self._limit = port, limit
        self._known: dict[Address, int] = {}  # to the socket's inode, 0 until a look has found it
        self._since: dict[int, float] = {}
        self._task = asyncio.create_task(self._look())

    def admit(self, peer: str) -> None:
        """Records that a call from this peer had the credential. peer: in gRPC's notation. Raises
        Overloaded."""
        address = split_address(unquote(peer).partition(":")[2])
        if address not in self._known and len(self._known) >= self._limit:
            raise Overloaded(f"server.tcp_listen: {self._limit} connections are open, which is the limit; close some")
        self._known.setdefault(address, 0)

    def close(self) -> None:
        """Stops looking."""
        self._task.cancel()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look_once()
            except OSError:
                pass  # no descriptors are left for a look
            except Exception:
                log.exception("connections not checked")

    async def _look_once(self) -> None:
        before = dict(self._known)
        with contextlib.ExitStack() as stack:
            found = await asyncio.to_thread(_connections, self.port, stack)
            for address, inode in before.items():
                now = os.fstat(found[address].fileno()).st_ino if address in found else -1
                if inode in (0, now) and now > 0:
                    self._known[address] = now
                else:
                    del self._known[address]
            self._end([connection for address, connection in found.items() if address not in self._known])

    def _end(self, newcomers: list[socket.socket]) -> None:
        now = time.monotonic()
        inodes = {os.fstat(newcomer.fileno()).st_ino: newcomer for newcomer in newcomers}
        self._since = {inode: self._since.get(inode, now) for inode in inodes}
        oldest = sorted(inodes, key=self._since.__getitem__)
        for i, inode in enumerate(oldest):
            if now - self._since[inode] > NEWCOMER_S or len(oldest) - i > NEWCOMERS:
                with contextlib.suppress(OSError):  # it has just ended by itself
                    inodes[inode].shutdown(socket.SHUT_RDWR)


def _connections(port: int, stack: contextlib.ExitStack) -> dict[Address, socket.socket]:
    """Duplicated descriptors of this process's connections to a port, by peer. The stack closes
    them. Raises OSError. gRPC offers no access to its own."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            one = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                host, peer_port, *_ = one.getpeername()
                found[host.removeprefix("::ffff:"), peer_port] = one
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTCONN):  # it was closed meanwhile, or it listens
                raise
    return found
